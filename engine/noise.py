"""Gumbel noise G(seed, position, token), identical in all processes and devices (docs/architecture.md#principles). No torch.

The Gumbel-max identity as exponential arrival times: with T_v ~ Exp(1) i.i.d., argmax_v(log p_v - log T_v) is distributed as
p, and G_v = -log T_v is standard Gumbel noise.

The times are drawn in blocks of 64 consecutive tokens, so that one hash bounds a whole block. The minimum of 64 times is
Exp(64) = E_b / 64 and belongs to each of the 64 tokens with equal probability; the others follow it by independent E_v, as
the exponential distribution is memoryless. So -log(E_b / 64) is the largest noise of the block:

    T_v = E_b / 64           for the token of block b that is first,
    T_v = E_b / 64 + E_v     for the other 63.

Every E is -log(u), u = (32 random bits + 1/2) / 2^32, so G lies between -3.15 and 27.04. The bits are output number c of the
generator SplitMix64 started at a key, which is mixed from seed and position; c below 2^32 are tokens, those above are
blocks. Logarithms are taken in float64 and rounded once to float32, so that the last bit of a vendor's logarithm has no
effect.

The functions take NumPy int64 arrays or torch int64 tensors alike, of at least one dimension (both then wrap on overflow).
`tests/reference/noise.py` has the same in plain Python.
Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014), for the hash; Maddison, Tarlow, Minka, "A*
sampling" (2014), for noise whose maximum comes first.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    Array = TypeVar("Array", NDArray[np.int64], torch.Tensor)

BLOCK_LEN = 64  # tokens whose noise has a common bound; a power of two
_FIRST_BLOCK_COUNTER = 1 << 32

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The key of each (seed, position), elementwise; the other functions take keys."""
    seed_keys = _mix(seeds.view(np.int64) + _signed(_GAMMA))
    return _mix(seed_keys + positions * _signed(_GAMMA))


def gumbel(keys: "Array", token_ids: "Array") -> Any:
    """Noise of ``token_ids`` under ``keys``, broadcast against each other. float32."""
    first_s, offset = _first_arrivals(keys, token_ids >> 6)
    later_s = _exponential(_mix(keys + token_ids * _signed(_GAMMA)))
    return _minus_log(first_s + later_s * ((token_ids & (BLOCK_LEN - 1)) != offset))


def block_max(keys: "Array", block_ids: "Array") -> Any:
    """The largest noise in each block, keys and blocks broadcast against each other. float32."""
    return _minus_log(_first_arrivals(keys, block_ids)[0])


def block_gumbel(keys: "Array", block_ids: "Array", offsets: "Array") -> Any:
    """Noise of all tokens of blocks: keys and blocks broadcast to (...), ``offsets`` are 0..63; (..., 64), float32."""
    first_s, first_offset = _first_arrivals(keys, block_ids)
    counters = (block_ids * BLOCK_LEN)[..., None] + offsets
    later_s = _exponential(_mix(keys[..., None] + counters * _signed(_GAMMA)))
    return _minus_log(first_s[..., None] + later_s * (offsets != first_offset[..., None]))


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value


def _mix(values: "Array") -> "Array":
    """SplitMix64's finalizer. The masks make arithmetic shifts logical."""
    values = (values ^ ((values >> 30) & (_MASK >> 30))) * _signed(_MIX_1)
    values = (values ^ ((values >> 27) & (_MASK >> 27))) * _signed(_MIX_2)
    return values ^ ((values >> 31) & (_MASK >> 31))


def _first_arrivals(keys: "Array", block_ids: "Array") -> tuple[Any, "Array"]:
    """When the first token of each block arrives, float64, and which one it is."""
    bits = _mix(keys + (block_ids + _FIRST_BLOCK_COUNTER) * _signed(_GAMMA))
    return _exponential(bits) / BLOCK_LEN, bits & (BLOCK_LEN - 1)


def _exponential(bits: "Array") -> Any:
    upper = (bits >> 32) & (_MASK >> 32)
    if isinstance(upper, np.ndarray):
        return -np.log((upper.astype(np.float64) + 0.5) / 2**32)
    return ((upper.double() + 0.5) / 2**32).log().neg()


def _minus_log(times: Any) -> Any:
    if isinstance(times, np.ndarray):
        return (-np.log(times)).astype(np.float32)
    return times.log().neg().float()
