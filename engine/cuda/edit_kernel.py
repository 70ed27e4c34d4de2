"""The Triton kernel of ``engine.logits.edit``: edits rows of logits, and finds the largest logit of each block of 64 tokens.

The parameters are those of ``packed_rows``. Values that several threads write and others read have a barrier between them.
"""

import triton
import triton.language as tl

from engine.cuda.packed_rows import NUM_FIELDS, Field
from engine.noise import BLOCK_LEN

FIELDS = tl.constexpr(NUM_FIELDS)
EDITED = tl.constexpr(int(Field.EDITED))
REPETITION = tl.constexpr(int(Field.REPETITION))
FREQUENCY = tl.constexpr(int(Field.FREQUENCY))
PRESENCE = tl.constexpr(int(Field.PRESENCE))
COUNTED = tl.constexpr(int(Field.COUNTED))
NUM_COUNTED = tl.constexpr(int(Field.NUM_COUNTED))
NUM_KNOWN = tl.constexpr(int(Field.NUM_KNOWN))
DRAFTS = tl.constexpr(int(Field.DRAFTS))
NUM_DRAFTS = tl.constexpr(int(Field.NUM_DRAFTS))
BIASED = tl.constexpr(int(Field.BIASED))
NUM_BIASED = tl.constexpr(int(Field.NUM_BIASED))
ALLOWED = tl.constexpr(int(Field.ALLOWED))
NUM_ALLOWED = tl.constexpr(int(Field.NUM_ALLOWED))
MASKED = tl.constexpr(int(Field.MASKED))
NUM_MASKED = tl.constexpr(int(Field.NUM_MASKED))
BAD = tl.constexpr(int(Field.BAD))
NUM_BAD = tl.constexpr(int(Field.NUM_BAD))
GRAMMAR = tl.constexpr(int(Field.GRAMMAR))
BLOCK = tl.constexpr(BLOCK_LEN)


@triton.jit
def float_at(at):
    return tl.load(at).to(tl.float64, bitcast=True)


@triton.jit
def logits_at(source, edited, is_edited, columns, inside):
    """Logits of columns, -inf where there is none. ``edited``: the row after its edits, where it has any."""
    own = tl.load(edited + columns, mask=inside & is_edited, other=-float("inf"))
    plain = tl.load(source + columns, mask=inside & (is_edited == 0), other=-float("inf")).to(tl.float32)
    return tl.where(is_edited, own, plain)


@triton.jit
def find_peaks(source, edited, is_edited, starts, first_block, stop_block, peaks, BLOCKS: tl.constexpr):
    """The largest logit of each block, NaN if it holds one."""
    lane = tl.arange(0, BLOCK)
    for first in range(first_block, stop_block, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        exists = block < stop_block
        start = tl.load(starts + block, mask=exists, other=0)
        stop = tl.load(starts + block + 1, mask=exists, other=0)
        column = start[:, None] + lane[None, :]
        x = logits_at(source, edited, is_edited, column, column < stop[:, None])
        has_nan = tl.max((x != x).to(tl.int32), 1) > 0
        highest = tl.max(tl.where(x != x, -float("inf"), x), 1)
        tl.store(peaks + block, tl.where(has_nan, float("nan"), highest), mask=exists)


@triton.jit
def forbid(packed, record, LIST: tl.constexpr, NUM: tl.constexpr, row, first, stop, WIDTH: tl.constexpr):
    at = packed + tl.load(record + LIST)
    num = tl.load(record + NUM)
    for begin in range(0, num, WIDTH):
        i = begin + tl.arange(0, WIDTH)
        column = tl.load(at + i, mask=i < num, other=-1)
        tl.store(row + column, -float("inf"), mask=(column >= first) & (column < stop))


@triton.jit
def start_of_edits(packed, record, source, row, first, stop, WIDTH: tl.constexpr):
    """Copies columns first to stop, as float32, but those that grammar or list do not allow. Everything that comes before
    these masks leaves -inf as it is, so that they may be first."""
    grammar = tl.load(record + GRAMMAR)
    num_allowed = tl.load(record + NUM_ALLOWED)
    for begin in range(first, stop, WIDTH):
        column = begin + tl.arange(0, WIDTH)
        inside = column < stop
        x = tl.load(source + column, mask=inside & (num_allowed == 0), other=-float("inf")).to(tl.float32)
        word = tl.load(packed + grammar + column // 64, mask=inside & (grammar > 0), other=-1)
        tl.store(row + column, tl.where((word >> (column % 64)) & 1 == 1, x, -float("inf")), mask=inside)
    tl.debug_barrier()
    at = packed + tl.load(record + ALLOWED)
    for begin in range(0, num_allowed, WIDTH):
        i = begin + tl.arange(0, WIDTH)
        column = tl.load(at + i, mask=i < num_allowed, other=-1)
        inside = (column >= first) & (column < stop)
        word = tl.load(packed + grammar + column // 64, mask=inside & (grammar > 0), other=-1)
        is_allowed = inside & ((word >> (column % 64)) & 1 == 1)
        tl.store(row + column, tl.load(source + column, mask=is_allowed, other=0.0).to(tl.float32), mask=is_allowed)
    tl.debug_barrier()


@triton.jit
def add_penalties_and_bias(packed, record, row, first, stop, WIDTH: tl.constexpr):
    repetition = float_at(record + REPETITION).to(tl.float32)
    frequency = float_at(record + FREQUENCY).to(tl.float32)
    presence = float_at(record + PRESENCE).to(tl.float32)
    at = packed + tl.load(record + COUNTED)
    num = tl.load(record + NUM_COUNTED)
    num_known = tl.load(record + NUM_KNOWN)
    drafts = packed + tl.load(record + DRAFTS)
    num_drafts = tl.load(record + NUM_DRAFTS)
    for begin in range(0, num, WIDTH):
        i = begin + tl.arange(0, WIDTH)
        column = tl.load(at + i, mask=i < num, other=-1)
        generated = tl.load(at + num + i, mask=i < num, other=0)
        for draft in range(num_drafts):
            generated += (column == tl.load(drafts + draft)).to(tl.int64)
        inside = (column >= first) & (column < stop)
        x = tl.load(row + column, mask=inside, other=0.0)
        repeated = tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition))
        x = tl.where((i < num_known) | (generated > 0), repeated, x)
        x = x - frequency * generated.to(tl.float32) - presence * (generated > 0).to(tl.float32)
        tl.store(row + column, x, mask=inside)
    tl.debug_barrier()
    at = packed + tl.load(record + BIASED)
    num = tl.load(record + NUM_BIASED)
    for begin in range(0, num, WIDTH):
        i = begin + tl.arange(0, WIDTH)
        column = tl.load(at + i, mask=i < num, other=-1)
        added = tl.load(at + num + i, mask=i < num, other=0).to(tl.float64, bitcast=True).to(tl.float32)
        inside = (column >= first) & (column < stop)
        x = tl.load(row + column, mask=inside, other=0.0)
        tl.store(row + column, x + added, mask=inside)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["peaks_at"])
def peaks_kernel(
    logits,  # [rows, stride], any floating dtype
    stride,
    packed,  # int64, of PackedRows
    starts,  # int32 [blocks + 1]: first column of each block of noise that the columns hold a token of
    num_columns,
    num_blocks,
    scratch,  # fp32: edited rows [edited rows, columns], ...
    peaks_at,  # ... and from here on peaks [rows, blocks]
    PART: tl.constexpr,  # blocks of a program
    BLOCKS: tl.constexpr,  # read at once
):
    """One program a row and PART blocks: writes the rows that are edited, and the largest logit of each block."""
    row = tl.program_id(0).to(tl.int64)
    record = packed + row * FIELDS
    place = tl.load(record + EDITED)
    source = logits + row * stride
    own = scratch + tl.maximum(place, 0) * num_columns
    first_block = tl.program_id(1) * PART
    stop_block = tl.minimum(first_block + PART, num_blocks)
    WIDTH: tl.constexpr = BLOCKS * BLOCK
    if place >= 0:
        first = tl.load(starts + first_block)
        stop = tl.load(starts + stop_block)
        start_of_edits(packed, record, source, own, first, stop, WIDTH)
        add_penalties_and_bias(packed, record, own, first, stop, WIDTH)
        forbid(packed, record, MASKED, NUM_MASKED, own, first, stop, WIDTH)
        forbid(packed, record, BAD, NUM_BAD, own, first, stop, WIDTH)
        tl.debug_barrier()
    find_peaks(source, own, place >= 0, starts, first_block, stop_block, scratch + peaks_at + row * num_blocks, BLOCKS)
