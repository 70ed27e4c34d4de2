"""What one rank of a model needs besides its weights: its shard, and the collectives of its group.

Without torch.distributed, which only ``engine.tensor_parallel.group`` imports.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.tensor_parallel.sharding import Shard

COLLECTIVE_TIMEOUT_S = 10.0  # for a rank that hangs: between two collectives it computes half a layer
PASS_TIMEOUT_S = 120.0  # of NCCL, which counts from the launch: all collectives of a pass are launched before the first ends


class RankGroup(Protocol):
    """Collectives of one rank. All ranks make the same calls in the same order. Not thread-safe.

    Every method raises RankLost: another rank ended, or did not answer within COLLECTIVE_TIMEOUT_S.
    """

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, equal in every bit on all of them. ``x`` may be overwritten."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``, in the order of the ranks; all of one shape."""

    def gather_on_host(self, x: Tensor) -> list[Tensor]:
        """As ``gather``, of tensors in host memory."""

    def send(self, message: bytes) -> None:
        """From rank 0 to all others."""

    def receive(self, *, in_pass: bool = False) -> bytes:
        """The next message of rank 0. Waits for it as long as rank 0 lives; ``in_pass``: as long as for a collective."""

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when every rank has called this."""


@dataclass(frozen=True, slots=True)
class ModelRanks:
    group: RankGroup
    shard: Shard

    def summed(self, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A row parallel product: each rank's, summed over the ranks."""
        return lambda x: self.group.all_reduce(product(x))
