"""Timelines of requests: counts per round, without any text."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.types import Commit, Request
from deploy.api.choice import Choice

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
