"""Generates the choices of one call concurrently."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TypeVar, cast

from starlette.types import Receive

from cluster.client import EngineClient
from cluster.errors import LinkClosed, Overloaded
from cluster.logs import frames_of
from cluster.types import Commit
from deploy.api.choice import Choice, Delta
from deploy.api.errors import ClientGone

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Generation:
    """Owns one task per choice within ``async with``; leaving early aborts the unfinished ones.

    The tasks absorb commits as they arrive. ``deltas`` yields the text since its last batch, so a slow client gets fewer
    and longer deltas, and memory is bounded by max_tokens. ``on_end`` is called when the last task has ended.
    """

    def __init__(self, client: EngineClient, choices: Sequence[Choice], on_end: Callable[[], None]) -> None:
        self._client = client
        self._choices = choices
        self._on_end = on_end
        self._num_running = len(choices)
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Generation":
        for choice in self._choices:
            task = asyncio.create_task(self._run(choice), name=choice.request.id)
            task.add_done_callback(self._one_ended)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            # ``deltas`` raised the first error; the others are only logged.
            if isinstance(outcome, Exception) and outcome is not error:
                _logger.warning("a choice failed after the answer had ended: %s", frames_of(outcome))

    async def deltas(self) -> AsyncIterator[list[tuple[Choice, Delta]]]:
        """Batches of new text, until all have finished. Raises the first error of ``generate`` or ``Choice.absorb``."""
        unfinished = dict(zip(self._choices, self._tasks, strict=True))
        while unfinished:
            await self._news.wait()
            self._news.clear()
            batch = []
            for choice, task in list(unfinished.items()):
                if task.done():
                    task.result()
                if (delta := choice.take()) is not None:
                    batch.append((choice, delta))
                    if delta.finish is not None:
                        del unfinished[choice]
            if batch:
                yield batch

    async def finished(self) -> None:
        """Waits until every choice has finished. Raises as ``deltas``."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in self._tasks:
            if task.done():
                task.result()

    def _one_ended(self, task: asyncio.Task[None]) -> None:
        self._num_running -= 1
        self._news.set()
        if self._num_running == 0:
            self._on_end()

    async def _run(self, choice: Choice) -> None:
        # The protocol promises that closing the iterator aborts, so it is an async generator.
        commits = cast("AsyncGenerator[Commit, None]", self._client.generate(choice.request))
        choice.is_sent = True
        try:
            async for commit in commits:
                choice.absorb(commit, time.monotonic())
                self._news.set()
                if choice.finish is not None:
                    return
            raise LinkClosed("the target went away during generation")
        except (Overloaded, LinkClosed):
            choice.is_refused = not choice.is_served
            raise
        finally:
            await commits.aclose()


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits ``work``; cancels it and raises ClientGone when the client disconnects. The body has been read."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
