"""Ranks as child processes of this one, for profiles, benchmarks and tests, which need no Ray."""

import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.errors import RankLost
from engine.tensor_parallel.group import Rendezvous, join, meet
from engine.tensor_parallel.ranks import RankGroup

HOST = "127.0.0.1"
END_S = 10.0


class LocalRanks:
    """Starts ranks 1 and up in processes that load the model and follow. ``group``: of rank 0, this process.

    Args:
        options: of ``engine.factory.load_target``, the same for all ranks.
        threads: of each of the other ranks.
        start_s: until every rank has loaded its shard.
    """

    group: RankGroup

    def __init__(
        self, num_ranks: int, folder: Path, options: Mapping[str, Any], threads: int, start_s: float = 300.0
    ) -> None:
        rendezvous = Rendezvous(HOST, start_s)
        arguments = (rendezvous.address, num_ranks, folder, dict(options), threads, start_s)
        spawning = multiprocessing.get_context("spawn")
        self._processes = [
            spawning.Process(target=_follow, args=(rank, *arguments), daemon=True, name=f"rank-{rank}")
            for rank in range(1, num_ranks)
        ]
        for process in self._processes:
            process.start()
        self.group = join(rendezvous.store, 0, num_ranks, options["device"], HOST)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(END_S)


def _follow(
    rank: int, address: str, num_ranks: int, folder: Path, options: Mapping[str, Any], threads: int, start_s: float
) -> None:
    import torch

    from engine.cpu_setup import configure_cpu
    from engine.factory import load_target
    from engine.tensor_parallel.rounds import Follower

    configure_cpu()
    torch.set_num_threads(threads)
    ranks = join(meet(address, start_s), rank, num_ranks, options["device"], HOST)
    engine = load_target(folder, **options, ranks=ranks)
    ranks.wait_ready(start_s)
    try:
        Follower(engine, ranks).run()
    except RankLost:
        return  # rank 0 has ended
