"""The noise of `engine/noise.py` in plain Python: the definition, which every other implementation must equal."""

import math
from collections.abc import Iterable

import numpy as np

from engine.noise import BLOCK_LEN

FIRST_BLOCK_COUNTER = 1 << 32
MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def gumbel_of_few(seed: int, position: int, token_ids: Iterable[int]) -> list[float]:
    """float32 values."""
    key = _mix(_mix(seed + GAMMA) + position * GAMMA)
    return [_gumbel(key, token_id) for token_id in token_ids]


def _gumbel(key: int, token_id: int) -> float:
    block_id, offset = divmod(token_id, BLOCK_LEN)
    block_bits = _mix(key + (FIRST_BLOCK_COUNTER + block_id) * GAMMA)
    arrival = _exponential(block_bits) / BLOCK_LEN
    if block_bits % BLOCK_LEN != offset:
        arrival += _exponential(_mix(key + token_id * GAMMA))
    return float(np.float32(-math.log(arrival)))


def _mix(value: int) -> int:
    value &= MASK
    value = (value ^ (value >> 30)) * MIX_1 & MASK
    value = (value ^ (value >> 27)) * MIX_2 & MASK
    return value ^ (value >> 31)


def _exponential(bits: int) -> float:
    return -math.log(((bits >> 32) + 0.5) / 2**32)
