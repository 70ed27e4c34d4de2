"""A simulated drafter: the live loop over a drafter that only knows its agreement with each answer and what drafts cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from cluster.messages import LevelReport
from cluster.sampling_params import SamplingParams
from cluster.types import NO_DRAFTS
from drafters.draft_stops import DraftStops, cut_lens
from drafters.loop import DrafterLoop, StepWork
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from drafters.session import request_id_of
from drafters.sessions import SessionLimits
from router.assignment import Chain
from simulator.agreement import Agreement
from simulator.links import STEP, Events, VirtualMailbox
from simulator.text import Script
from simulator.timing import DraftTimer, Jitter, Work


@dataclass(slots=True, eq=False)
class _Followed:
    """A request as the drafter's cache holds it."""

    script: Script
    agreement: Agreement
    length: int  # committed tokens
    num_computed: int = 0  # of these
    ahead: int = 0  # drafted beyond them
    num_right: int = 0
    proposers: Chain = ()


@dataclass(slots=True)
class _Found:
    """A draft as long as demanded, until it is cut."""

    followed: _Followed
    start: int
    is_right: bool  # what lies before it
    num: int
    num_right: int
    confidences: tuple[float, ...]


class AgreementDrafter:
    """A `Drafter` that answers at once. ``seconds`` is what the last batch would have taken.

    It takes any proposers: they change only the time of a draft, which the timer knows.

    Args:
        scripts: of the requests, by id.
    """

    def __init__(self, name: str, timer: DraftTimer, scripts: Mapping[str, Script]) -> None:
        self.seconds = 0.0
        self.num_extended = 0  # committed tokens, so far
        self.name = name
        self._timer = timer
        self._scripts = scripts
        self._followed: dict[str, _Followed] = {}
        self._stops = DraftStops()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(chain=self, forks=self, stops=True)

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        script = self._scripts[request_id_of(request_id)]
        self._followed[request_id] = _Followed(script, script.request.answer.of(self.name), len(token_ids))

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._stops.extend(request_id, token_ids)
        one, num_new = self._followed[request_id], len(token_ids)
        # Of a draft all but the last token were computed on the way.
        num_drafted = min(num_new, one.num_right, max(0, one.ahead - 1))
        one.num_computed = max(one.num_computed, one.length + num_drafted)
        if one.ahead >= num_new and one.num_right >= num_new:
            one.ahead -= num_new
            one.num_right -= num_new
        else:
            one.ahead = one.num_right = 0
        one.length += num_new
        self.num_extended += num_new

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        found, works = [], []
        for demand in demands:
            one, num_ahead = self._followed[demand.request_id], len(demand.ahead)
            script, start = one.script, one.length + num_ahead
            position = start - script.request.prompt_len
            is_right = not num_ahead or demand.ahead == script.tokens(one.length, num_ahead)
            num, num_right, confidences = one.agreement.draft(position, demand.num_tokens, is_right)
            found.append(_Found(one, start, is_right, num, num_right, confidences))
            num_behind = max(0, one.length - 1 - one.num_computed)
            works.append(Work(script.request, position, demand.num_tokens, num, num_behind, one.proposers))
        if any(demand.terms != NO_DRAFTS for demand in demands):
            lens = self._lens(demands, [draft.confidences[: draft.num] for draft in found])
            for draft, work, length in zip(found, works, lens, strict=True):
                if length < draft.num:  # it ended by choice: the step in which it would have gone on was not made
                    draft.num, draft.num_right = length, min(draft.num_right, length)
                    work.asked = work.num_tokens = length
        drafts = [self._finished(*one) for one in zip(demands, found, strict=True)]
        self.seconds = self._timer.seconds(self.name, works)
        if works and not any(work.num_behind for work in works):
            self._stops.note_step(len(works), self.seconds / max(1, *[work.num_tokens for work in works]))
        return drafts

    def _lens(self, demands: Sequence[Demand], drafted: Sequence[tuple[float, ...]]) -> list[int]:
        """Where drafts end."""
        if self._ends_by_step(demands):
            return cut_lens(demands, drafted, self._stops)
        lens = []
        for demand, confidences in zip(demands, drafted, strict=True):
            survivals = accumulate(confidences, mul)
            doubtful = (i for i, survival in enumerate(survivals) if i and survival < demand.terms.least_survival)
            lens.append(next(doubtful, len(confidences)))
        return lens

    def _ends_by_step(self, demands: Sequence[Demand]) -> bool:
        """Whether drafts end step by step; those that take no time are found at once, as lookups find theirs."""
        return bool(self.seconds) or any(demand.terms.ends_drafts for demand in demands)

    def _finished(self, demand: Demand, draft: "_Found") -> Draft:
        one, num_ahead = draft.followed, len(demand.ahead)
        one.num_computed = max(one.num_computed, one.length)
        one.ahead = num_ahead + draft.num
        one.num_right = (num_ahead if draft.is_right else one.num_right) + draft.num_right
        token_ids = one.script.draft(draft.start, draft.num, draft.num_right)
        confidences = draft.confidences[: draft.num]
        self._stops.note_draft(demand, token_ids, confidences)
        runners_up: tuple[tuple[int, ...], ...] = ()
        if demand.num_runners_up:
            wrong = draft.start + draft.num_right - one.script.request.prompt_len
            rank = one.agreement.rank(wrong) if draft.is_right else 0
            runners_up = one.script.runners_up(draft.start, draft.num, draft.num_right, demand.num_runners_up, rank)
        return Draft(demand.request_id, token_ids, confidences, runners_up)

    def fork(self, request_id: str, branch_id: str, ahead: Sequence[int], num_more: int) -> bool:
        one = self._followed[request_id]
        self._followed[branch_id] = _Followed(one.script, one.agreement, one.length, one.num_computed)
        return True

    def adopt(self, request_id: str, branch_id: str) -> None:
        one, branch = self._followed[request_id], self._followed.pop(branch_id)
        num_new = one.length - branch.length
        one.num_computed = max(one.num_computed, branch.length + min(num_new, max(0, branch.ahead - 1)))
        one.ahead, one.num_right = max(0, branch.ahead - num_new), max(0, branch.num_right - num_new)

    def release(self, request_id: str) -> None:
        self._followed.pop(request_id, None)
        self._stops.forget(request_id)

    def check_integrity(self) -> None: ...

    def set_proposers(self, request_id: str, proposers: Sequence[str]) -> bool:
        self._followed[request_id].proposers = tuple(proposers)
        return True

    def take_levels(self, name: str) -> list[LevelReport]:
        return list(self._timer.take_levels())


class TimedDrafter(Drafter, Protocol):
    """``seconds``: what its last batch of drafts would have taken. ``num_extended``: committed tokens, so far."""

    name: str
    seconds: float
    num_extended: int


class TimedLoop:
    """The live loop of a simulated drafter, and what its work would take.

    Args:
        on_mail: called when mail comes.
        spare_share: as in the configuration of drafters.
    """

    def __init__(
        self,
        drafter: TimedDrafter,
        timer: DraftTimer,
        limits: SessionLimits,
        ahead_len: int,
        spare_share: float,
        jitter: Jitter,
        on_mail: Callable[[], None],
    ) -> None:
        self.busy_s = 0.0
        self.mailbox = VirtualMailbox(on_mail)
        self.loop = DrafterLoop(drafter.name, drafter, self.mailbox, limits, ahead_len=ahead_len, spare_share=spare_share)
        self._drafter = drafter
        self._timer = timer
        self._jitter = jitter

    def begin(self, now_s: float) -> tuple[StepWork, float]:
        """The next work of the loop, and its seconds. What takes no time is done."""
        drafter = self._drafter
        while True:
            num_extended = drafter.num_extended
            work = self.loop.begin(now_s)
            if work == "nothing":
                return work, 0.0
            if work != "answered":
                seconds = drafter.seconds
                if work == "scored":
                    seconds = self._timer.scoring_s(drafter.name, drafter.num_extended - num_extended)
                seconds = self._jitter(seconds)
                self.busy_s += seconds
                return work, seconds


class SimulatedDrafter:
    """Drives a `DrafterLoop` on virtual time: while it drafts or scores, mail waits.

    Args:
        make_timed: of what to call when mail comes.
    """

    def __init__(self, events: Events, make_timed: Callable[[Callable[[], None]], TimedLoop]) -> None:
        self.timed = make_timed(self._wake)
        self._events = events
        self._is_busy = self._is_woken = False
        self._alarm_s: float | None = None

    def _wake(self) -> None:
        if not self._is_busy and not self._is_woken:
            self._is_woken = True
            self._events.at(self._events.now_s, STEP, self._step)

    def _step(self, now_s: float) -> None:
        self._is_woken = False
        if self._is_busy:
            return
        work, seconds = self.timed.begin(now_s)
        if work == "nothing":
            self._sleep()
            return

        def end(end_s: float) -> None:
            self._is_busy = False
            self.timed.loop.finish(work, now_s, end_s)
            self._step(end_s)

        self._is_busy = True
        self._events.at(now_s + seconds, STEP, end)

    def _sleep(self) -> None:
        due_s = self.timed.loop.next_due_s()
        if due_s is not None and (self._alarm_s is None or due_s < self._alarm_s):
            self._alarm_s = due_s
            self._events.at(due_s, STEP, self._ring)

    def _ring(self, now_s: float) -> None:
        self._alarm_s = None
        self._wake()
