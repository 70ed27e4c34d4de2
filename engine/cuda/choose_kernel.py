"""The Triton kernel that chooses one token per row by the rule of ``engine.sampling``, after ``edit_kernel``.

A row is computed by one program in one order, so that its result does not depend on other rows. Its bits are those of the
CPU: no product is fused with a sum (the launch forbids it), quotients are rounded correctly, masses of top-p are integers,
and logarithms in float64 are rounded once to float32.
"""

import triton
import triton.language as tl

from engine.cuda.edit_kernel import (
    BLOCK,
    EDITED,
    FIELDS,
    GRAMMAR,
    MASKED,
    NUM_BAD,
    NUM_MASKED,
    add_penalties_and_bias,
    find_peaks,
    float_at,
    forbid,
    logits_at,
    start_of_edits,
)
from engine.cuda.packed_rows import Field
from engine.logits import EXP2, LEAST_Z, LOG2_E, ONE_BITS

KEY = tl.constexpr(int(Field.KEY))
TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
TOP_K = tl.constexpr(int(Field.TOP_K))
TOP_P = tl.constexpr(int(Field.TOP_P))
FLOOR = tl.constexpr(int(Field.FLOOR))
FILTERED = tl.constexpr(int(Field.FILTERED))
_LOWEST_TEMPERATURE = tl.constexpr(1e-6)
_SLACK = tl.constexpr(1e-5)  # exceeds the float32 error of a bound
_LIKELY_Z = tl.constexpr(-12.0)  # above it lie nearly always all tokens that top-k and top-p keep
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_INFINITY = tl.constexpr(float("inf"))
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_FIRST_BLOCK = tl.constexpr(1 << 32)
_LOG2_E = tl.constexpr(LOG2_E)
_LEAST_Z = tl.constexpr(LEAST_Z)
_SHIFT = tl.constexpr(ONE_BITS - 23)
_ONE = tl.constexpr(2.0**ONE_BITS)
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(value) for value in EXP2)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _exponential(bits):
    return -tl.log(((bits >> 32).to(tl.float64) + 0.5) * 2.3283064365386963e-10)  # 2 ** -32


@triton.jit
def _block_bits(key, block):
    return _mix(key + (block.to(tl.uint64) + _FIRST_BLOCK) * _GAMMA)


@triton.jit
def _weight(z):
    """``engine.logits.weights``, int64"""
    t = tl.maximum(z, _LEAST_Z) * _LOG2_E
    whole = t.to(tl.int32).to(tl.float32)
    whole = tl.where(whole > t, whole - 1.0, whole)  # floor, whose instruction here takes tiny numbers for zero
    f = t - whole
    p = ((((f * _C5 + _C4) * f + _C3) * f + _C2) * f + _C1) * f + 1.0
    shift = tl.minimum(-whole, 63.0).to(tl.int64)
    return ((p * 8388608.0).to(tl.int64) << _SHIFT) >> shift


@triton.jit
def _relative(x, highest, temperature):
    return tl.div_rn(x - highest, temperature)


@triton.jit
def _collect(source, edited, is_edited, num_columns, highest, temperature, cutoff, likely, WIDTH: tl.constexpr):
    """Writes z of the columns that reach the cutoff to ``likely``. Returns their number and mass, and the mass of all."""
    num = 0
    mass = tl.full([], 0, tl.int64)
    total = tl.full([], 0, tl.int64)
    for begin in range(0, num_columns, WIDTH):
        column = begin + tl.arange(0, WIDTH)
        z = _relative(logits_at(source, edited, is_edited, column, column < num_columns), highest, temperature)
        weight = _weight(z)
        reaches = z >= cutoff
        tl.store(likely + num + tl.cumsum(reaches.to(tl.int32), 0) - 1, z, mask=reaches)
        num += tl.sum(reaches.to(tl.int32), 0)
        mass += tl.sum(tl.where(reaches, weight, 0), 0)
        total += tl.sum(weight, 0)
    tl.debug_barrier()
    return num, mass, total


@triton.jit
def _mass_from(z_values, num, floor, WIDTH: tl.constexpr):
    mass = tl.full([], 0, tl.int64)
    for begin in range(0, num, WIDTH):
        i = begin + tl.arange(0, WIDTH)
        z = tl.load(z_values + i, mask=i < num, other=-float("inf"))
        mass += tl.sum(tl.where(z >= floor, _weight(z), 0), 0)
    return mass


@triton.jit
def _largest_reaching(z_values, num, goal, BY_MASS: tl.constexpr, WIDTH: tl.constexpr):
    """The largest of the values such that those from it up have a mass, or a number, of ``goal``. All together have it.
    Bisects between values that exist, so it ends."""
    low = tl.full([], _INFINITY, tl.float32)
    high = tl.full([], -_INFINITY, tl.float32)
    for begin in range(0, num, WIDTH):
        i = begin + tl.arange(0, WIDTH)
        low = tl.minimum(low, tl.min(tl.load(z_values + i, mask=i < num, other=float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.load(z_values + i, mask=i < num, other=-float("inf")), 0))
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        reached = tl.full([], 0, tl.int64)
        above = tl.full([], _INFINITY, tl.float32)
        below = tl.full([], -_INFINITY, tl.float32)
        for begin in range(0, num, WIDTH):
            i = begin + tl.arange(0, WIDTH)
            z = tl.load(z_values + i, mask=i < num, other=-float("inf"))
            counts = z >= middle
            if BY_MASS:
                reached += tl.sum(tl.where(counts, _weight(z), 0), 0)
            else:
                reached += tl.sum(counts.to(tl.int64), 0)
            above = tl.minimum(above, tl.min(tl.where(counts, z, float("inf")), 0))
            below = tl.maximum(below, tl.max(tl.where(counts, -float("inf"), z), 0))
        is_enough = reached.to(tl.float64) >= goal
        low = tl.where(is_enough, above, low)
        high = tl.where(is_enough, high, below)
    return low


@triton.jit(do_not_specialize=["likely_at", "peaks_at", "wants_confidence", "wants_margin"])
def choose_kernel(
    logits,
    stride,
    packed,
    starts,
    blocks,  # int64 [blocks]: token id / 64 of each
    token_ids,  # int64 [columns]
    num_columns,
    num_blocks,
    scratch,
    likely_at,  # from here on z [filtered rows, columns], written
    peaks_at,
    found,  # fp64 [rows, 5]: token, largest logit, probability, logit, margin
    wants_confidence,  # 0 or 1
    wants_margin,
    ALL_BLOCKS: tl.constexpr,  # num_blocks, rounded up to a power of two
    BLOCKS: tl.constexpr,
    BOUNDS: tl.constexpr,  # bounds computed at once
):
    """One program a row. Blocks are looked into by descending bound of their scores, until none can hold a better one."""
    row = tl.program_id(0).to(tl.int64)
    record = packed + row * FIELDS
    place = tl.load(record + EDITED)
    is_edited = place >= 0
    source = logits + row * stride
    own = scratch + tl.maximum(place, 0) * num_columns
    peaks = scratch + peaks_at + row * num_blocks
    found += row * 5
    WIDTH: tl.constexpr = BLOCKS * BLOCK
    every = tl.arange(0, ALL_BLOCKS)
    bounds = tl.load(peaks + every, mask=every < num_blocks, other=-float("inf"))
    has_nan = tl.max((bounds != bounds).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(bounds != bounds, -float("inf"), bounds), 0)
    if (highest == -float("inf")) & (has_nan == 0) & (tl.load(record + GRAMMAR) > 0) & (tl.load(record + NUM_BAD) > 0):
        tl.debug_barrier()
        # Only bad words are left. What the grammar demands comes first: the row is edited again, without them.
        start_of_edits(packed, record, source, own, 0, num_columns, WIDTH)
        add_penalties_and_bias(packed, record, own, 0, num_columns, WIDTH)
        forbid(packed, record, MASKED, NUM_MASKED, own, 0, num_columns, WIDTH)
        tl.debug_barrier()
        find_peaks(source, own, is_edited, starts, 0, num_blocks, peaks, BLOCKS)
        tl.debug_barrier()
        bounds = tl.load(peaks + every, mask=every < num_blocks, other=-float("inf"))
        has_nan = tl.max((bounds != bounds).to(tl.int32), 0) > 0
        highest = tl.max(tl.where(bounds != bounds, -float("inf"), bounds), 0)
    tl.store(found, 0.0)
    tl.store(found + 2, 0.0)
    tl.store(found + 3, -float("inf"))
    tl.store(found + 4, 0.0)
    tl.store(found + 1, tl.where(has_nan, float("nan"), highest).to(tl.float64))
    if (has_nan == 0) & (highest > -float("inf")) & (highest < float("inf")):
        key = tl.load(record + KEY).to(tl.uint64, bitcast=True)
        asked = float_at(record + TEMPERATURE).to(tl.float32)
        is_noisy = asked > 0.0
        temperature = tl.where(is_noisy, tl.maximum(asked, _LOWEST_TEMPERATURE), 1.0)
        floor = tl.where(is_noisy, float_at(record + FLOOR).to(tl.float32), -float("inf"))
        filtered = tl.load(record + FILTERED)
        near = scratch + likely_at + tl.maximum(filtered, 0) * num_columns
        num_near = 0
        if filtered >= 0:
            top_k = tl.load(record + TOP_K)
            top_p = float_at(record + TOP_P)
            num_near, mass, total = _collect(
                source, own, is_edited, num_columns, highest, temperature, _LIKELY_Z, near, WIDTH
            )
            has_top_k = top_k < num_columns
            suffices = tl.where(has_top_k, num_near >= top_k, mass.to(tl.float64) >= total.to(tl.float64) * top_p)
            if suffices == 0:
                num_near, mass, total = _collect(
                    source, own, is_edited, num_columns, highest, temperature, _LOWEST, near, WIDTH
                )
            if has_top_k & (top_k <= num_near):
                least = _largest_reaching(near, num_near, top_k.to(tl.float64), False, WIDTH)
                floor = tl.maximum(floor, least)
                total = _mass_from(near, num_near, least, WIDTH)
            if top_p < 1.0:
                floor = tl.maximum(floor, _largest_reaching(near, num_near, total.to(tl.float64) * top_p, True, WIDTH))
        if is_noisy:
            tl.debug_barrier()
            for begin in range(0, num_blocks, BOUNDS):
                i = begin + tl.arange(0, BOUNDS)
                z = _relative(tl.load(peaks + i, mask=i < num_blocks, other=-float("inf")), highest, temperature)
                first_s = _exponential(_block_bits(key, tl.load(blocks + i, mask=i < num_blocks, other=0))) * 0.015625
                bound = (z.to(tl.float64) - tl.log(first_s) + _SLACK).to(tl.float32)
                tl.store(peaks + i, tl.where(z >= floor, bound, -float("inf")), mask=i < num_blocks)
            tl.debug_barrier()
            bounds = tl.load(peaks + every, mask=every < num_blocks, other=-float("inf"))
        lane = tl.arange(0, BLOCK)
        best = tl.full([], -_INFINITY, tl.float64)
        second = tl.full([], -_INFINITY, tl.float64)
        winner = tl.full([], 0, tl.int32)
        chosen_x = tl.full([], 0.0, tl.float32)
        top = tl.max(bounds, 0)
        while top > tl.where(wants_margin != 0, second, best):
            block = tl.argmax(bounds, 0)
            start = tl.load(starts + block)
            column = start + lane
            inside = column < tl.load(starts + block + 1)
            x = logits_at(source, own, is_edited, column, inside)
            z = _relative(x, highest, temperature)
            score = x.to(tl.float64)
            if is_noisy:
                bits = _block_bits(key, tl.load(blocks + block))
                token = tl.load(token_ids + column, mask=inside, other=0)
                later_s = _exponential(_mix(key + token.to(tl.uint64) * _GAMMA))
                is_first = (token % BLOCK).to(tl.uint64) == bits % BLOCK
                arrival = _exponential(bits) * 0.015625 + tl.where(is_first, 0.0, later_s)
                noise = (-tl.log(arrival)).to(tl.float32)
                score = z.to(tl.float64) + noise.to(tl.float64)
            score = tl.where(inside & (z >= floor), score, -float("inf"))
            own_best = tl.max(score, 0)
            own_winner = tl.min(tl.where(score == own_best, column, 2147483647), 0)
            own_second = tl.max(tl.where(column == own_winner, -float("inf"), score), 0)
            wins = (own_best > best) | ((own_best == best) & (own_winner < winner))
            second = tl.where(wins, tl.maximum(best, own_second), tl.maximum(second, own_best))
            chosen_x = tl.where(wins, tl.max(tl.where(column == own_winner, x, -float("inf")), 0), chosen_x)
            winner = tl.where(wins, own_winner, winner)
            best = tl.where(wins, own_best, best)
            bounds = tl.where(every == block, -float("inf"), bounds)
            top = tl.max(bounds, 0)
        tl.store(found, tl.load(token_ids + winner).to(tl.float64))
        tl.store(found + 3, chosen_x.to(tl.float64))
        tl.store(found + 4, best - second)
        if wants_confidence != 0:
            if filtered >= 0:
                mass = _mass_from(near, num_near, floor, WIDTH)
            else:
                mass = tl.full([], 0, tl.int64)
                for begin in range(0, num_columns, WIDTH):
                    column = begin + tl.arange(0, WIDTH)
                    x = logits_at(source, own, is_edited, column, column < num_columns)
                    z = _relative(x, highest, temperature)
                    mass += tl.sum(tl.where(z >= floor, _weight(z), 0), 0)
            own_z = _relative(chosen_x, highest, temperature)
            share = tl.exp(own_z.to(tl.float64)) / mass.to(tl.float64)
            tl.store(found + 2, share * _ONE)
