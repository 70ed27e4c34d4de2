"""What Python costs on a target's thread: rounds of the live loop over an engine and drafters that answer at once.

The links are in memory and the clock is virtual, so what is timed is reading proposals, planning, judging and publishing,
by the default policies. Beside them rounds of requests that are decoded plainly: without drafters, and with a drafter in the
target's process that is not queried, since its drafts took too long. And rounds over a twin of an asynchronous device, a
thread on which each pass takes PASS_S: how long it waits for Python between two passes.
"""

import ctypes
import gc
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cluster.config import DraftLengthConfig
from cluster.cpu_scheduling import without_collection
from cluster.messages import DraftRound, Hello, ProposalRound, Role, SubmitRound
from cluster.sampling_params import SamplingParams
from cluster.transport.base import Event, Link, Mailbox, Received
from cluster.transport.memory import LocalNetwork
from cluster.types import ModelInfo, Proposal, Request, RoutingTable
from engine.round import DrafterPool, Policies, TargetLoop
from profiler.online_cost import OnlineCost
from router.cost_model import CostModel
from router.drafting.policies import build_draft_lengths
from router.plan import Capacity, Span

NUM_DRAFTERS = 4
DRAFT_LEN = 7
RATE = 0.75  # conditional acceptance of a draft token
PROMPT_LEN = 100
ROUNDS_PER_SLOT = 8
_WARM_UP = 150  # rounds
PASS_S = 0.01  # of the device's twin
_NAMES = [f"d{i}" for i in range(NUM_DRAFTERS)]
_SLOW, _TOO_SLOW_S = "slow", 1.0  # a drafter, and the time of its drafts for a round
_ADDRESS = "memory://round-python"
_MODEL = ModelInfo("fake", 50_000, 2**20, (0,), "fake")
_SEED = 17


class PythonTimes(NamedTuple):
    """Medians of the thread's processor time."""

    round_ms: float  # of a whole round
    publish_ms: float  # of that, from the end of the pass until the last drafter is sent what was committed


class Gap(NamedTuple):
    """What an asynchronous device waits for between two passes, in order: medians. ``total`` is wall time from the end of a
    pass to the launch of the next, less that of the drafters; the others are processor time of the round's thread."""

    total: float
    publish: float  # until the last drafter is sent what was committed
    commit: float  # the rest of what follows a pass
    mail: float  # proposals are read
    plan: float
    launch: float  # the spans of the plan are made, and handed to the engine


def python_times(num_requests: int, num_rounds: int, cost: CostModel) -> PythonTimes:
    """Of rounds of ``num_requests`` drafted requests."""
    rounds = _Rounds(num_requests, cost, _NAMES)
    times_s, publish_s = [], []
    for start_s in rounds.played(num_rounds):
        times_s.append(time.thread_time() - start_s)
        publish_s.append(rounds.last_sent_s - rounds.pass_end_s)
    rounds.check_drafted(num_rounds)
    return PythonTimes(*(1e3 * statistics.median(found) for found in (times_s, publish_s)))


def gap_ms(num_requests: int, num_rounds: int, cost: CostModel) -> Gap:
    """Between passes of ``num_requests`` drafted requests, in milliseconds."""
    device = _Device()
    rounds = _Rounds(num_requests, cost, _NAMES, device=device)
    gaps = []
    ended = sent = returned = answered_s = 0.0
    for start_s in rounds.played(num_rounds):
        read, planned = rounds.read_s, rounds.planned_s
        parts = sent - ended, returned - sent, read - start_s, planned - read, rounds.launched_s - planned
        gaps.append((device.waited_s - answered_s, *parts))
        ended, sent, returned, answered_s = rounds.pass_end_s, rounds.last_sent_s, time.thread_time(), 0.0
        answered_s = rounds.answer()
    device.close()
    rounds.check_drafted(num_rounds)
    return Gap(*(1e3 * statistics.median(found) for found in zip(*gaps[1:], strict=True)))


def plain_python_ms(num_requests: int, num_rounds: int, cost: CostModel, *, has_drafter: bool) -> float:
    """Median of rounds of ``num_requests`` plainly decoded requests. ``has_drafter``: in this process, not queried."""
    names = [_SLOW] if has_drafter else []
    rounds = _Rounds(num_requests, cost, names, colocated=True)
    last_sent_s = 0.0

    def warmed_up() -> None:
        nonlocal last_sent_s
        if rounds.last_sent_s > last_sent_s:  # it was queried
            last_sent_s = rounds.last_sent_s
            rounds.loop.observer.drafted_inline({_SLOW: _TOO_SLOW_S})

    times_s = [time.thread_time() - start_s for start_s in rounds.played(num_rounds, warmed_up)]
    assert rounds.last_sent_s == last_sent_s, "the drafter was queried while rounds were timed"
    return 1e3 * statistics.median(times_s)


class _Inbox(Mailbox):
    """Of a drafter, filled by the target's thread."""

    sent_s = 0.0  # processor time of that thread at the last message

    def put(self, event: Event, on_room: Callable[[], None] | None = None) -> bool:
        self.sent_s = time.thread_time()
        return super().put(event, on_room)


class _Device:
    """A twin: a thread on which each pass takes PASS_S. Waiting for it spins without the interpreter's lock, as for a CUDA
    stream: a core that sleeps for PASS_S comes back with cold caches. Elsewhere than on Linux it sleeps."""

    def __init__(self) -> None:
        self.waited_s = 0.0  # from the end of a pass to the launch of the last one
        self._end_s = time.perf_counter()
        self._launched, self._closed = threading.Semaphore(0), False
        self._done = _SpinLock() if sys.platform == "linux" else threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="device")
        self._thread.start()

    def launch(self) -> None:
        self.waited_s = time.perf_counter() - self._end_s
        self._launched.release()

    def wait(self) -> None:
        self._done.acquire()  # is free when the pass has ended

    def close(self) -> None:
        self._closed = True
        self._launched.release()
        self._thread.join()

    def _run(self) -> None:
        while self._launched.acquire() and not self._closed:
            time.sleep(PASS_S)
            self._end_s = time.perf_counter()
            self._done.release()


class _SpinLock:
    """Of POSIX threads; taken at first. Any thread may release it."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)  # whose calls run without the interpreter's lock
        self._lock = ctypes.c_int()
        self._acquire, self._release = library.pthread_spin_lock, library.pthread_spin_unlock
        library.pthread_spin_init(ctypes.byref(self._lock), 0)
        self.acquire()

    def acquire(self) -> None:
        self._acquire(ctypes.byref(self._lock))

    def release(self) -> None:
        self._release(ctypes.byref(self._lock))


class _Rounds:
    """A target loop, its drafters and its gateway; also its engine and clock."""

    def __init__(
        self,
        num_requests: int,
        cost: CostModel,
        names: Sequence[str],
        *,
        colocated: bool = False,
        device: _Device | None = None,
    ) -> None:
        self.is_asynchronous = device is not None
        self.meanwhile: Callable[[], None] | None = None
        self._device = device
        # Processor time of the thread when mail was read last, when the plan was made, and when its pass was launched.
        self.read_s = self.planned_s = self.launched_s = 0.0
        self._is_reading = self._is_planning = False
        self.now_s = 0.0
        self.num_accepted = 0
        self._rng = random.Random(_SEED)
        self._truth = tuple(self._rng.randrange(1, 49_000) for _ in range(200_000))
        self._cost = cost
        self.num_requests = num_requests
        network, mailbox = LocalNetwork(), Mailbox()
        table = RoutingTable(1, defaults=tuple((name,) for name in names) or ((),))
        lengths = build_draft_lengths(DraftLengthConfig(), dict.fromkeys(names, DRAFT_LEN))
        self.loop = TargetLoop(
            self,
            _MODEL,
            mailbox,
            OnlineCost(cost),
            self._clock,
            Policies(draft_lengths=lengths),
            DrafterPool(table, names if colocated else ()),
        )
        network.listen(_ADDRESS, mailbox, Hello(Role.TARGET, "target", _MODEL.vocab_size, "fake"))
        self.drafters: list[tuple[str, _Inbox, Link]] = []
        self.pass_end_s = 0.0  # processor time of the thread
        for name in names:
            inbox = _Inbox()
            hello = Hello(Role.DRAFTER, name, _MODEL.vocab_size, "fake")
            self.drafters.append((name, inbox, network.connect(_ADDRESS, inbox, hello)))
        self._inbox = Mailbox()
        gateway = network.connect(_ADDRESS, self._inbox, Hello(Role.GATEWAY, "api", _MODEL.vocab_size, "fake"))
        sampling = SamplingParams(max_tokens=2**19, ignore_eos=True)
        gateway.send(
            SubmitRound(
                tuple(
                    Request(f"chatcmpl-{i:024x}-0", self._truth[i : i + PROMPT_LEN], sampling, 0.0)
                    for i in range(num_requests)
                )
            )
        )

    @property
    def last_sent_s(self) -> float:
        """Processor time of the thread when a drafter was last sent something."""
        return max([inbox.sent_s for _, inbox, _ in self.drafters], default=0.0)

    def _clock(self) -> float:
        if self._is_planning:
            self._is_planning, self.planned_s = False, time.thread_time()
        return self.now_s

    def played(self, num_rounds: int, warmed_up: Callable[[], None] = lambda: None) -> Iterator[float]:
        """Behind each round after the first ones, which call ``warmed_up``: the processor time at which it began."""
        gc.collect()
        with without_collection():
            for number in range(_WARM_UP + num_rounds):
                self.answer()
                start_s = time.thread_time()
                report = self.loop.step(self.now_s)
                assert report.executed
                if number >= _WARM_UP:
                    yield start_s
                else:
                    warmed_up()
                if number % ROUNDS_PER_SLOT == 0:
                    self.loop.telemetry.take_observations()

    def check_drafted(self, num_rounds: int) -> None:
        assert self.num_accepted > self.num_requests * num_rounds, "the drafts were not used"

    def answer(self) -> float:
        """Every drafter proposes for every commit; the gateway drains its mailbox. Returns the seconds that took."""
        start_s, self._is_reading = time.perf_counter(), True
        self._inbox.drain()
        for name, inbox, link in self.drafters:
            proposals = []
            for event in inbox.drain():
                if isinstance(event, Received) and isinstance(event.message, DraftRound):
                    lens = [(one.request_id, len(one.token_ids)) for one in event.message.opens]
                    lens += [(one.request_id, one.base_len + len(one.token_ids)) for one in event.message.extends]
                    proposals += [self._proposal(request_id, length, name) for request_id, length in lens]
            if proposals:
                link.send(ProposalRound(1, tuple(proposals)))
        return time.perf_counter() - start_s

    def _proposal(self, request_id: str, base_len: int, drafter: str) -> Proposal:
        start = self._place(request_id) + base_len
        token_ids = list(self._truth[start : start + DRAFT_LEN])
        right = [self._rng.random() < RATE for _ in token_ids]
        token_ids = [token if is_right else token + 1 for token, is_right in zip(token_ids, right, strict=True)]
        confidences = tuple(self._rng.uniform(0.5, 1.0) if is_right else self._rng.uniform(0.0, 0.9) for is_right in right)
        return Proposal(request_id, base_len, tuple(token_ids), confidences, drafter)

    def _place(self, request_id: str) -> int:
        return int(request_id.split("-")[1], 16)

    # ---- the engine

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        return 0

    def num_cached(self, request: Request, token_ids: Sequence[int]) -> int:
        return 0

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        self.launched_s = time.thread_time()
        if self._device is not None:
            self._device.launch()
        if self.meanwhile is not None:
            self.meanwhile()
        for span in spans:
            if not span.samples:
                continue
            start = self._place(span.request_id) + span.base_len + span.num_compute
            drafts = span.drafts
            num_right = 0
            while num_right < span.num_drafts and drafts[num_right] == self._truth[start + num_right]:
                num_right += 1
            self.num_accepted += num_right
            span.chosen, span.num_accepted = self._truth[start : start + num_right + 1], num_right
        num_rows, context = sum(len(span.token_ids) for span in spans), sum(span.base_len for span in spans)
        self.now_s += self._cost.step_s(num_rows, context)
        if self._device is not None:
            self._device.wait()
        self.pass_end_s = time.thread_time()
        return spans

    def release(self, request_id: str) -> None: ...

    def capacity(self) -> Capacity:
        if self._is_reading:  # the first question of a round
            self._is_reading, self._is_planning, self.read_s = False, True, time.thread_time()
        return Capacity(16, 2**20, 2**19, 2 * self.num_requests, 2**14, _MODEL.max_model_len)

    def check_integrity(self) -> None: ...
