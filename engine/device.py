"""Non-blocking copies from host to device, and synchronisation. A copy from pageable memory waits for all earlier work on
the stream, one from pinned memory is only queued. Torch reuses a pinned buffer after the copies from it are done, so it may
be dropped once its copy is queued."""

from typing import Any

import torch
from numpy.typing import NDArray

from cluster.errors import InvalidField


def require(device: str) -> None:
    """Raises InvalidField: ``device`` is a GPU, and torch finds none."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        build = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no GPU here"
        raise InvalidField("device", device, f"must be cpu or auto, since {build}")


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on ``device``. On a CPU the tensor shares the array's memory; on a GPU the copy is only queued."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> NDArray[Any]:
    """The values of ``tensor``, after the one wait of a pass."""
    host = begin_to_host(tensor)
    synchronize(tensor.device)
    return host.numpy()


def begin_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that holds the values of ``tensor`` once this thread has waited for its device; on a CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Returns when the device has finished what this thread has launched on its current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
