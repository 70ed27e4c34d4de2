"""Matrices of block-quantised weights: bytes as they lie in a GGUF file, and their integers, scales and minima.

    W[o, i] = scale[o, i // block] * (q[o, i] - zero) + minimum[o, i // block]

Block layouts are ggml's, by its number of the type.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import ModelUnavailable
from engine.cpu_level import AVX2, cpu_level

_DEQUANTISED = 2**20  # weights that a thread restores at once
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """``q`` [outputs, blocks, block length], of ``bits`` 4 (unsigned) or 8 (signed); ``scale`` and ``minimum`` (None: zeros)
    [outputs, blocks], fp32; ``halves``: float16 holds them exactly."""

    q: NDArray[np.int8]
    scale: Floats
    minimum: Floats | None
    bits: int
    zero: int = 0
    halves: bool = True

    def dequantised(self) -> Floats:
        """fp32 [outputs, inputs]"""
        values = (self.q.astype(np.float32) - np.float32(self.zero)) * self.scale[..., None]
        if self.minimum is not None:
            values += self.minimum[..., None]
        return values.reshape(len(values), -1)

    def rows(self, start: int, stop: int) -> "Blocks":
        """Of these outputs."""
        minimum = None if self.minimum is None else self.minimum[start:stop]
        return replace(self, q=self.q[start:stop], scale=self.scale[start:stop], minimum=minimum)

    def widened(self, block_len: int) -> "Blocks":
        """With 8 bits, minima and blocks of ``block_len``, to stand beside others."""
        times = self.q.shape[2] // block_len
        minimum = np.zeros_like(self.scale) if self.minimum is None else self.minimum
        q = (self.q - np.int8(self.zero)).reshape(len(self.q), -1, block_len)
        return Blocks(q, self.scale.repeat(times, 1), minimum.repeat(times, 1), 8, halves=False)


@dataclass(frozen=True, slots=True)
class BlockType:
    num_weights: int
    num_bytes: int
    read: Callable[[Bytes], Blocks]  # of bytes [outputs, blocks, num_bytes]


def _half(raw: Bytes, at: int) -> Floats:
    """[outputs, blocks]"""
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(raw: Bytes) -> NDArray[np.int8]:
    """Low halves of the bytes, then high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1).view(np.int8)


def _fifth_bits(raw: Bytes) -> NDArray[np.int8]:
    return (np.unpackbits(raw, axis=-1, bitorder="little") << 4).view(np.int8)


def _q4_0(raw: Bytes) -> Blocks:
    return Blocks(_nibbles(raw[..., 2:]), _half(raw, 0), None, 4, zero=8)


def _q4_1(raw: Bytes) -> Blocks:
    return Blocks(_nibbles(raw[..., 4:]), _half(raw, 0), _half(raw, 2), 4)


def _q5_0(raw: Bytes) -> Blocks:
    return Blocks((_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])) - np.int8(16), _half(raw, 0), None, 8)


def _q5_1(raw: Bytes) -> Blocks:
    q = _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    return Blocks(q, _half(raw, 0), _half(raw, 2), 8, halves=False)


def _q8_0(raw: Bytes) -> Blocks:
    return Blocks(np.ascontiguousarray(raw[..., 2:]).view(np.int8), _half(raw, 0), None, 8)


def _k_factors(raw: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the 8 parts of super-blocks with 6 bits each, [outputs, blocks * 8]."""
    low, high, mixed = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=-1)
    factors = _half(raw, 0)[..., None] * scales, -(_half(raw, 2)[..., None] * minima)
    return factors[0].reshape(len(raw), -1), factors[1].reshape(len(raw), -1)


def _k_nibbles(raw: Bytes) -> NDArray[np.int8]:
    """128 bytes hold four times 32 low halves, then 32 high ones: [outputs, blocks, 8, 32]."""
    return _nibbles(raw.reshape(*raw.shape[:2], 4, 32)).reshape(*raw.shape[:2], 8, 32)


def _q4_k(raw: Bytes) -> Blocks:
    return Blocks(_k_nibbles(raw[..., 16:]).reshape(len(raw), -1, 32), *_k_factors(raw), 4, halves=False)


def _q5_k(raw: Bytes) -> Blocks:
    fifth = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit j is of part j
    q = _k_nibbles(raw[..., 48:]) | (fifth << 4).view(np.int8)
    return Blocks(q.reshape(len(raw), -1, 32), *_k_factors(raw), 8, halves=False)


def _q6_k(raw: Bytes) -> Blocks:
    low, high = raw[..., :128].reshape(*raw.shape[:2], 2, 64), raw[..., 128:192].reshape(*raw.shape[:2], 2, 32)
    top = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)  # [outputs, blocks, 2, 128]
    q = (_nibbles(low) | (top << 4).view(np.int8)) - np.int8(32)
    scale = _half(raw, 208)[..., None] * raw[..., 192:208].view(np.int8)
    return Blocks(q.reshape(len(raw), -1, 16), scale.reshape(len(raw), -1), None, 8, halves=False)


BLOCKS = {
    2: BlockType(32, 18, _q4_0),
    3: BlockType(32, 20, _q4_1),
    6: BlockType(32, 22, _q5_0),
    7: BlockType(32, 24, _q5_1),
    8: BlockType(32, 34, _q8_0),
    12: BlockType(256, 144, _q4_k),
    13: BlockType(256, 176, _q5_k),
    14: BlockType(256, 210, _q6_k),
}


class QuantisedMatrix:
    """[outputs, inputs], as its bytes in the file. ``raw``: [outputs, bytes of a row]. ``packed``: a file for what a
    product makes of it; None: the product keeps it."""

    def __init__(self, kind: int, raw: Bytes, num_in: int, packed: Path | None = None) -> None:
        self._parts = [(kind, raw)]
        self.shape = (len(raw), num_in)
        self.packed = packed

    @staticmethod
    def joined(matrices: Sequence["QuantisedMatrix"]) -> "QuantisedMatrix":
        """One below the other."""
        whole = copy(matrices[0])
        whole._parts = [part for matrix in matrices for part in matrix._parts]
        whole.shape = (sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1])
        return whole

    def blocks(self, most: int | None = None) -> Blocks:
        """Types that differ are brought to a common one. ``most``: rows of each matrix that was joined; None: all."""
        found = [_read(kind, raw[:most]) for kind, raw in self._parts]
        if len({kind for kind, _ in self._parts}) > 1:
            block_len = min(one.q.shape[2] for one in found)
            found = [one.widened(block_len) for one in found]
        first = found[0]
        if len(found) == 1:
            return first
        minima = [one.minimum for one in found if one.minimum is not None]
        return replace(
            first,
            q=np.concatenate([one.q for one in found]),
            scale=np.concatenate([one.scale for one in found]),
            minimum=np.concatenate(minima) if minima else None,
        )

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """fp32 [n, inputs], of a matrix that is not joined."""
        ((kind, raw),) = self._parts
        return torch.from_numpy(_read(kind, raw[token_ids.numpy()]).dequantised())

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[outputs, inputs], by threads, each of which holds a few rows in fp32."""
        whole, num, at = torch.empty(self.shape, dtype=dtype), max(1, _DEQUANTISED // self.shape[1]), 0
        jobs: list[tuple[int, Bytes, torch.Tensor]] = []
        for kind, raw in self._parts:
            jobs += [(kind, raw[i : i + num], whole[at + i : at + min(i + num, len(raw))]) for i in range(0, len(raw), num)]
            at += len(raw)

        def restore(job: tuple[int, Bytes, torch.Tensor]) -> None:
            kind, raw, out = job
            out.copy_(torch.from_numpy(_read(kind, raw).dequantised()))

        with ThreadPoolExecutor() as pool:
            list(pool.map(restore, jobs))
        return whole


def shipped_bytes(kinds: Collection[int]) -> float:
    """Of a weight as ``engine.cpu.quantised`` keeps matrices of these types that are one product."""
    if not all(kind in BLOCKS for kind in kinds):
        return 4.0
    ones = [(kind, BLOCKS[kind]) for kind in kinds]
    rows = [QuantisedMatrix(kind, np.zeros((1, 256 // of.num_weights * of.num_bytes), np.uint8), 256) for kind, of in ones]
    blocks = QuantisedMatrix.joined(rows).blocks()
    num_factors, factor_bytes = 1 if blocks.minimum is None else 2, 2 if blocks.halves and cpu_level().includes(AVX2) else 4
    return blocks.bits / 8 + num_factors * factor_bytes / int(blocks.q.shape[2])


def _read(kind: int, raw: Bytes) -> Blocks:
    of = BLOCKS.get(kind)
    if of is None:
        raise ModelUnavailable(f"weights of ggml's type {kind} are not supported")
    return of.read(raw.reshape(len(raw), -1, of.num_bytes))
