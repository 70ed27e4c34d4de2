"""A target of several ranks: the process of each rank but the first, and all of them as one process."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from actors.processes import Process
from actors.worker import LoopActor, LoopThread, ProcessInfo, set_threads
from cluster.config import Config
from cluster.cpu_scheduling import run_in_foreground
from engine.cpu_setup import configure_cpu

if TYPE_CHECKING:
    from engine.tensor_parallel.group import Rendezvous
    from engine.tensor_parallel.rounds import Follower


def host_of_ranks(config: Config, node_host: Callable[[], str]) -> str:
    """The address at which this rank's machine is reached by the others: loopback if there is only one."""
    return "127.0.0.1" if config.transport.kind == "unix" else node_host()


def rendezvous(config: Config, node_host: Callable[[], str]) -> "Rendezvous":
    """In the process of rank 0, before its model is loaded."""
    set_threads(config.target.resources.threads)
    from engine.tensor_parallel.group import Rendezvous

    return Rendezvous(host_of_ranks(config, node_host), config.supervision.start_timeout_s)


class RankActor(LoopActor):
    """Rank ``rank`` of a target. Every method may be called from any thread."""

    def __init__(self, config: Config, rank: int, node_host: Callable[[], str]) -> None:
        super().__init__(config.observability)
        run_in_foreground()
        self._config, self._rank, self._node_host = config, rank, node_host
        self._address = ""
        self._follower: Follower | None = None

    def follow(self, address: str) -> ProcessInfo:
        """As ``start``, for the rank 0 that waits at ``address``: loads the rank's shard and joins."""
        self._address = address
        return self.start()

    def _start_loop(self) -> LoopThread:
        config = self._config
        set_threads(config.target.resources.threads)
        configure_cpu()
        from engine.loading import load_follower
        from engine.tensor_parallel.group import join, meet
        from engine.threads import in_own_thread

        store = meet(self._address, config.supervision.start_timeout_s)
        num_ranks, device = config.target.tensor_parallel, str(config.target.device)
        ranks = join(store, self._rank, num_ranks, device, host_of_ranks(config, self._node_host))
        follower = self._follower = in_own_thread(lambda: load_follower(config, ranks))
        return LoopThread(f"rank {self._rank}", lambda stop: follower.run(), wake=lambda: None)

    def stalled_s(self) -> float:
        return 0.0 if self._follower is None else self._follower.stalled_s()


class RankProcesses:
    """``actors.processes.Process`` of all ranks. It ends when the first of them does, and is killed as one."""

    def __init__(self, first: Process, others: Sequence[Process]) -> None:
        self._first = first
        self._others = tuple(others)

    @property
    def name(self) -> str:
        return self._first.name

    async def ended(self) -> str:
        ends = {asyncio.ensure_future(one.ended()): rank for rank, one in enumerate((self._first, *self._others))}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(f"rank {ends[end]}: {end.result()}" for end in done)
        finally:
            for end in ends:
                end.cancel()

    async def stalled_s(self) -> float:
        return max(await asyncio.gather(*(one.stalled_s() for one in (self._first, *self._others))))

    async def call(self, method: str, *args: Any) -> Any:
        """Rank 0 answers. ``start`` starts all of them."""
        if method != "start":
            return await self._first.call(method, *args)
        address = await self._first.call("rendezvous")
        following = (other.call("follow", address) for other in self._others)
        info, *_ = await asyncio.gather(self._first.call("start"), *following)
        return info

    async def kill(self) -> None:
        await asyncio.gather(*(one.kill() for one in (self._first, *self._others)))
