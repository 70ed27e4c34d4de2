"""The target's hidden states, kept for feature-conditioned drafters, in the slots of the KV cache: so the block ledger
handles their rollback, prefix sharing, eviction and preemption."""

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

    def write(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Stores ``features`` [rows, len(layers) * hidden] of all rows of a pass. ``slots`` [rows]: of the KV cache."""
        if self._rows is not None:
            self._rows.index_copy_(0, slots, features)

    def read(self, block_table: NDArray[np.int32], start: int, stop: int) -> torch.Tensor:
        """A copy of positions ``start`` .. ``stop`` - 1 of the sequence: [stop - start, len(layers) * hidden]."""
        if self._rows is None:
            raise LookupError("no features are kept: name the layers in feature_layers")
        blocks, offsets = np.divmod(np.arange(start, stop), self._block_len)
        slots = block_table[blocks].astype(np.int64) * self._block_len + offsets
        return self._rows[to_device(slots, self._rows.device)]
