"""`LinkClient`: the API's EngineClient, which reaches the targets over links. A `RequestStream` checks and queues the
commits of one request."""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from actors.resumption import Resumption, aged
from cluster.client import ClusterStatus
from cluster.config import TlsConfig
from cluster.errors import LinkClosed, LinkFull, OutriderError, Overloaded, Unattainable
from cluster.message_checks import Inspection, commit_fault
from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.transport.base import Link, LinkDown, LinkUp, Received
from cluster.transport.dialer import MAX_PAUSE_S
from cluster.types import Commit, FinishReason, ModelInfo, Request, Slo
from engine.mailbox import DialingMailbox
from router.target_choice import TargetChoice

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
FULL_PAUSE_S = 0.05
MAX_FULL_S = 10.0  # when a target is lost, all of its requests are sent to others at once
IDLE_WAIT_S = 1.0
RELINK_S = MAX_PAUSE_S + 0.5  # in which a link that was reset is dialled again; behind a cut it takes longer
MAX_STALLED_S = 30.0  # the thread drains its mailbox every second


@dataclass(frozen=True, slots=True)
class Loss:
    """A stream has lost its target. ``suspects``: as of ``Resumption.note_death``."""

    reason: str
    suspects: Mapping[str, int]

    @property
    def error(self) -> LinkClosed:
        return LinkClosed(f"{self.reason}; send the request again")


STOPS = Loss("the server stops", {})


@dataclass(slots=True, eq=False)
class RequestStream:
    """Its queue is bounded by the request's max_tokens."""

    loop: asyncio.AbstractEventLoop
    link: Link
    next_len: int | None  # committed length at which the next commit begins; None after the last
    end_len: int  # committed length at max_tokens
    num_fruitless: int  # of `Resumption`, until its first token here
    blocks: Sequence[int]  # of its prompt, as of `router.target_choice`
    num_known: int  # of these when it was sent
    num_computed: int = 0  # tokens of prompt and output, by this target
    commits: asyncio.Queue[Commit | Loss] = field(default_factory=asyncio.Queue)

    def advance(self, commit: Commit, vocab_size: int) -> str | None:
        """Moves on to the next commit. Returns why ``commit`` is unsound or does not continue the stream, which ends it."""
        end_len = commit.base_len + len(commit.token_ids)
        fault = commit_fault(commit, vocab_size)
        if fault is None and commit.base_len != self.next_len:
            fault = f"a commit at {commit.base_len} after {self.next_len} committed tokens"
        elif fault is None and end_len > self.end_len:
            fault = f"{end_len - self.end_len} tokens more than the request allows"
        if fault is None and commit.finish is not FinishReason.ABORT and commit.token_ids:
            self.num_fruitless = 0
            self.num_computed += len(commit.token_ids)
        if fault is None and commit.prefill is not None and commit.token_ids:
            self.num_computed += commit.base_len - commit.prefill.num_cached_tokens
        self.next_len = None if fault is not None or commit.finish is not None else end_len
        return fault


def deliver(loop: asyncio.AbstractEventLoop, items: Iterable[tuple[RequestStream, Commit | Loss]]) -> None:
    """With one wake-up of ``loop``. From any thread."""

    def put() -> None:
        for stream, item in items:
            stream.commits.put_nowait(item)

    if not loop.is_closed():
        loop.call_soon_threadsafe(put)


def is_refusal(commit: Commit) -> bool:
    """Whether another target may take the request."""
    return commit.finish in (FinishReason.OVERLOADED, FinishReason.DRAINING)


def refusal_error(commit: Commit, slo: Slo) -> OutriderError:
    """What a caller is told when no target takes its request, of which ``commit`` is the refusal."""
    reason = commit.error or "the target takes no more requests"
    if commit.finish is FinishReason.DRAINING:
        return LinkClosed(reason)
    if commit.prefill is None or slo.ttft_s is None:
        return Overloaded(reason, RETRY_AFTER_S)
    excess_s = commit.prefill.queue_s + commit.prefill.prefill_s - slo.ttft_s
    return Unattainable(reason, max(RETRY_AFTER_S, excess_s))


class LinkClient:
    """Serves any number of asyncio tasks. A thread of its own drains the mailbox and keeps the links.

    A request goes to a target that has much of its prompt cached and few requests of this client (`router.target_choice`).
    Addresses may change (``set_addresses``).

    Args:
        resume_wait_s: how long a request whose target is lost waits for another, if none is linked.
        by_prefix: False: targets are chosen by their requests alone.
    """

    def __init__(
        self,
        name: str,
        model: ModelInfo,
        addresses: Sequence[str],
        status: Callable[[], Awaitable[ClusterStatus]],
        token: str = "",
        resume_wait_s: float = 0.0,
        tls: TlsConfig | None = None,
        by_prefix: bool = True,
    ) -> None:
        self._model = model
        self._status = status
        self._resume_wait_s = resume_wait_s
        self._num_resumed = 0
        hello = Hello(Role.GATEWAY, name, model.vocab_size, model.tokenizer_fingerprint, token)
        self._mailbox = DialingMailbox(hello, addresses, tls)
        self._lock = threading.Lock()  # guards the fields below, shared by the client's thread and the callers' loops
        self._links: dict[Link, int] = {}  # open links and the number of requests on each
        self._choice: TargetChoice[Link] = TargetChoice(by_prefix)
        self._streams: dict[str, RequestStream] = {}
        self._aborts: dict[Link, set[str]] = {}  # not sent yet
        self._leaving: frozenset[str] = frozenset()
        self._awaiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}  # of callers without a target
        self._inspection = Inspection(f"gateway {name}")
        # Held by a request that is tried alone, since targets failed in turn under several.
        self._alone: defaultdict[asyncio.AbstractEventLoop, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stop = threading.Event()
        self._ends = False
        self._links_changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name=f"gateway-{name}", daemon=True)
        self._thread.start()

    async def model(self) -> ModelInfo:
        return self._model

    async def status(self) -> ClusterStatus:
        return replace(await self._status(), num_resumed=self._num_resumed)

    def set_model(self, model: ModelInfo) -> None:
        """With other adapters."""
        self._model = model

    def set_addresses(self, addresses: Sequence[str]) -> None:
        self._mailbox.set_addresses(addresses)

    def set_leaving(self, names: Iterable[str]) -> None:
        """Targets that get new requests only when there are no others."""
        self._leaving = frozenset(names)

    def recent_prefixes(self) -> Mapping[str, Sequence[Sequence[int]]]:
        """Of `TargetChoice`, by the instance of the target."""
        found: defaultdict[str, list[Sequence[int]]] = defaultdict(list)
        with self._lock:
            for link, blocks in self._choice.recent():
                found[link.peer.instance].append(blocks)
        return found

    def learn_prefixes(self, prefixes: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Those of another gateway."""
        with self._lock:
            for link in self._links:
                for blocks in prefixes.get(link.peer.instance, ()):
                    self._choice.learn(link, blocks)

    def end_requests(self) -> None:
        """Every request under way, and each that comes, ends with LinkClosed: the server stops."""
        with self._lock:
            self._ends = True
            streams = tuple(self._streams.values())
        for stream in streams:
            deliver(stream.loop, [(stream, STOPS)])
        self._wake_awaiting()

    def wait_linked(self, timeout_s: float, num_targets: int = 1) -> bool:
        """Waits for links to ``num_targets`` targets. False after the timeout."""
        with self._lock:
            return self._links_changed.wait_for(lambda: len(self._links) >= num_targets, timeout_s)

    @property
    def is_linked(self) -> bool:
        return bool(self._links)

    async def generate(self, request: Request) -> AsyncGenerator[Commit, None]:
        resumption = Resumption(request)
        gave_up: set[Link] = set()  # targets that were lost with the request
        avoided: set[Link] = set()  # and those that refused it since
        refused: Commit | None = None
        lost: LinkClosed | None = None  # why its last target was lost
        lost_s = 0.0
        async with AsyncExitStack() as alone:
            while True:
                stream = await self._sent(request, avoided, resumption.num_fruitless, lost, lost_s)
                goes_on = finished = False
                try:
                    while True:
                        item = await stream.commits.get()
                        if isinstance(item, Loss):
                            break  # the finally clause aborts the request
                        finished = item.finish is not None
                        if is_refusal(item):
                            break
                        if lost is not None and not goes_on:
                            goes_on = True
                            self._num_resumed += 1
                            num = len(request.output_token_ids)
                            logger.info("%s goes on elsewhere after %d tokens: %s", request.id, num, lost)
                        if item.token_ids and resumption.num_fruitless:
                            await alone.aclose()
                        commit = resumption.deliver(item)
                        if commit is not None:
                            yield commit
                        if finished:
                            return
                finally:
                    self._forget(request.id, abort=not finished)
                avoided.add(stream.link)
                if self._ends:
                    raise STOPS.error
                if isinstance(item, Commit):
                    if refused is None or refused.finish is FinishReason.DRAINING:
                        refused = item  # a full queue says more about when to come again
                    if lost is None and not self._candidates(avoided):
                        raise refusal_error(refused, request.slo)
                    continue
                lost, lost_s = item.error, asyncio.get_running_loop().time()
                gave_up.add(stream.link)
                if stream.link.peer.name not in self._leaving:
                    resumption.note_death(item.suspects, stream.link.peer.instance)
                    if resumption.is_suspect and not await self._until(
                        lambda: resumption.discount(self._linked_again(gave_up)), lost_s + RELINK_S
                    ):
                        yield resumption.error(item.reason)
                        return
                request, avoided = resumption.resume(), set(gave_up)
                await alone.aclose()
                if resumption.num_fruitless > 1:
                    await alone.enter_async_context(self._alone[asyncio.get_running_loop()])
                lost_s = asyncio.get_running_loop().time()

    async def close(self) -> None:
        self._stop.set()
        self._mailbox.wake()
        await asyncio.to_thread(self._thread.join, 10.0)

    # ---- on the callers' event loops

    def _candidates(self, refused_by: set[Link], blocks: Sequence[int] = ()) -> list[Link]:
        """Targets that have not refused the request, the best for a prompt of these blocks first; those that leave last."""
        with self._lock:
            num_requests = {link: num for link, num in self._links.items() if link not in refused_by}
            ranked = self._choice.ranked(num_requests, blocks)
        return sorted(ranked, key=lambda link: link.peer.name in self._leaving)

    def _linked_again(self, lost: Collection[Link]) -> set[str]:
        """Instances of targets that are linked, by links that were not lost."""
        with self._lock:
            return {link.peer.instance for link in self._links if link not in lost and link.peer.instance}

    async def _until(self, is_met: Callable[[], object], until_s: float) -> bool:
        """Waits for links that meet a condition. False: it is not met by ``until_s``, on the loop's clock."""
        linked = asyncio.Event()
        with self._lock:
            self._awaiting[linked] = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(until_s):
                while not is_met():
                    linked.clear()
                    if self._stop.is_set() or self._ends:
                        return False
                    await linked.wait()
        except TimeoutError:
            return False
        finally:
            with self._lock:
                del self._awaiting[linked]
        return True

    async def _sent(
        self, request: Request, avoided: set[Link], num_fruitless: int, lost: LinkClosed | None, lost_s: float
    ) -> RequestStream:
        """As ``_submit``. A request whose last target was ``lost`` waits for another one, and for room there."""
        while not self._ends:
            if lost and not await self._until(partial(self._candidates, avoided), lost_s + self._resume_wait_s):
                raise lost
            try:
                return self._submit(request, avoided, num_fruitless)
            except LinkClosed:
                if lost is None:
                    raise
            except Overloaded:
                if lost is None or asyncio.get_running_loop().time() > lost_s + MAX_FULL_S:
                    raise
                await asyncio.sleep(FULL_PAUSE_S)  # links do not tell when they have room
        raise STOPS.error

    def _submit(self, request: Request, avoided: set[Link], num_fruitless: int) -> RequestStream:
        """Adds targets whose links are closed to ``avoided``. Raises LinkClosed: no target is linked; Overloaded: the linked
        ones read too slowly."""
        full: LinkFull | None = None
        blocks = self._choice.blocks(request)
        for link in self._candidates(avoided, blocks):
            base_len, end_len = request.committed_len, len(request.prompt_token_ids) + request.sampling.max_tokens
            with self._lock:
                known = blocks, self._choice.num_known(link, blocks)
                stream = RequestStream(asyncio.get_running_loop(), link, base_len, end_len, num_fruitless, *known)
                self._streams[request.id] = stream
                if link in self._links:
                    self._links[link] += 1
            try:
                link.send(SubmitRound(submits=(aged(request),)))
            except OutriderError as error:
                self._forget(request.id, abort=False)
                if not isinstance(error, LinkFull | LinkClosed):
                    raise
                if isinstance(error, LinkFull):
                    full = error
                else:
                    avoided.add(link)
                continue
            return stream
        if full is not None:
            raise Overloaded(f"the target reads too slowly: {full}", RETRY_AFTER_S) from full
        raise LinkClosed("no target can be reached now; it may be starting or restarting, try again")

    def _forget(self, request_id: str, abort: bool) -> None:
        with self._lock:
            stream = self._streams.pop(request_id, None)
            if stream is None:
                return
            if stream.link in self._links:
                self._links[stream.link] -= 1
                self._choice.ended(stream.link, stream.num_computed)
                if abort:
                    self._aborts.setdefault(stream.link, set()).add(request_id)
        if abort:
            self._send_aborts()

    def check_health(self) -> None:
        """Raises LinkClosed when this client cannot serve any more: its thread has ended or hangs."""
        if not self._thread.is_alive() and not self._stop.is_set():
            raise LinkClosed("the thread that keeps the links has ended")
        if self._mailbox.stalled_s() > MAX_STALLED_S:
            raise LinkClosed(f"the thread that keeps the links has been stalled for {self._mailbox.stalled_s():.0f} s")

    def _send_aborts(self) -> None:
        """Aborts that do not fit into a link's queue stay for the next call."""
        with self._lock:
            for link, request_ids in tuple(self._aborts.items()):
                try:
                    link.send(SubmitRound(aborts=tuple(request_ids)))
                except LinkFull:
                    continue
                except LinkClosed:
                    pass  # the target aborts the requests of a lost gateway
                del self._aborts[link]

    # ---- on the client's thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._handle_events()
                self._send_aborts()
                self._mailbox.wait(IDLE_WAIT_S)
        finally:
            self._mailbox.close()
            with self._lock:
                links = tuple(self._links)
                self._links.clear()
            for link in links:
                link.close()
                self._link_down(link, "this gateway stops")
            self._wake_awaiting()

    def _handle_events(self) -> None:
        for event in self._mailbox.drain():
            match event:
                case LinkUp(link):
                    with self._lock:
                        self._links.setdefault(link, 0)
                        self._links_changed.notify_all()
                    self._wake_awaiting()
                case LinkDown(link, reason):
                    self._link_down(link, reason)
                case Received(link, _) if link not in self._links:
                    pass  # the link was dropped before this message was read
                case Received(link, CommitRound(commits)):
                    if faults := self._dispatch(link, commits):
                        self._inspection.note(link, faults)
                    if self._inspection.must_go(link):
                        self._drop_link(link, "it sent too many unsound messages")
                case Received(link, message):
                    self._drop_link(link, f"it sent a {type(message).__name__}, which a gateway does not accept")

    def _wake_awaiting(self) -> None:
        with self._lock:
            awaiting = tuple(self._awaiting.items())
        for linked, loop in awaiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(linked.set)

    def _dispatch(self, link: Link, commits: Sequence[Commit]) -> list[str]:
        """Delivers commits with one wake-up per event loop; an invalid one ends its stream. Returns the faults."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, Commit | Loss]]] = {}
        faults: list[str] = []
        suspects: dict[str, int] = {}
        with self._lock:
            for commit in commits:
                stream = self._streams.get(commit.request_id)
                if stream is None or stream.link is not link or stream.next_len is None:
                    continue  # the stream has ended or belongs to another target
                fault = stream.advance(commit, self._model.vocab_size)
                item: Commit | Loss = commit
                if fault is not None:
                    faults.append(fault)
                    item = Loss(f"the target sent {fault}", {})
                elif commit.finish is FinishReason.ABORT:
                    item = Loss(commit.error or "the target gave it up", suspects)
                elif commit.prefill is not None and commit.token_ids:
                    self._choice.computed(link, stream.blocks, commit.prefill.num_cached_tokens, stream.num_known)
                by_loop.setdefault(stream.loop, []).append((stream, item))
            if any(commit.finish is FinishReason.ABORT for commit in commits):
                suspects |= self._suspects(link)  # none that has a token of this round
        for loop, items in by_loop.items():
            deliver(loop, items)
        return faults

    def _drop_link(self, link: Link, reason: str) -> None:
        self._mailbox.drop(link)
        self._link_down(link, reason)

    def _link_down(self, link: Link, reason: str) -> None:
        self._inspection.forget(link)
        with self._lock:
            self._links.pop(link, None)
            self._choice.forget(link)
            self._aborts.pop(link, None)
            cut_off = [stream for stream in self._streams.values() if stream.link is link]
            loss = Loss(f"the target is gone: {reason}", self._suspects(link))
        for stream in cut_off:
            deliver(stream.loop, [(stream, loss)])

    def _suspects(self, link: Link) -> dict[str, int]:
        """With the lock held."""
        streams = self._streams.items()
        return {key: one.num_fruitless for key, one in streams if one.link is link and one.num_fruitless}
