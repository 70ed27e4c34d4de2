"""Triton kernels of the forward pass. Layouts: ``engine.kv_cache`` and ``engine.batch_layout``; all sums are fp32.

They run on CUDA, and on a CPU under ``TRITON_INTERPRET=1``, as tests without a GPU do.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(residual, delta, weight, out, size, eps, HAS_DELTA: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row: residual += delta; out = residual / rms(residual) * weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < size
    x = tl.load(residual + row * size + column, mask=inside, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * size + column, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    y = x * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate_up, out, size, WIDTH: tl.constexpr):
    """One program a row and WIDTH columns: out = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_store_kernel(
    qkv,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    slots,
    queries,
    keys,
    values,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    WIDTH: tl.constexpr,  # head_dim / 2, rounded up to a power of two
):
    """One program a row and head of q, k or v. A negative slot marks a row of padding, which is not written."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, WIDTH)
    inside = i < half
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    first = tl.load(source + i, mask=inside, other=0.0)
    second = tl.load(source + half + i, mask=inside, other=0.0)
    slot = tl.load(slots + row)
    block = slot // BLOCK_LEN
    offset = slot % BLOCK_LEN
    if head >= HEADS + KV_HEADS:
        if slot >= 0:
            place = ((block * KV_HEADS + head - HEADS - KV_HEADS) * BLOCK_LEN + offset) * HEAD_DIM
            tl.store(values + place + i, first, mask=inside)
            tl.store(values + place + half + i, second, mask=inside)
    else:
        x = first.to(tl.float32)  # new names: a name has one type in all branches of a kernel
        y = second.to(tl.float32)
        if HAS_NORMS:
            norm = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / HEAD_DIM + eps)
            weight = k_norm
            if head < HEADS:
                weight = q_norm
            x = x * norm * tl.load(weight + i, mask=inside, other=0.0)
            y = y * norm * tl.load(weight + half + i, mask=inside, other=0.0)
        c = tl.load(cos + row * half + i, mask=inside, other=0.0)
        s = tl.load(sin + row * half + i, mask=inside, other=0.0)
        turned_first = x * c - y * s
        turned_second = y * c + x * s
        if head < HEADS:
            place = (row * HEADS + head) * HEAD_DIM
            tl.store(queries + place + i, turned_first * scale, mask=inside)
            tl.store(queries + place + half + i, turned_second * scale, mask=inside)
        elif slot >= 0:
            place = (block * KV_HEADS + head - HEADS) * HEAD_DIM * BLOCK_LEN + offset
            element = keys.dtype.element_ty
            tl.store(keys + place + i * BLOCK_LEN, turned_first.to(element), mask=inside)
            tl.store(keys + place + (half + i) * BLOCK_LEN, turned_second.to(element), mask=inside)


@triton.jit(do_not_specialize=["table_width"])  # it changes from pass to pass, and each specialisation would be compiled
def attention_kernel(
    queries,
    keys,
    values,
    starts,
    base_lens,
    tables,
    table_width,
    out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    TILE: tl.constexpr,  # queries of a program, counted in (row, head of the group) order
    WIDTH: tl.constexpr,  # head_dim, rounded up to a power of two
):
    """One program a span, KV head and tile of queries; online softmax over blocks (arXiv 2205.14135). Positions from
    ``seen_len`` on may hold stale values of an earlier owner of the block. They are not loaded, as 0 * NaN is NaN."""
    span = tl.program_id(0)
    kv_head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    start = tl.load(starts + span)
    num_queries = (tl.load(starts + span + 1) - start) * group
    begin = tl.program_id(2) * TILE
    if begin < num_queries:
        index = begin + tl.arange(0, TILE)
        valid = index < num_queries
        base_len = tl.load(base_lens + span)
        position = base_len + index // group
        place = ((start + index // group).to(tl.int64) * HEADS + kv_head * group + index % group) * HEAD_DIM
        d = tl.arange(0, WIDTH)
        in_head = d < HEAD_DIM
        lane = tl.arange(0, BLOCK_LEN)
        element = keys.dtype.element_ty
        q = tl.load(queries + place[:, None] + d[None, :], mask=valid[:, None] & in_head[None, :], other=0.0).to(element)
        highest = tl.full([TILE], -float("inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mixed = tl.zeros([TILE, WIDTH], tl.float32)
        seen_len = base_len + (tl.minimum(begin + TILE, num_queries) - 1) // group + 1
        for first in range(0, seen_len, BLOCK_LEN):
            block = tl.load(tables + span * table_width + first // BLOCK_LEN).to(tl.int64) * KV_HEADS + kv_head
            k = tl.load(keys + (block * HEAD_DIM + d[:, None]) * BLOCK_LEN + lane[None, :], mask=in_head[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee")
            scores = tl.where(first + lane[None, :] <= position[:, None], scores, -float("inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))  # finite: every query sees position 0, in the first block
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(highest - higher)
            v = tl.load(
                values + (block * BLOCK_LEN + lane[:, None]) * HEAD_DIM + d[None, :],
                mask=in_head[None, :] & (first + lane[:, None] < seen_len),
                other=0.0,
            )
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(element), v, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            highest = higher
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] + d[None, :], result, mask=valid[:, None] & in_head[None, :])
