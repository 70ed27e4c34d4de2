"""Products with block-quantised weights on a CPU, computed by ``quantised.c`` from prepacked weights. Those of a prepared
model are files of its folder, mapped by every process."""

import ctypes
import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.cpu.native_product import PANEL, NativeLinear, address, padded
from engine.models.prepare import PACKED, STALLED_S
from engine.models.quantised import Blocks, QuantisedMatrix

_AT_ONCE = 2**24  # weights that are packed at once, which takes ten bytes of each
_LEFT_FREE = 2**30  # bytes of a disk
_PARTIAL = ".part-"

logger = logging.getLogger(__name__)


class _Quantised(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_in", "num_out", "block_len", "bits", "zero", "has_halves", "has_mins")),
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
    ]


class QuantisedLinear(NativeLinear):
    """Inputs are rounded to 16 bits of their row's scale, weights are exact. Bytes of 4-bit blocks and of Q8_0 are those of
    the GGUF file. ``dtype``: of activations."""

    def __init__(self, library: ctypes.CDLL, weight: QuantisedMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        (num_out, num_in), kind = weight.shape, weight.blocks(1)
        halves, has_mins = kind.halves and bool(library.quantised_halves()), kind.minimum is not None
        block_len, factors = kind.q.shape[2], torch.float16 if halves else torch.float32
        block_bytes = PANEL * (block_len * kind.bits // 8 + factors.itemsize * (1 + has_mins))

        def parts() -> Iterator[Tensor]:
            blocks, num = weight.blocks(), -(-_AT_ONCE // num_in // PANEL) * PANEL
            return (_packed(blocks.rows(i, i + num), factors) for i in range(0, num_out, num))

        path = weight.packed and weight.packed.with_name(f"{weight.packed.name}.{factors.itemsize}")
        self._weights = _shared(path, -(-num_out // PANEL) * (num_in // block_len) * block_bytes, parts)
        self._bias = None if bias is None else padded(bias)
        settings = block_len, kind.bits, kind.zero, halves, has_mins
        product = _Quantised(num_in, num_out, *settings, self._weights.data_ptr(), address(self._bias))
        super().__init__(library.quantised_product, product, dtype)


def _shared(path: Path | None, num_bytes: int, parts: Callable[[], Iterator[Tensor]]) -> Tensor:
    """uint8 [num_bytes], mapped from the file, which is written where it is missing; else memory of this process."""
    if path is not None:
        try:
            if not _is_whole(path, num_bytes):
                _write(path, num_bytes, parts())
            return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:  # the latter: it cannot be mapped
            _log_private(path.parent, getattr(error, "strerror", None) or "they cannot be mapped")
    return torch.cat(list(parts()))


def _write(path: Path, num_bytes: int, parts: Iterator[Tensor]) -> None:
    """The file appears when it is whole and on disk; of several processes the first one's stays. Removes other layouts, and
    files of killed processes, to which nothing was added for as long as a preparation may take no step. Raises OSError."""
    folder = path.parent
    others = set(folder.parent.glob(f"{PACKED}*")) - {folder}  # which another process may be making
    folder.mkdir(exist_ok=True)
    for old in (*others, *folder.glob(f"{_PARTIAL}*")):
        with suppress(OSError):
            if old.stat().st_mtime < time.time() - STALLED_S:
                shutil.rmtree(old) if old in others else old.unlink()  # who has mapped its files keeps them
    if shutil.disk_usage(folder).free < num_bytes + _LEFT_FREE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    with tempfile.NamedTemporaryFile(prefix=_PARTIAL, dir=folder) as partial:
        for part in parts:
            partial.write(part.numpy().data)
        partial.flush()
        os.fchmod(partial.fileno(), 0o644)
        os.fsync(partial.fileno())
        if not _is_whole(path, num_bytes):
            path.unlink(missing_ok=True)
        with suppress(FileExistsError):
            os.link(partial.name, path)


def _is_whole(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


@cache
def _log_private(folder: Path, why: str) -> None:
    logger.warning("packed weights are kept in this process's own memory, not in %s: %s", folder, why)


def _packed(blocks: Blocks, factors: torch.dtype) -> Tensor:
    """uint8 [panels, blocks, bytes of a block of 32 outputs], as quantised.c says."""
    q = _in_panels(torch.from_numpy(blocks.q))  # [panels, 32, blocks, block length]
    if blocks.bits == 4:
        pairs = q.unflatten(-1, (-1, 4, 2)).int()
        shifts = torch.tensor([[4 * k, 16 + 4 * k] for k in range(4)], dtype=torch.int32)
        words = (pairs << shifts).sum((-2, -1), dtype=torch.int32)
    else:
        words = q.unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]].contiguous().view(torch.int32).squeeze(-1)
    parts = [words.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.uint8)]
    for factor in (blocks.scale, blocks.minimum):
        if factor is not None:
            parts.append(_in_panels(torch.from_numpy(factor)).transpose(1, 2).to(factors).contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def _in_panels(values: Tensor) -> Tensor:
    """[outputs, ...] -> [panels, 32, ...], filled up with zeros."""
    padding = (0, 0) * (values.dim() - 1) + (0, -len(values) % PANEL)
    padded: Tensor = torch.nn.functional.pad(values, padding)
    return padded.view(-1, PANEL, *values.shape[1:])
