"""vLLM's executor of several ranks, which are child processes of the target's: they live and die together."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from cluster.errors import RankLost

EXIT_S = 1.0  # until the exit code of a process that is ending is known

_noting = threading.Lock()  # two threads that wait for one process would take its exit code from each other


class RankExecutor(MultiprocExecutor):
    """Ends all ranks as soon as one has ended. vLLM's own waits for them to end by themselves, for nine seconds, but a rank
    in a collective with a dead one never does."""

    workers: list[Any]
    _loss: str | None = None

    def shutdown(self) -> None:
        if self._note_loss():
            for worker in self.workers:
                worker.proc.kill()
        super().shutdown()

    def check_ranks(self) -> None:
        """Raises RankLost: a rank has ended."""
        if self._note_loss():
            raise RankLost(self._loss)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raises RankLost for any error that a lost rank has caused."""
        try:
            yield
        except Exception as error:
            if self._note_loss():
                raise RankLost(self._loss) from error
            raise

    def _note_loss(self) -> bool:
        """vLLM's monitor sets ``is_failed`` before it calls ``shutdown``, from a thread of its own."""
        with _noting:
            if self._loss is None and getattr(self, "is_failed", False):
                closed = wait([worker.proc.sentinel for worker in self.workers], timeout=0)
                lost = [worker for worker in self.workers if worker.proc.sentinel in closed]
                for worker in lost:
                    worker.proc.join(EXIT_S)  # a process closes its files first
                ended = [f"rank {worker.rank} (exit code {worker.proc.exitcode})" for worker in lost]
                self._loss = f"{' and '.join(ended)} of the {len(self.workers)} ranks of vLLM ended"
        return self._loss is not None
