"""One process, or several under torchrun: the one place that knows which."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cluster.errors import InvalidField


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose gradients are means over all processes."""
        if self.size == 1:
            return module
        return nn.parallel.DistributedDataParallel(module)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def agree(self, stop: bool) -> bool:
        """Whether any process wants to stop; all must ask at the same step."""
        if self.size == 1:
            return stop
        flag = torch.tensor([float(stop)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def from_first(self, value: float) -> float:
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, src=0)
        return float(shared.item())


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """The processes that torchrun started (``WORLD_SIZE``, ``RANK``, ``LOCAL_RANK``), else this one alone.

    NCCL on GPUs, gloo elsewhere. ``device``: auto takes a GPU where there is one.

    Raises:
        InvalidField: a GPU is asked for, and torch finds none.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidField("device", device, "must be cpu here: torch finds no GPU that it can use")
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    at = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if kind == "cuda" else kind)
    if at.type == "cuda":
        torch.cuda.set_device(at)
    if size == 1:
        yield World(0, 1, at)
        return
    dist.init_process_group("nccl" if at.type == "cuda" else "gloo")
    try:
        yield World(rank, size, at)
    finally:
        dist.destroy_process_group()
