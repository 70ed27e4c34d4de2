"""Triton kernels of early exit (``engine.cuda.exit_scores``). All sums are fp32."""

import triton
import triton.language as tl


@triton.jit
def watched_norm_kernel(residual, delta, places, out, size, eps, HAS_DELTA: tl.constexpr, WIDTH: tl.constexpr):
    """One program a watched row: out = (residual + delta) / rms of the sum, which stay as they are; without a delta, the
    row as it is."""
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(places + number)
    column = tl.arange(0, WIDTH)
    inside = column < size
    x = tl.load(residual + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row * size + column, mask=inside, other=0.0).to(tl.float32)
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    tl.store(out + number * size + column, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def draft_logit_kernel(x, head, places, found, out, size, FOUND: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row: the best token and its logit, of ``found``, and the logit of the draft token: x . head[draft],
    rounded to the dtype as products are. out [rows, 3]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < size
    draft = tl.load(places + tl.num_programs(0) + row)
    own = tl.load(head + draft * size + column, mask=inside, other=0.0).to(tl.float32)
    z = tl.sum(tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32) * own, 0)
    tl.store(out + row * 3, tl.load(found + row * FOUND))
    tl.store(out + row * 3 + 1, tl.load(found + row * FOUND + 3))
    tl.store(out + row * 3 + 2, z.to(x.dtype.element_ty).to(tl.float64))
