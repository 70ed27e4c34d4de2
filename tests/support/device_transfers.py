"""Records transfers between the host and a device."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = {"aten::copy_", "aten::_to_copy", "aten::to"}
_WAITS = {"aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::_unique2"}


class DeviceTransfers(TorchDispatchMode):
    """Raises if an operation reads tensors of two devices, as CUDA would, or waits for the device. An index on the host
    counts, since reading it waits. Scalars may be anywhere.

    ``num_operations``: of torch; ``num_on_device``: those with a tensor there. ``copies``: for each host-to-device copy,
    whether it is "queued" or "waited" for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.copies: list[str] = []
        self.num_operations = self.num_on_device = 0
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in _WAITS, f"{func} waits for the device"
        self.num_operations += 1
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        self.num_on_device += any(isinstance(x, Tensor) and x.device == self._device for x in leaves)
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim()]
        if len({x.device for x in tensors}) > 1:
            assert func._schema.name in _COPIES, f"{func} mixes {[(tuple(x.shape), str(x.device)) for x in tensors]}"
            assert result.device == self._device, f"{func} reads from the device"
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.copies.append("queued" if given.get("non_blocking") else "waited")
        return result
