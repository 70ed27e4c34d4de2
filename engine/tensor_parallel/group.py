"""The processes that compute one target together, over torch.distributed: gloo between CPUs, NCCL between GPUs.

Rounds and candidates of the sampler travel over gloo in either case, since they are in host memory. Process groups are made
directly, without torch's global default group, so that a process can be in several.

Ranks do not authenticate each other: on one machine they talk over loopback, between machines the network must be private.
"""

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from cluster.errors import RankLost
from engine.device import require, synchronize
from engine.tensor_parallel.ranks import COLLECTIVE_TIMEOUT_S, PASS_TIMEOUT_S, RankGroup

# A rank without work waits for the leader's next round. The leader's death closes the connection and ends the wait.
_IDLE_TIMEOUT = timedelta(days=365)


class GlooRanks:
    """``RankGroup`` in host memory.

    Tensors are exchanged point to point, each rank with each other, and summed in the order of the ranks. For two ranks on
    one machine this takes a fourteenth of the time of gloo's own all-reduce, which wakes several threads
    (docs/measurements/tensor-parallel.md).

    Args:
        store: where the ranks meet, within its timeout.
        host: address of this machine at which the other ranks reach it.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, host: str, timeout_s: float) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        start: timedelta = cast(Any, store).timeout  # which torch's stubs do not know
        options._timeout = start  # for joining; what follows has deadlines of its own
        options._devices = [gloo.create_device(hostname=host)]
        self.rank, self.num_ranks = rank, num_ranks
        self._others = [other for other in range(num_ranks) if other != rank]
        self._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = gloo(store, rank, num_ranks, options)
        except RuntimeError as error:
            raise RankLost(f"rank {rank} of {num_ranks} met no other within {start.total_seconds():g} s: {error}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.gather(x)
        if x.dtype == torch.float32:
            return reduce(torch.add, parts)
        return reduce(torch.add, [part.float() for part in parts]).to(x.dtype)

    def gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.num_ranks)]
        self._exchange(x, parts, self._timeout)
        return parts

    gather_on_host = gather

    def send(self, message: bytes) -> None:
        length = torch.tensor([len(message)])
        payload = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        with self._watched():
            works = [self._group.send([part], other, 0) for other in self._others for part in (length, payload)]
            for work in works:
                work.wait(self._timeout)

    def receive(self, *, in_pass: bool = False) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        with self._watched():
            self._group.recv([length], 0, 0).wait(self._timeout if in_pass else _IDLE_TIMEOUT)
            payload = torch.empty(int(length), dtype=torch.uint8)
            self._group.recv([payload], 0, 0).wait(self._timeout)
        return payload.numpy().tobytes()

    def wait_ready(self, timeout_s: float) -> None:
        self._exchange(torch.zeros(1), torch.zeros(self.num_ranks, 1), timedelta(seconds=timeout_s))

    def _exchange(self, sent: Tensor, received: Sequence[Tensor] | Tensor, timeout: timedelta) -> None:
        """``received``: filled with what each of the others sends, by rank."""
        with self._watched():
            works = [self._group.send([sent], other, 0) for other in self._others]
            works += [self._group.recv([received[other]], other, 0) for other in self._others]
            for work in works:
                work.wait(timeout)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo has no class of its own
            reason = re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0].strip()  # without gloo's file and advice
            lost = f"rank {self.rank} of {self.num_ranks} lost another rank ({reason})"
            raise RankLost(f"{lost}: send the request again, the ranks are restarted") from error


class NcclRanks(GlooRanks):
    """``RankGroup`` of GPUs: reductions and logits over NCCL, on the current stream.

    A rank that dies in the middle of a pass leaves the others waiting on their device; NCCL's watchdog ends their processes
    after PASS_TIMEOUT_S, and the supervisor does so as soon as it has seen the death. The first collective is here, so that
    ranks which cannot communicate end the start.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, host: str, timeout_s: float, device: torch.device) -> None:
        super().__init__(PrefixStore("host", store), rank, num_ranks, host, timeout_s)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=max(timeout_s, PASS_TIMEOUT_S))
        torch.cuda.set_device(device)
        with self._on_device():
            self._device_group = nccl(PrefixStore("device", store), rank, num_ranks, options)
        self.all_reduce(torch.zeros(1, device=device))
        with self._on_device():
            synchronize(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._on_device():
            self._device_group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        with self._on_device():
            self._device_group.allgather([parts], [x]).wait()
        return parts

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of NCCL or CUDA: in whole, since its last lines have the cause
            told = " ".join(str(error).split())
            raise RankLost(f"NCCL failed on rank {self.rank} of {self.num_ranks}: {told}") from error


class Rendezvous:
    """Where the ranks of one group meet: a key-value store in the process of rank 0.

    Args:
        host: address that it listens at; only 127.0.0.1 is closed to other machines.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        self.address = f"{host}:{port}"
        self.store: Store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def meet(address: str, timeout_s: float) -> Store:
    """The store of a ``Rendezvous`` in another process. Raises RankLost: nobody answers there."""
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankLost(f"no rank answers at {address}: {error}") from error


def join(
    store: Store, rank: int, num_ranks: int, device: str, host: str, timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> RankGroup:
    """The group of all ranks on ``device`` (cpu or cuda). Returns when all have joined, within the store's timeout.

    Raises RankLost: not all of them have; InvalidField: the device is a GPU, and there is none.
    """
    require(device)
    try:
        # Here, since a process group would wait no longer than a collective does, and a process takes longer to start.
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{other}" for other in range(num_ranks)])
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {num_ranks} waited for the other ranks in vain: {error}") from error
    if device == "cuda":
        return NcclRanks(store, rank, num_ranks, host, timeout_s, torch.device(device, torch.cuda.current_device()))
    return GlooRanks(store, rank, num_ranks, host, timeout_s)
