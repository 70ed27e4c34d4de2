"""The target's hidden states, kept for feature-conditioned drafters, in the slots of the KV cache: so the block ledger
handles their rollback, prefix sharing, eviction and preemption."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import InvalidField
from engine.device import to_device
from engine.kv_cache import cache_zeros


class HiddenStateCache:
    """Hidden states after chosen layers, one row per slot of a KV cache. ``shape``: the model's number of layers and hidden
    size. ``layers``: ascending, as of ``CausalModel.forward_with_hidden_states``. Raises InvalidField: the model has no such
    layers, or they do not ascend."""

    def __init__(
        self,
        shape: tuple[int, int],
        layers: Sequence[int],
        num_blocks: int,
        block_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_layers, hidden_size = shape
        if list(layers) != sorted(set(layers)) or (layers and not -1 <= layers[0] <= layers[-1] < num_layers):
            raise InvalidField("feature_layers", list(layers), f"must ascend between -1 and {num_layers - 1}")
        self.layers = tuple(layers)
        self._block_len = block_len
        width = len(layers) * hidden_size
        # [num_slots, len(layers) * hidden]
        self._rows = cache_zeros((num_blocks * block_len, width), dtype, device) if layers else None

        self._written: torch.cuda.Event | None = None  # by the last pass
        self._read: dict[int, torch.cuda.Event | None] = {}  # by the last reader of each thread, so of each stream

    def write(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Stores ``features`` [rows, len(layers) * hidden] of all rows of a pass, on a GPU after what readers on other
        streams have begun to copy. ``slots`` [rows]: of the KV cache."""
        if self._rows is not None:
            for thread in list(self._read):
                _wait_for(self._read[thread])
            self._rows.index_copy_(0, slots, features)
            self._written = _mark(self._rows)

    def read(self, parts: Sequence[tuple[NDArray[np.int32], int, int]]) -> torch.Tensor:
        """A copy of positions start .. stop - 1 of sequences, given as (block table, start, stop), one behind the other:
        [rows, len(layers) * hidden]."""
        if self._rows is None:
            raise LookupError("no features are kept: name the layers in feature_layers")
        slots = [np.zeros(0, np.int64)]
        for block_table, start, stop in parts:
            blocks, offsets = np.divmod(np.arange(start, stop), self._block_len)
            slots.append(block_table[blocks].astype(np.int64) * self._block_len + offsets)
        _wait_for(self._written)
        rows = self._rows[to_device(np.concatenate(slots), self._rows.device)]
        mark = _mark(rows)
        if mark is not None:
            self._read[threading.get_ident()] = mark
        return rows


def _mark(tensor: torch.Tensor) -> "torch.cuda.Event | None":
    """What the current stream of a GPU has been given so far."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _wait_for(event: "torch.cuda.Event | None") -> None:
    """Lets the current stream wait, not the host."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
