"""A whole cluster in virtual time: targets, drafters, links and a router, requests in and figures out."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from cluster.config import CollapseConfig
from cluster.types import FinishReason
from router.assignment import AssignmentPolicy, Chain, MemberCosts, PoolMember, member_name
from router.chains import pass_times
from router.cost_model import CostModel, relative_draft_cost
from router.estimates.drift import DriftDetector
from router.plan import StepPlan
from router.planner import Planner
from router.slot import Router
from simulator.agreement import SimulatedRequest
from simulator.drafter import SimulatedDrafter
from simulator.events import MAIL, STEP, Events
from simulator.router import SimulatedRouter
from simulator.sequence import Finished
from simulator.target import SimulatedTarget, TargetLimits
from simulator.timing import DraftTimer, Jitter, PassTimer

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)  # of drafts that policies are told the time of


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter of the pool. Others can ride ahead of one that verifies."""

    name: str
    capacity: int = 64
    max_draft_len: int = 8
    ahead_len: int = 0
    replicas: int = 1
    companion: bool = False  # each target has its own, in its own thread
    verifies: bool = False


@dataclass(frozen=True)
class ClusterSpec:
    """What there is, what it takes, and what is believed of that.

    Args:
        cost: what planners and policies believe; timers tell what it takes.
        link_s: of a message, one way.
        scores: every drafter tells what it would have drafted: learning from full information; but companions, which have
            no time to spare.
        in_step: every drafter keeps in step with every request in its spare time: switches cost nothing.
        jitter: spread of durations, as the standard deviation of their logarithm.
        collapse: when a drafter is quarantined; None: never.
    """

    cost: CostModel
    pass_timer: PassTimer
    draft_timer: DraftTimer
    limits: TargetLimits
    drafters: tuple[DrafterSpec, ...]
    planner: Callable[[], Planner]
    num_targets: int = 1
    link_s: float = 1e-4
    slot_s: float = 0.25
    scores: bool = False
    in_step: bool = False
    jitter: float = 0.0
    collapse: CollapseConfig | None = None

    def pool(self) -> list[PoolMember]:
        """As policies see it, with what a profile would say."""
        members = []
        for spec in self.drafters:
            relative = relative_draft_cost(self.cost, spec.name, spec.max_draft_len)
            draft_s = [(batch, self.cost.draft_s(spec.name, batch, spec.max_draft_len)) for batch in _BATCHES]
            catch_up_s = self.cost.catch_up_s(spec.name, 256)
            costs = MemberCosts(
                tuple((batch, seconds) for batch, seconds in draft_s if seconds is not None),
                catch_up_s=0.0 if self.in_step or catch_up_s is None else catch_up_s / 256,
            )
            members += [
                PoolMember(
                    member_name(spec.name, replica),
                    spec.capacity,
                    relative if relative is not None else 0.0,
                    max_draft_len=spec.max_draft_len,
                    costs=costs if relative is not None else None,
                    verifies=spec.verifies,
                    leads=not spec.companion,
                )
                for replica in range(spec.replicas)
            ]
        return members


@dataclass(frozen=True, slots=True)
class Load:
    """Requests by arrival. ``concurrency``: so many are under way at any time, and each that ends lets the next in, whenever
    it would have come; None: they come when they come."""

    requests: Iterator[SimulatedRequest]
    concurrency: int | None = None


@dataclass(slots=True)
class Outcome:
    """What came of a run. ``slots``: when each slot of the router was, and the tokens committed by then."""

    finished: list[Finished] = field(default_factory=list)
    slots: list[tuple[float, int]] = field(default_factory=list)
    end_s: float = 0.0
    num_tokens: int = 0
    num_submitted: int = 0
    num_events: int = 0
    num_passes: int = 0
    num_rows: int = 0
    num_preempted: int = 0
    num_unfinished: int = 0
    target_busy: float = 0.0  # share of the time, mean over targets
    drafter_busy: dict[str, float] = field(default_factory=dict)  # by member
    open_chains: list[Chain] = field(default_factory=list)  # of requests that were cut off
    open_tokens_per_s: dict[str, float] = field(default_factory=dict)  # of requests that were cut off, after the first token

    @property
    def goodput(self) -> float:
        """Committed tokens per second, of the whole cluster; the bonus token counts (SPIN's definition)."""
        return self.num_tokens / self.end_s if self.end_s else 0.0

    @property
    def served(self) -> list[Finished]:
        return [one for one in self.finished if one.finish is FinishReason.LENGTH]

    @property
    def accepted_len(self) -> float:
        """Tokens of a round, the bonus token included; of the requests that ended, their first tokens left out."""
        rounds = sum(one.num_rounds - 1 for one in self.served)
        return sum(one.num_tokens - 1 for one in self.served) / rounds if rounds else 1.0

    def ttft_s(self) -> Floats:
        return np.array([one.first_token_s - one.request.arrival_s for one in self.served])

    def tpot_s(self) -> Floats:
        """Per token after the first, by request."""
        return np.array(
            [(one.end_s - one.first_token_s) / (one.num_tokens - 1) for one in self.served if one.num_tokens > 1]
        )


class Simulation:
    """Made for one run.

    Args:
        until_s: virtual time at which it is cut off; None: when all requests have ended.
        planned: is told of every plan: the target's number, when, and what.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        policy: AssignmentPolicy,
        load: Load,
        seed: int = 0,
        until_s: float | None = None,
        planned: Callable[[int, float, StepPlan], None] | None = None,
    ) -> None:
        self._events = events = Events()
        self._load = load
        self._until_s = until_s
        self.outcome = Outcome()
        jitter = Jitter(spec.jitter, np.random.default_rng(seed))

        def drafter(drafter: DrafterSpec, replica: int) -> SimulatedDrafter:
            return SimulatedDrafter(
                events,
                member_name(drafter.name, replica),
                spec.draft_timer,
                jitter,
                capacity=drafter.capacity,
                max_draft_len=drafter.max_draft_len,
                ahead_len=drafter.ahead_len,
                latency_s=spec.link_s,
                in_step=spec.in_step,
                companion=drafter.companion,
            )

        shared = [drafter(d, replica) for d in spec.drafters if not d.companion for replica in range(d.replicas)]
        pool = spec.pool()
        watch = None if spec.collapse is None else DriftDetector(spec.collapse, spec.slot_s)
        self._router = SimulatedRouter(
            Router(policy, pool, watch, spec.scores),
            {member.name: member.max_draft_len for member in pool},
            spec.draft_timer.take_levels,
            lambda num_context: pass_times(spec.cost, num_context),
            self._note_slot,
        )
        table = self._router.table
        self._drafters = list(shared)
        self._targets: list[SimulatedTarget] = []
        for number in range(spec.num_targets):
            companions = [drafter(d, 0) for d in spec.drafters if d.companion]
            self._drafters += companions
            self._targets.append(
                SimulatedTarget(
                    events,
                    f"target-{number}",
                    spec.planner(),
                    spec.cost,
                    spec.pass_timer,
                    jitter,
                    spec.limits,
                    {d.name: d for d in (*shared, *companions)},
                    table,
                    self._ended,
                    None if planned is None else _planned_by(planned, number),
                )
            )
        self._router.serve(self._targets)
        self._slot_s = spec.slot_s
        self._num_open = 0
        self._exhausted = False
        self._done = False

    def run(self) -> Outcome:
        """Raises AssertionError when a request was lost or a token counted twice."""
        events, load = self._events, self._load
        if load.concurrency is None:
            self._next_arrival()
        else:
            for request in islice(load.requests, load.concurrency):
                self._submit(request)
        events.at(self._slot_s, STEP, self._slot)
        with _uncollected():
            events.run(self._until_s if self._until_s is not None else float("inf"))
        return self._summary()

    def _slot(self, now_s: float) -> None:
        if not self._done:
            self._router.slot(now_s)
            self._events.at(now_s + self._slot_s, STEP, self._slot)

    def _next_arrival(self) -> None:
        request = next(self._load.requests, None)
        if request is None:
            self._exhausted = True
            self._done = not self._num_open
        else:
            self._events.at(request.arrival_s, MAIL, lambda now_s: self._arrive(request))

    def _arrive(self, request: SimulatedRequest) -> None:
        self._submit(request)
        self._next_arrival()

    def _submit(self, request: SimulatedRequest) -> None:
        """To the target with the fewest requests, as the gateway does."""
        self._num_open += 1
        self.outcome.num_submitted += 1
        min(self._targets, key=len).submit(request)

    def _ended(self, finished: Finished) -> None:
        self._num_open -= 1
        self.outcome.finished.append(finished)
        self.outcome.end_s = finished.end_s
        if self._load.concurrency is not None:
            request = next(self._load.requests, None)
            if request is not None:
                self._submit(request)
        elif self._exhausted and not self._num_open:
            self._done = True
        if self._load.concurrency is not None and not self._num_open:
            self._done = True

    def _note_slot(self, now_s: float, num_tokens: int) -> None:
        self.outcome.slots.append((now_s, num_tokens))

    def _summary(self) -> Outcome:
        outcome = self.outcome
        if self._until_s is not None and not self._done:
            outcome.end_s = self._until_s
        outcome.num_tokens = sum(target.num_committed for target in self._targets)
        outcome.num_events = self._events.num
        outcome.num_passes = sum(target.num_passes for target in self._targets)
        outcome.num_rows = sum(target.num_rows for target in self._targets)
        outcome.num_preempted = sum(target.num_preempted for target in self._targets)
        outcome.num_unfinished = sum(map(len, self._targets))
        for target in self._targets:
            outcome.open_chains += target.open_chains
            outcome.open_tokens_per_s |= target.open_tokens_per_s(outcome.end_s)
        if outcome.end_s:
            busy = [target.busy_s / outcome.end_s for target in self._targets]
            outcome.target_busy = float(np.mean(busy))
            for drafter in self._drafters:
                outcome.drafter_busy[drafter.name] = drafter.busy_s / outcome.end_s
        self._check(outcome)
        return outcome

    def _check(self, outcome: Outcome) -> None:
        assert len(outcome.finished) + outcome.num_unfinished == outcome.num_submitted, "a request was lost"
        assert outcome.num_unfinished == 0 or self._until_s is not None, "a request never ended"
        open_tokens = sum(target.num_open_tokens for target in self._targets)
        ended_tokens = sum(one.num_tokens for one in outcome.finished)
        assert ended_tokens + open_tokens == outcome.num_tokens, "a token was counted twice, or not at all"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing that a run makes refers back to itself, so that looking for such things, again and again, finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _planned_by(planned: Callable[[int, float, StepPlan], None], number: int) -> Callable[[float, StepPlan], None]:
    return lambda now_s, plan: planned(number, now_s, plan)


def simulate(
    spec: ClusterSpec, policy: AssignmentPolicy, load: Load, seed: int = 0, until_s: float | None = None
) -> Outcome:
    return Simulation(spec, policy, load, seed, until_s).run()


def in_turn(requests: Sequence[SimulatedRequest], concurrency: int) -> Load:
    """All of them, so many at a time."""
    return Load(iter(requests), concurrency)
