"""Ranks as child processes of this one, for profiles, benchmarks and tests, which need no Ray."""

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.errors import RankLost
from engine.cpu_setup import configure_cpu
from engine.factory import load_target
from engine.native import NativeTarget
from engine.tensor_parallel.group import Rendezvous, join, meet
from engine.tensor_parallel.rounds import Follower

HOST = "127.0.0.1"
START_S = 300.0
END_S = 10.0


def load_over_local_ranks(
    num_ranks: int,
    folder: Path,
    options: Mapping[str, Any],
    feature_layers: Sequence[int] = (),
    threads: int = 1,
    start_s: float = START_S,
) -> NativeTarget:
    """A target whose rank 0 is this process; ``close`` ends the others.

    Args:
        options: of ``engine.factory.load_target``, the same for all ranks.
        threads: of each of the other ranks.
        start_s: until every rank has loaded its shard.

    Raises as ``engine.factory.load_target``; RankLost: another rank could not load.
    """
    rendezvous = Rendezvous(HOST, start_s)
    arguments = (rendezvous.address, num_ranks, folder, dict(options), threads, start_s)
    spawning = multiprocessing.get_context("spawn")
    processes = [
        spawning.Process(target=_follow, args=(rank, *arguments), daemon=True, name=f"rank-{rank}")
        for rank in range(1, num_ranks)
    ]

    def end_ranks() -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(END_S)

    for process in processes:
        process.start()
    try:
        ranks = join(rendezvous.store, 0, num_ranks, options["device"], HOST)
        engine = load_target(folder, **options, feature_layers=feature_layers, ranks=ranks, end_ranks=end_ranks)
        ranks.wait_ready(start_s)
        return engine
    except BaseException:
        end_ranks()
        raise


def _follow(
    rank: int, address: str, num_ranks: int, folder: Path, options: Mapping[str, Any], threads: int, start_s: float
) -> None:
    configure_cpu()
    torch.set_num_threads(threads)
    if options["device"] == "cuda":
        torch.cuda.set_device(rank)
    ranks = join(meet(address, start_s), rank, num_ranks, options["device"], HOST)
    engine = load_target(folder, **options, ranks=ranks)
    ranks.wait_ready(start_s)
    try:
        Follower(engine, ranks).run()
    except RankLost:
        return  # rank 0 has ended
