"""The recent past: a sample of the cluster's status every few seconds, and timelines of requests, which are counts per round
without any text."""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.client import ClusterStatus
from cluster.counts import summed
from cluster.errors import LinkClosed
from cluster.types import Commit, FinishReason, Request
from deploy.api.choice import Choice

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
MAX_SAMPLES = 600  # 20 minutes

RATIO = 1.1  # of the bounds of one bucket of times, so that a percentile is right within 5%
_LEAST_S = 1e-4

Sample = dict[str, Any]  # as the page reads it
Times = dict[int, int]  # number of answers by bucket; bucket i holds times around RATIO ** (i + 0.5) seconds


@dataclass(slots=True)
class AnswerCounts:
    """Of the answers that end in a period. An answer cut off by its client has no end-to-end time. Used from one event
    loop."""

    ttft: Times = field(default_factory=dict)
    tpot: Times = field(default_factory=dict)
    e2e: Times = field(default_factory=dict)
    num_complete: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0  # looked up in the prefix cache
    num_cached_tokens: int = 0

    def note(self, commit: Commit) -> None:
        """The first commit of a request tells how much of its prompt was cached."""
        if commit.prefill is not None:
            self.num_prompt_tokens += commit.base_len
            self.num_cached_tokens += commit.prefill.num_cached_tokens

    def end(self, choice: Choice) -> None:
        """A choice has ended, complete or not."""
        if choice.is_counted:
            self.num_failed += choice.outcome is FinishReason.ERROR
            self.num_aborted += choice.outcome is FinishReason.ABORT
            self.num_complete += choice.outcome not in (FinishReason.ERROR, FinishReason.ABORT)
        for times, seconds in ((self.ttft, choice.ttft_s), (self.tpot, choice.tpot_s), (self.e2e, choice.e2e_s)):
            if seconds is not None:
                bucket = _bucket(seconds)
                times[bucket] = times.get(bucket, 0) + 1


def _bucket(seconds: float) -> int:
    return math.floor(math.log(max(seconds, _LEAST_S)) / math.log(RATIO))


class History:
    """``status`` and ``num_queued`` are asked for each sample. A cluster that does not answer leaves a gap."""

    def __init__(self, status: Callable[[], Awaitable[ClusterStatus]], num_queued: Callable[[], int]) -> None:
        self.answers = AnswerCounts()  # since the newest sample
        self._status = status
        self._num_queued = num_queued
        self._num_taken = 0
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            try:
                self.take(await self._status(), time.monotonic())
            except LinkClosed as error:
                logger.debug("no sample of the cluster's status: %s", error)
            except Exception:
                # No caller awaits this task; without it the dashboard would lose its plots.
                logger.exception("the dashboard could not sample the cluster's status")
            await asyncio.sleep(INTERVAL_S)

    def take(self, status: ClusterStatus, now_s: float) -> None:
        """Samples gauges, and counters since the targets' start, which fall when a target restarts."""
        self._num_taken += 1
        targets, drafters = status.targets, status.drafters
        num_blocks = sum(one.num_blocks for one in targets)
        num_free = sum(one.num_free_blocks for one in targets)
        counts = summed(tuple(one for target in targets for one in target.slo))
        self._samples.append(
            {
                "number": self._num_taken,
                "at_s": now_s,
                "policy": status.policy,
                "num_running": sum(one.num_running for one in targets),
                "num_waiting": sum(one.num_waiting for one in targets),
                "num_queued": self._num_queued(),  # calls, in this process
                "tokens_per_s": sum(one.tokens_per_s for one in targets),
                "kv_usage": 1 - num_free / num_blocks if num_blocks else 0.0,
                "num_targets": len(targets),
                "num_ready_targets": sum(one.state == "ready" for one in targets),
                "num_drafters": len(drafters),
                "num_ready_drafters": sum(one.state == "ready" for one in drafters),
                "num_proposed": sum(one.num_proposed for one in drafters),
                "num_accepted": sum(one.num_accepted for one in drafters),
                # Of rounds that only decoded.
                "num_rounds": sum(one.num_rounds for target in targets for one in target.drafting.by_load),
                "decode_s": sum(one.drafting.decode_s for one in targets),
                "plain_s": sum(one.drafting.plain_s for one in targets),
                "rejected_s": sum(one.drafting.rejected_s for one in targets),
                "slo": {one.name: (one.num_answers, one.num_met, one.num_refused) for one in counts},
                "answers": asdict(self.answers),  # of this process, since the sample before
            }
        )
        self.answers = AnswerCounts()

    def samples(self, after: int) -> list[Sample]:
        """Those with a number above ``after``, in order."""
        return [one for one in self._samples if one["number"] > after]


MAX_ROUNDS = 4096  # kept, of all requests together
MAX_SENT_ROUNDS = 2048  # in one answer: the newest
MAX_REQUESTS = 64  # in one answer, and ended requests kept
MAX_DRAFTERS = 128


@dataclass(frozen=True, slots=True)
class Round:
    """A commit of one request."""

    version: int
    request: int  # number of the request
    at_s: float
    base: int  # output tokens before it
    num_tokens: int
    num_proposed: int
    num_accepted: int
    drafter: str | None


@dataclass(slots=True)
class Timeline:
    """One request. ``version``: of its last change."""

    version: int
    number: int
    label: str
    tenant: str
    slo: str | None
    prompt_len: int
    arrived_s: float
    state: str = "waiting"
    ended_s: float | None = None
    num_tokens: int = 0
    num_rounds: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    drafter: str | None = None  # of its newest draft


class Timelines:
    """The requests of this process that run, and those that ended last. Used from one event loop.

    Every change raises ``version``, so that a reader fetches what is new to it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.version = 0
        self._clock = clock
        self._num_begun = 0
        self._live: dict[str, Timeline] = {}
        self._ended: deque[Timeline] = deque(maxlen=MAX_REQUESTS)
        self._rounds: deque[tuple[str, Round]] = deque(maxlen=MAX_ROUNDS)  # each with its tenant
        self._drafts: dict[str, Counter[tuple[int, int]]] = {}  # by drafter: draft length and accepted tokens

    def begin(self, request: Request, tenant: str = "") -> None:
        """A request waits for admission or for its first token."""
        self._num_begun += 1
        self.version += 1
        prompt_len, arrived_s = len(request.prompt_token_ids), request.arrival_s
        label = label_of(request.id)
        begun = self.version, self._num_begun, label, tenant, request.slo.name, prompt_len, arrived_s
        self._live[request.id] = Timeline(*begun)

    def note(self, commit: Commit, num_needed: int) -> None:
        """A commit whose first ``num_needed`` tokens are in the answer."""
        timeline = self._live.get(commit.request_id)
        if timeline is None:
            return
        self.version += 1
        proposed, accepted = commit.num_proposed, min(commit.num_accepted, num_needed)
        now_s, drafter = self._clock(), commit.drafter if proposed else None
        counts = self.version, timeline.number, now_s, timeline.num_tokens, num_needed, proposed, accepted
        self._rounds.append((timeline.tenant, Round(*counts, drafter)))
        timeline.version, timeline.state = self.version, "running"
        timeline.num_tokens += num_needed
        timeline.num_rounds += 1
        timeline.num_proposed += proposed
        timeline.num_accepted += accepted
        timeline.drafter = drafter or timeline.drafter
        if drafter is not None:
            drafts = self._drafts.get(drafter)
            if drafts is None and len(self._drafts) < MAX_DRAFTERS:
                drafts = self._drafts[drafter] = Counter()
            if drafts is not None:
                drafts[proposed, accepted] += 1

    def end(self, choice: Choice) -> None:
        """The request has ended, complete or not."""
        timeline = self._live.pop(choice.request.id, None)
        if timeline is None:
            return
        self.version += 1
        timeline.version, timeline.ended_s = self.version, self._clock()
        timeline.state = "failed" if choice.failed else "cut off" if choice.finish is None else "complete"
        self._ended.append(timeline)

    def requests(self, after: int, tenant: str | None = None) -> list[Timeline]:
        """Those of a tenant (None: of all) that changed after version ``after``, the newest MAX_REQUESTS at most."""
        changed = [one for one in (*self._ended, *self._live.values()) if one.version > after]
        shown = [one for one in changed if tenant in (None, one.tenant)]
        return sorted(shown, key=lambda one: one.number)[-MAX_REQUESTS:]

    def rounds(self, after: int, tenant: str | None = None) -> list[Round]:
        """Those after version ``after``, in order, the newest MAX_SENT_ROUNDS at most."""
        found: list[Round] = []
        for owner, one in reversed(self._rounds):
            if one.version <= after or len(found) >= MAX_SENT_ROUNDS:
                break
            if tenant in (None, owner):
                found.append(one)
        return found[::-1]

    def drafts(self) -> dict[str, list[tuple[int, int, int]]]:
        """By drafter: draft length, accepted tokens, and how many drafts had both."""
        return {name: sorted((*key, num) for key, num in drafts.items()) for name, drafts in self._drafts.items()}


def label_of(request_id: str) -> str:
    """The end of the call's random id, and the choice's number if it is not the first."""
    call, _, choice = request_id.rpartition("-")
    return call[-6:] if choice == "0" else f"{call[-6:]}.{choice}"
