"""Ranks as child processes of this one: for profiles, benchmarks and tests, which need no Ray."""

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import RankLost
from engine.tensor_parallel.group import Rendezvous, join, meet
from engine.tensor_parallel.ranks import RankGroup

HOST = "127.0.0.1"
START_S = 120.0  # until every rank has loaded its shard
END_S = 10.0


@contextmanager
def local_ranks(num_ranks: int, folder: Path, options: Mapping[str, Any], threads: int) -> Iterator[RankGroup]:
    """The group of rank 0, this process, with the other ranks in processes that load the model and follow.

    The caller loads its own rank with the same ``options``, then calls ``wait_ready``. The processes end with the context.

    Args:
        options: of ``engine.factory.load_target``.
        threads: of each of the other ranks.
    """
    rendezvous = Rendezvous(HOST, START_S)
    spawning = multiprocessing.get_context("spawn")
    arguments = (rendezvous.address, num_ranks, folder, dict(options), threads)
    processes = [
        spawning.Process(target=_follow, args=(rank, *arguments), daemon=True, name=f"rank-{rank}")
        for rank in range(1, num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield join(rendezvous.store, 0, num_ranks, options.get("device", "cpu"), HOST)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(END_S)


def _follow(rank: int, address: str, num_ranks: int, folder: Path, options: Mapping[str, Any], threads: int) -> None:
    import torch

    from engine.factory import load_target
    from engine.tensor_parallel.rounds import follow

    torch.set_num_threads(threads)
    ranks = join(meet(address, START_S), rank, num_ranks, options.get("device", "cpu"), HOST)
    engine = load_target(folder, **{**options, "feature_layers": ()}, ranks=ranks)
    ranks.wait_ready(START_S)
    try:
        follow(engine, ranks)
    except RankLost:
        return  # rank 0 has ended
