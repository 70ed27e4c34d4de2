"""Ranks of one group as threads of this process, over real gloo."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from engine.tensor_parallel.group import GlooRanks

Result = TypeVar("Result")


class ThreadRanks:
    """``on_all`` calls a function with each rank's group, all at once."""

    def __init__(self, ranks: list[GlooRanks], threads: ThreadPoolExecutor) -> None:
        self.ranks = ranks
        self._threads = threads

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        return self._threads.submit(call)

    def on_all(self, call: Callable[[GlooRanks], Result]) -> list[Result]:
        return [found.result() for found in [self._threads.submit(call, ranks) for ranks in self.ranks]]


@contextmanager
def thread_ranks(num_ranks: int, timeout_s: float = 30.0) -> Iterator[ThreadRanks]:
    store = dist.HashStore()
    with ThreadPoolExecutor(num_ranks) as threads:
        made = [threads.submit(GlooRanks, store, rank, num_ranks, "127.0.0.1", timeout_s) for rank in range(num_ranks)]
        yield ThreadRanks([one.result() for one in made], threads)
