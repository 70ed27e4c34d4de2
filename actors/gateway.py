"""The way from the API to the targets: an EngineClient over links."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from actors.dialer import Dialer
from cluster.client import ClusterStatus
from cluster.errors import LinkClosed, LinkFull, OutriderError, Overloaded
from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.transport.base import Link, LinkDown, LinkUp, Mailbox, Received
from cluster.types import Commit, FinishReason, ModelInfo, Request

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
IDLE_WAIT_S = 1.0


@dataclass(slots=True, eq=False)
class _Stream:
    """One request under way. Its queue is bounded by the request's own max_tokens."""

    loop: asyncio.AbstractEventLoop
    link: Link
    commits: asyncio.Queue[Commit | Exception] = field(default_factory=asyncio.Queue)


class LinkClient:
    """Serves any number of asyncio tasks; one thread of its own reads the mail and keeps the links.

    A request goes to the target with the fewest requests from here. Addresses may change while it runs (``want``).
    """

    def __init__(
        self,
        name: str,
        model: ModelInfo,
        addresses: Sequence[str],
        status: Callable[[], Awaitable[ClusterStatus]],
        token: str = "",
    ) -> None:
        self._model = model
        self._status = status
        self._mailbox = Mailbox()
        hello = Hello(Role.GATEWAY, name, model.vocab_size, model.tokenizer_fingerprint, token)
        self._dialer = Dialer(self._mailbox, hello)
        self._wanted: tuple[str, ...] = tuple(addresses)
        self._lock = threading.Lock()  # guards what follows, shared by this thread and the callers' loops
        self._links: dict[Link, int] = {}  # open links and how many requests each carries
        self._streams: dict[str, _Stream] = {}
        self._aborts: dict[Link, set[str]] = {}  # that could not be sent yet
        self._stop = threading.Event()
        self._links_changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name=f"gateway-{name}", daemon=True)
        self._thread.start()

    async def model(self) -> ModelInfo:
        return self._model

    async def status(self) -> ClusterStatus:
        return await self._status()

    def want(self, addresses: Sequence[str]) -> None:
        """Where the targets are now."""
        self._wanted = tuple(addresses)
        self._mailbox.wake()

    def wait_linked(self, timeout_s: float, num_targets: int = 1) -> bool:
        """Whether so many targets could be reached within the time."""
        with self._lock:
            return self._links_changed.wait_for(lambda: len(self._links) >= num_targets, timeout_s)

    @property
    def is_linked(self) -> bool:
        return bool(self._links)

    async def generate(self, request: Request) -> AsyncIterator[Commit]:
        refused_by: set[Link] = set()
        while True:
            stream = self._submit(request, refused_by)
            finished = False
            try:
                while not finished:
                    commit = await stream.commits.get()
                    if isinstance(commit, Exception):
                        finished = True
                        raise commit
                    finished = commit.finish is not None
                    if commit.finish is FinishReason.OVERLOADED:
                        break
                    yield commit
                else:
                    return
            finally:
                self._forget(request.id, abort=not finished)
            refused_by.add(stream.link)
            if not self._others(refused_by):
                raise Overloaded(commit.error or "the target takes no more requests", RETRY_AFTER_S)

    async def close(self) -> None:
        self._stop.set()
        self._mailbox.wake()
        await asyncio.to_thread(self._thread.join, 10.0)

    # ---- the callers' side

    def _others(self, refused_by: set[Link]) -> list[Link]:
        """Targets that have not refused, the one with the fewest requests from here first."""
        with self._lock:
            return sorted(self._links.keys() - refused_by, key=lambda link: self._links[link])

    def _submit(self, request: Request, refused_by: set[Link]) -> _Stream:
        others = self._others(refused_by)
        if not others:
            raise LinkClosed("no target can be reached now; it may be starting or restarting, try again")
        link = others[0]
        with self._lock:
            stream = _Stream(asyncio.get_running_loop(), link)
            self._streams[request.id] = stream
            if link in self._links:
                self._links[link] += 1
        try:
            link.send(SubmitRound(submits=(request,)))
        except LinkFull as full:
            self._forget(request.id, abort=False)
            raise Overloaded(f"the target reads too slowly: {full}", RETRY_AFTER_S) from full
        except OutriderError:
            self._forget(request.id, abort=False)
            raise
        return stream

    def _forget(self, request_id: str, abort: bool) -> None:
        with self._lock:
            stream = self._streams.pop(request_id, None)
            if stream is None:
                return
            if stream.link in self._links:
                self._links[stream.link] -= 1
            if abort and stream.link in self._links:
                self._aborts.setdefault(stream.link, set()).add(request_id)
        if abort:
            self._send_aborts()

    def _send_aborts(self) -> None:
        """What does not fit into a link's queue now goes with the next; at most as many as there were requests."""
        with self._lock:
            for link, request_ids in tuple(self._aborts.items()):
                try:
                    link.send(SubmitRound(aborts=tuple(request_ids)))
                except LinkFull:
                    continue
                except LinkClosed:
                    pass  # the target ends what a lost gateway asked for
                del self._aborts[link]

    # ---- the thread's side

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._dialer.want(self._wanted)
                now_s = time.monotonic()
                due_s = self._dialer.tick(now_s)
                wait_s = IDLE_WAIT_S if due_s is None else max(0.0, due_s - now_s)
                self._mailbox.wait(min(wait_s, IDLE_WAIT_S))
                self._take_mail()
                self._send_aborts()
        finally:
            self._dialer.close()
            for link in tuple(self._links):
                link.close()
                self._down(link, "this gateway stops")

    def _take_mail(self) -> None:
        for event in self._mailbox.drain():
            match event:
                case LinkUp(link):
                    with self._lock:
                        self._links.setdefault(link, 0)
                        self._links_changed.notify_all()
                case LinkDown(link, reason):
                    self._dialer.lost(link, time.monotonic())
                    self._down(link, reason)
                case Received(_, CommitRound(commits)):
                    self._dispatch(commits)
                case Received(link, message):
                    link.close()
                    self._dialer.lost(link, time.monotonic())
                    self._down(link, f"it sent a {type(message).__name__}, which a gateway does not take")

    def _dispatch(self, commits: Sequence[Commit]) -> None:
        """Hands the commits of a round over with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Commit | Exception]]] = {}
        with self._lock:
            for commit in commits:
                stream = self._streams.get(commit.request_id)
                if stream is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, commit))
        for loop, items in by_loop.items():
            _call(loop, items)

    def _down(self, link: Link, reason: str) -> None:
        with self._lock:
            self._links.pop(link, None)
            self._aborts.pop(link, None)
            cut_off = [stream for stream in self._streams.values() if stream.link is link]
        for stream in cut_off:
            _call(stream.loop, [(stream, LinkClosed(f"the target is gone: {reason}; send the request again"))])


def _call(loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, Commit | Exception]]) -> None:
    def put() -> None:
        for stream, item in items:
            stream.commits.put_nowait(item)

    if not loop.is_closed():
        loop.call_soon_threadsafe(put)
