"""One training process, or several under torchrun."""

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
        """The module with gradients averaged over all processes."""
        return module if self.size == 1 else nn.parallel.DistributedDataParallel(module)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all must call it at the same step."""
        if self.size == 1:
            return flag
        shared = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return bool(shared.item())

    def from_first(self, value: float) -> float:
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, src=0)
        return float(shared.item())


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """The processes started by torchrun, or this one alone, on ``device``: auto, cpu or cuda. Raises InvalidField for cuda
    without a usable GPU."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidField("device", device, "must be cpu here: torch finds no GPU that it can use")
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    own = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if kind == "cuda" else kind)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if size > 1:
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield World(rank, size, own)
    finally:
        if size > 1:
            dist.destroy_process_group()
