"""A whole cluster in virtual time: targets, drafters, links and a router, requests in and figures out."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from cluster.config import DraftLengthConfig
from cluster.counts import Attainment, SloCounts
from cluster.messages import Hello, OutcomeReport, Role
from cluster.transport.base import Mailbox
from cluster.types import FinishReason, ModelInfo
from drafters.sessions import SessionLimits
from engine.admission import AdmissionRules
from engine.round import DrafterPool, Policies, TargetLoop
from router.assignment import AssignmentPolicy, Chain, MemberCosts, PoolMember, Scored, member_name, nobody
from router.cost_model import CostModel, relative_draft_cost
from router.drafter.chains import pass_times
from router.drafter.router import Router, SlotReport
from router.drafting.policies import build_draft_lengths
from router.estimates.drift import DriftDetector
from router.planning.planner import Planner
from simulator.agreement import SimulatedRequest
from simulator.cascade import MemberSpec, SimulatedCascade
from simulator.drafter import AgreementDrafter, SimulatedDrafter, TimedDrafter, TimedLoop
from simulator.gateway import Served, SimulatedGateway
from simulator.links import MAIL, STEP, Events, link
from simulator.target import SimulatedEngine, SimulatedTarget, TargetLimits
from simulator.text import EOS, VOCAB_SIZE
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
    companion: bool = False  # each target has its own, in its process, which is stepped between passes
    verifies: bool = False
    max_outcomes: int = 0
    members: tuple[MemberSpec, ...] = ()  # it is a cascade of these; without any its own agreement and times count

    def limits(self, spare_share: float = 0.0) -> SessionLimits:
        num_shadows = (4 if spare_share else 1) * self.capacity
        return SessionLimits(self.capacity, self.max_draft_len, num_shadows, max_outcomes=self.max_outcomes)


@dataclass(frozen=True)
class ClusterSpec:
    """What there is, what it takes, and what is believed of that.

    Args:
        cost: what planners and policies believe; timers tell what it takes.
        link_s: of a message, one way.
        scored: one member of each of these follows the requests that others draft for, and tells what it would have
            drafted. It takes ``spare_share`` of its time at the most; companions have none.
        jitter: spread of durations, as the standard deviation of their logarithm.
        watches_drift: whether drafters whose acceptance collapses are quarantined.
        sheds: targets refuse requests whose first token would come later than their objective.
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
    scored: Scored = nobody
    spare_share: float = 0.1
    jitter: float = 0.0
    watches_drift: bool = False
    draft_length: DraftLengthConfig = field(default_factory=DraftLengthConfig)
    sheds: bool = True

    def pool(self) -> list[PoolMember]:
        """As policies see it, with what a profile would say."""
        members = []
        for spec in self.drafters:
            relative = relative_draft_cost(self.cost, spec.name, spec.max_draft_len)
            draft_s = [(batch, self.cost.draft_s(spec.name, batch, spec.max_draft_len)) for batch in _BATCHES]
            catch_up_s = self.cost.catch_up_s(spec.name, 256)
            costs = MemberCosts(
                tuple((batch, seconds) for batch, seconds in draft_s if seconds is not None),
                catch_up_s=0.0 if catch_up_s is None else catch_up_s / 256,
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
class SimulationResult:
    """What came of a run. ``slots``: when each slot of the router was, and the tokens committed by then."""

    finished: list[Served] = field(default_factory=list)
    slots: list[tuple[float, int]] = field(default_factory=list)
    end_s: float = 0.0
    num_tokens: int = 0
    num_submitted: int = 0
    num_passes: int = 0
    num_rows: int = 0
    num_verified: int = 0  # draft tokens
    num_accepted: int = 0  # of these
    num_preempted: int = 0
    num_unfinished: int = 0
    target_busy: float = 0.0  # share of the time, mean over targets
    drafter_busy: dict[str, float] = field(default_factory=dict)  # by member; of companions the mean over targets
    open_chains: list[Chain] = field(default_factory=list)  # of requests that were cut off

    @property
    def goodput(self) -> float:
        """Committed tokens per second, of the whole cluster; the bonus token counts (SPIN's definition)."""
        return self.num_tokens / self.end_s if self.end_s else 0.0

    @property
    def served(self) -> list[Served]:
        return [one for one in self.finished if one.finish in (FinishReason.LENGTH, FinishReason.STOP)]

    @property
    def accepted_len(self) -> float:
        """Tokens of a round, the bonus token included; of the requests that ended, their first tokens left out."""
        rounds = sum(one.num_rounds - 1 for one in self.served)
        return sum(one.num_tokens - 1 for one in self.served) / rounds if rounds else 1.0

    def attainment(self) -> dict[str, SloCounts]:
        """Of requests of a class, by its name: complete answers as the gateway saw them, and refusals."""
        attainment = Attainment()
        for one in self.finished:
            slo = one.request.slo
            if slo.name is None:
                continue
            if one.finish is FinishReason.OVERLOADED:
                attainment.note(SloCounts(slo.name, num_refused=1))
            elif one.finish in (FinishReason.LENGTH, FinishReason.STOP):
                num_later = one.num_tokens - 1
                tpot_s = (one.end_s - one.first_token_s) / num_later if num_later else None
                attainment.note(SloCounts.of_answer(slo, one.first_token_s - one.request.arrival_s, tpot_s))
        return {counts.name: counts for counts in attainment.counts()}

    def ttft_s(self) -> Floats:
        return np.array([one.first_token_s - one.request.arrival_s for one in self.served])

    def tpot_s(self) -> Floats:
        """Per token after the first, by request."""
        return np.array(
            [(one.end_s - one.first_token_s) / (one.num_tokens - 1) for one in self.served if one.num_tokens > 1]
        )


class Simulation:
    """The live loops of a cluster on virtual time. Made for one run.

    Args:
        until_s: virtual time at which it is cut off; None: when all requests have ended.
    """

    def __init__(
        self, spec: ClusterSpec, policy: AssignmentPolicy, load: Load, seed: int = 0, until_s: float | None = None
    ) -> None:
        self._events = events = Events()
        self._spec = spec
        self._load = load
        self._until_s = until_s
        self.outcome = SimulationResult()
        self._jitter = Jitter(spec.jitter, np.random.default_rng(seed))
        self._gateway = SimulatedGateway(events, self._ended)
        pool = spec.pool()
        watch = DriftDetector(spec.slot_s) if spec.watches_drift else None
        self._router = Router(policy, pool, watch, spec.scored)
        self._first_table = self._router.first_table()
        self._names = tuple(member.name for member in pool)
        self._drafters = {
            name: self._drafter(drafter, name)
            for drafter in spec.drafters
            if not drafter.companion
            for name in (member_name(drafter.name, replica) for replica in range(drafter.replicas))
        }
        self._companions: list[TimedLoop] = []
        self._targets = [self._target(f"target-{number}") for number in range(spec.num_targets)]
        self._exhausted = self._done = False

    def run(self) -> SimulationResult:
        """Raises AssertionError when a request was lost or a token counted twice."""
        events, load = self._events, self._load
        if load.concurrency is None:
            self._next_arrival()
        else:
            for request in islice(load.requests, load.concurrency):
                self._submit(request)
        events.at(self._spec.slot_s, STEP, self._slot)
        with _uncollected():
            events.run(self._until_s if self._until_s is not None else float("inf"))
        return self._summary()

    def outcome_counts(self, member: str) -> OutcomeReport | None:
        """Of a drafter outside the targets' processes; None: it prepares no outcomes."""
        outcomes = self._drafters[member].timed.loop.sessions.outcomes
        return None if outcomes is None else outcomes.counts

    # ---- the parts

    def _drafter(self, one: DrafterSpec, name: str) -> SimulatedDrafter:
        spare_share = self._spec.spare_share
        return SimulatedDrafter(self._events, lambda on_mail: self._timed(one, name, spare_share, on_mail))

    def _companion(self, one: DrafterSpec) -> TimedLoop:
        """Its mail waits until it is stepped, between passes."""
        return self._timed(one, one.name, 0.0, lambda: None)

    def _timed(self, one: DrafterSpec, name: str, spare_share: float, on_mail: Callable[[], None]) -> TimedLoop:
        timer, scripts, events = self._spec.draft_timer, self._gateway.scripts, self._events
        model: TimedDrafter
        if one.members:
            model = SimulatedCascade(name, one.members, timer, scripts, lambda: events.now_s, one.companion)
        else:
            model = AgreementDrafter(name, timer, scripts)
        return TimedLoop(model, timer, one.limits(spare_share), one.ahead_len, spare_share, self._jitter, on_mail)

    def _target(self, name: str) -> SimulatedTarget:
        spec, events = self._spec, self._events
        engine = SimulatedEngine(spec.limits, spec.pass_timer, self._gateway.scripts)
        companions = {one.name: self._companion(one) for one in spec.drafters if one.companion}
        self._companions += companions.values()
        draft_lens = {one.name: one.max_draft_len for one in spec.drafters}

        def make_loop(mailbox: Mailbox) -> TargetLoop:
            return TargetLoop(
                engine,
                ModelInfo("simulated", VOCAB_SIZE, spec.limits.max_model_len, (EOS,), "simulated"),
                mailbox,
                spec.cost,
                lambda: events.now_s,
                Policies(spec.planner(), build_draft_lengths(spec.draft_length, draft_lens)),
                DrafterPool(self._first_table, companions, dict.fromkeys(draft_lens, frozenset(draft_lens))),
                AdmissionRules(spec.limits.max_waiting, sheds=spec.sheds),
            )

        target = SimulatedTarget(events, engine, make_loop, self._jitter, list(companions.values()))
        own = _hello(Role.TARGET, name)
        for drafter_name, drafter in self._drafters.items():
            link(events, target.mailbox, own, drafter.timed.mailbox, _hello(Role.DRAFTER, drafter_name), spec.link_s)
        for drafter_name, companion in companions.items():
            link(events, target.mailbox, own, companion.mailbox, _hello(Role.DRAFTER, drafter_name), None)
        self._gateway.link(target, _hello(Role.GATEWAY, "gateway"), own)
        return target

    # ---- what happens

    def _slot(self, now_s: float) -> None:
        if not self._done:
            self.outcome.slots.append((now_s, self._gateway.num_tokens))
            self._decide()
            self._events.at(now_s + self._spec.slot_s, STEP, self._slot)

    def _decide(self) -> None:
        """The router's slot, which takes no time. Of the times of passes the first target speaks for all."""
        table = self._router.slot([self._report(target, target is self._targets[0]) for target in self._targets])
        if table is not None:
            for target in self._targets:
                target.loop.publish_table(table)

    def _report(self, target: SimulatedTarget, with_passes: bool) -> SlotReport:
        loop = target.loop
        requests = loop.requests()
        num_context = sum(request.committed_len for request in requests)
        return SlotReport(
            requests,
            loop.telemetry.take_observations(),
            loop.status().table_version,
            self._names,  # of all drafters, which are always linked
            scores=loop.telemetry.take_scores(),
            levels=loop.telemetry.take_levels(),
            target_passes=pass_times(self._spec.cost, num_context) if with_passes else (),
        )

    def _next_arrival(self) -> None:
        request = next(self._load.requests, None)
        if request is None:
            self._exhausted = True
            self._done = not self._gateway.open
        else:
            self._events.at(request.arrival_s, MAIL, lambda now_s: self._arrive(request))

    def _arrive(self, request: SimulatedRequest) -> None:
        self._submit(request)
        self._next_arrival()

    def _submit(self, request: SimulatedRequest) -> None:
        self.outcome.num_submitted += 1
        self._gateway.submit(request)

    def _ended(self, finished: Served) -> None:
        self.outcome.finished.append(finished)
        self.outcome.end_s = finished.end_s
        if self._load.concurrency is not None:
            request = next(self._load.requests, None)
            if request is not None:
                self._submit(request)
            self._done = not self._gateway.open
        else:
            self._done = self._exhausted and not self._gateway.open

    def _summary(self) -> SimulationResult:
        outcome = self.outcome
        if self._until_s is not None and not self._done:
            outcome.end_s = self._until_s
        telemetry = [target.loop.telemetry for target in self._targets]
        outcome.num_tokens = sum(one.num_committed for one in telemetry)
        outcome.num_passes = sum(one.num_passes for one in telemetry)
        outcome.num_rows = sum(one.num_rows for one in telemetry)
        stats = [drafter for one in telemetry for drafter in one.drafters.values()]
        outcome.num_verified = sum(drafter.num_proposed for drafter in stats)
        outcome.num_accepted = sum(drafter.num_accepted for drafter in stats)
        outcome.num_preempted = sum(one.num_preempted for one in telemetry)
        outcome.num_unfinished = len(self._gateway.open)
        chains = {view.request_id: view.chain for target in self._targets for view in target.loop.requests()}
        outcome.open_chains = [
            one.request.chain or chains.get(request_id, ()) for request_id, one in self._gateway.open.items()
        ]
        if outcome.end_s:
            outcome.target_busy = float(np.mean([target.busy_s / outcome.end_s for target in self._targets]))
            busy_s = {name: drafter.timed.busy_s for name, drafter in self._drafters.items()}
            for drafter in self._companions:
                name = drafter.loop.name
                busy_s[name] = busy_s.get(name, 0.0) + drafter.busy_s / len(self._targets)
            outcome.drafter_busy = {name: seconds / outcome.end_s for name, seconds in busy_s.items()}
        self._check(outcome)
        return outcome

    def _check(self, outcome: SimulationResult) -> None:
        assert len(outcome.finished) + outcome.num_unfinished == outcome.num_submitted, "a request was lost"
        assert outcome.num_unfinished == 0 or self._until_s is not None, "a request never ended"
        open_tokens = sum(one.num_tokens for one in self._gateway.open.values())
        ended_tokens = sum(one.num_tokens for one in outcome.finished)
        assert ended_tokens + open_tokens == outcome.num_tokens, "a token was counted twice, or not at all"


def _hello(role: Role, name: str) -> Hello:
    return Hello(role, name, VOCAB_SIZE, "simulated")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: what a run makes and drops on the way has no reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(
    spec: ClusterSpec, policy: AssignmentPolicy, load: Load, seed: int = 0, until_s: float | None = None
) -> SimulationResult:
    return Simulation(spec, policy, load, seed, until_s).run()


def in_turn(requests: Sequence[SimulatedRequest], concurrency: int) -> Load:
    """All of them, so many at a time."""
    return Load(iter(requests), concurrency)
