"""A drafter as the simulator sees it: `drafters.loop.DrafterLoop` with lengths in the place of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.assignment import Chain
from simulator.agreement import Agreement, SimulatedRequest
from simulator.events import MAIL, STEP, Events
from simulator.timing import DraftTimer, Jitter, Work

Confidences = tuple[float, ...]


@dataclass(slots=True)
class SimulatedProposal:
    """``base``: tokens of output that it extends; the first ``num_right`` of ``num_tokens`` are the answer's.

    Nobody changes one; it is not frozen because that takes three times as long to make.
    """

    request_id: str
    base: int
    num_tokens: int
    num_right: int
    confidences: Confidences
    drafter: str
    unfinished: bool = False  # as of Proposal


@dataclass(slots=True)
class News:
    """What a target tells a drafter in a round: as `cluster.messages.DraftRound`.

    ``opens`` and ``extends`` map a request to how much of its output is committed; ``leads`` to who is to ride ahead.
    """

    opens: dict[str, tuple[SimulatedRequest, int]]
    leads: dict[str, Chain]
    extends: dict[str, int]
    releases: set[str]
    max_draft_len: int


class Hears(Protocol):
    """A target's end of the link."""

    def hear(self, proposals: list[SimulatedProposal]) -> None: ...


class _Followed:
    """As `drafters.session.Session`."""

    __slots__ = (
        "agreement",
        "ahead",
        "answered",
        "budget",
        "confidences",
        "exhausted",
        "lead",
        "num_computed",
        "num_right",
        "num_sent",
        "position",
        "request",
        "target",
    )

    def __init__(
        self, request: SimulatedRequest, agreement: Agreement, target: Hears, position: int, num_computed: int, budget: int
    ) -> None:
        self.request = request
        self.agreement = agreement
        self.target = target
        self.position = position  # committed tokens of output
        self.num_computed = num_computed  # of prompt and output, in the drafter's cache
        self.budget = budget
        self.lead: Chain = ()
        self.ahead = 0  # drafted beyond what is committed
        self.num_right = 0
        self.confidences: Confidences = ()
        self.num_sent = 0
        self.answered = self.exhausted = False

    @property
    def wanted(self) -> int:
        return max(0, min(self.budget, self.request.max_tokens - self.position - 1))

    @property
    def num_behind(self) -> int:
        return self.request.prompt_len + self.position - 1 - self.num_computed

    def commit(self, position: int) -> None:
        num_new = position - self.position
        if num_new <= 0:
            return
        # Of a draft all but the last token were computed on the way.
        end = self.request.prompt_len + self.position
        self.num_computed = max(self.num_computed, end + min(num_new, self.num_right, max(0, self.ahead - 1)))
        if self.ahead >= num_new and self.num_right >= num_new:
            self.ahead -= num_new
            self.num_right -= num_new
            self.confidences = self.confidences[num_new:]
        else:
            self.ahead = self.num_right = 0
            self.confidences = ()
        self.position = position
        self.num_sent = 0
        self.answered = False
        self.exhausted = self.exhausted and self.ahead > 0


class SimulatedDrafter:
    """One replica. Owns its time: while it drafts, mail waits.

    Args:
        latency_s: of a message to or from a target.
        in_step: a request that comes from another drafter need not be caught up with, for that was done in spare time.
        companion: lives in the thread of its only target, which waits while it drafts.
    """

    def __init__(
        self,
        events: Events,
        name: str,
        timer: DraftTimer,
        jitter: Jitter,
        *,
        capacity: int,
        max_draft_len: int,
        ahead_len: int = 0,
        latency_s: float = 0.0,
        in_step: bool = False,
        companion: bool = False,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.max_draft_len = max_draft_len
        self.latency_s = latency_s
        self.companion = companion
        self.busy_s = 0.0
        self.num_batches = self.num_tokens = 0
        self._events = events
        self._timer = timer
        self._jitter = jitter
        self._ahead_len = ahead_len
        self._ahead_chunk = max(1, ahead_len // 4)
        self._in_step = in_step
        self._followed: dict[str, _Followed] = {}
        self._refused: dict[str, tuple[Hears, SimulatedRequest, int]] = {}
        self._owed: dict[str, tuple[Hears, int]] = {}
        self._mail: list[tuple[Hears, News]] = []
        self._busy = self._woken = False

    def tell(self, target: Hears, news: News) -> None:
        """A message from a target, under way from now on."""
        if self.companion:
            self._mail.append((target, news))
            return
        self._events.at(self._events.now_s + self.latency_s, MAIL, lambda now_s: self._receive(target, news))

    def step_as_companion(self) -> float:
        """All that there is to do now, and how long it takes."""
        total_s = 0.0
        while True:
            self._hear()
            drafting = self._next()
            if drafting is None:
                self.busy_s += total_s
                return total_s
            batch, further = drafting
            if batch:
                total_s += self._drafted_s(batch)
                self._finish(batch, further)

    def _receive(self, target: Hears, news: News) -> None:
        self._mail.append((target, news))
        self._wake()

    def _wake(self) -> None:
        if not self._busy and not self._woken:
            self._woken = True
            self._events.at(self._events.now_s, STEP, self._step)

    def _step(self, now_s: float) -> None:
        self._woken = False
        while True:
            self._hear()
            drafting = self._next()
            if drafting is None:
                return
            batch, further = drafting
            if batch:
                seconds = self._jitter(self._drafted_s(batch))
                self.busy_s += seconds
                self._busy = True
                self._events.at(now_s + seconds, STEP, self._ended(batch, further))
                return

    def _ended(self, batch: list[tuple[_Followed, int]], further: bool) -> Callable[[float], None]:
        def end(now_s: float) -> None:
            self._busy = False
            self._finish(batch, further)
            self._step(now_s)

        return end

    def _next(self) -> tuple[list[tuple[_Followed, int]], bool] | None:
        """What to draft now, and whether it is further ahead than was asked.

        An empty batch: something was answered, look again; None: nothing to do.
        """
        unanswered = [f for f in self._followed.values() if not f.answered and f.budget]
        ready = [f for f in unanswered if f.ahead >= f.wanted or (self._ahead_len and f.ahead)]
        if ready or self._owed:
            self._answer(ready)
            return [], False
        if unanswered:
            return [(f, f.wanted - f.ahead) for f in unanswered], False
        if self._ahead_len:
            further = []
            for f in self._followed.values():
                if f.answered and not f.exhausted and f.budget:
                    limit = min(f.num_sent + self._ahead_len, f.request.max_tokens - f.position - 1)
                    num_tokens = min(self._ahead_chunk, limit - f.ahead)
                    if num_tokens > 0:
                        further.append((f, num_tokens))
            if further:
                return further, True
        return None

    def _drafted_s(self, batch: list[tuple[_Followed, int]]) -> float:
        """Drafts; what comes of it counts from `_finish` on."""
        works = []
        for f, num_asked in batch:
            position = f.position + f.ahead
            num_tokens = f.agreement.num_drafted(position, num_asked)
            works.append(Work(f.request, position, num_asked, num_tokens, max(0, f.num_behind), f.lead))
            f.num_computed = max(f.num_computed, f.request.prompt_len + f.position)
        self.num_batches += 1
        return self._timer.seconds(self.name, works)

    def _finish(self, batch: list[tuple[_Followed, int]], further: bool) -> None:
        for f, num_asked in batch:
            is_right = f.num_right == f.ahead
            num, right, confidences = f.agreement.draft(f.position + f.ahead, num_asked, is_right)
            f.ahead += num
            f.num_right += right
            f.confidences += confidences
            f.exhausted = num < num_asked
            self.num_tokens += num
        if not further:
            self._hear()  # what was committed meanwhile makes some of it stale
            fresh = [f for f in self._followed.values() if not f.answered and f.budget]
            self._answer([f for f in fresh if f.ahead or f.exhausted or not f.wanted])

    def _answer(self, answered: list[_Followed]) -> None:
        by_target: dict[int, tuple[Hears, list[SimulatedProposal]]] = {}
        for f in answered:
            f.answered = True
            f.num_sent = num = min(f.wanted, f.ahead)
            confidences, unfinished = f.confidences[:num], not f.exhausted or num < f.ahead
            proposal = SimulatedProposal(
                f.request.id, f.position, num, min(num, f.num_right), confidences, self.name, unfinished
            )
            by_target.setdefault(id(f.target), (f.target, []))[1].append(proposal)
        for request_id, (target, position) in self._owed.items():
            proposal = SimulatedProposal(request_id, position, 0, 0, (), self.name)
            by_target.setdefault(id(target), (target, []))[1].append(proposal)
        self._owed.clear()
        for target, proposals in by_target.values():
            if self.companion:
                target.hear(proposals)
            else:
                self._events.at(self._events.now_s + self.latency_s, MAIL, _hearing(target, proposals))

    def _hear(self) -> None:
        mail, self._mail = self._mail, []
        for target, news in mail:
            for request, position in news.opens.values():
                self._open(target, request, position, news.max_draft_len)
            for request_id, position in news.extends.items():
                followed = self._followed.get(request_id)
                if followed is not None:
                    followed.commit(position)
                elif request_id in self._refused:
                    self._refuse(target, self._refused[request_id][1], position)
            for request_id, lead in news.leads.items():
                if request_id in self._followed:
                    self._followed[request_id].lead = lead
            for request_id in news.releases:
                self._followed.pop(request_id, None)
                self._refused.pop(request_id, None)
                self._owed.pop(request_id, None)
        while self._refused and len(self._followed) < self.capacity:
            request_id, (target, request, position) = next(iter(self._refused.items()))
            del self._refused[request_id]
            self._owed.pop(request_id, None)
            self._open(target, request, position, self.max_draft_len)

    def _open(self, target: Hears, request: SimulatedRequest, position: int, budget: int) -> None:
        followed = self._followed.get(request.id)
        if followed is not None:
            followed.commit(position)
        elif len(self._followed) >= self.capacity:
            self._refuse(target, request, position)
        else:
            known = request.prompt_len + position if self._in_step and position else 0
            agreement = request.answer.of(self.name)
            self._followed[request.id] = _Followed(
                request, agreement, target, position, known, min(budget, self.max_draft_len)
            )

    def _refuse(self, target: Hears, request: SimulatedRequest, position: int) -> None:
        self._refused[request.id] = (target, request, position)
        self._owed[request.id] = (target, position)


def _hearing(target: Hears, proposals: list[SimulatedProposal]) -> Callable[[float], None]:
    return lambda now_s: target.hear(proposals)
