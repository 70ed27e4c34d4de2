"""Decides the numbers of targets and of each drafter together, every PLAN_S.

1. The demand says how many targets are needed now (`demand.py`), the forecast how many to have ready (`forecast.py`), both
   for targets without drafts.
2. Drafters that are ready make a target serve more, so fewer targets do. A drafter is wanted where the targets that it saves
   take more GPUs than it does, or while GPUs are paid that nothing else uses.
3. Targets go first: where GPUs are short, drafters give theirs up before requests are refused. Targets that drafters replace
   end only when those drafters are ready, and drafters end only when the targets that they replaced are, and suffice.

Costs are GPUs, so that the plan is the cheapest per million tokens of those that meet the objectives.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from router.estimates.trial import Exploration
from router.scaling.demand import Demand
from router.scaling.forecast import Forecast
from router.scaling.report import FleetReport, FleetSize, Replicas
from router.scaling.service_rates import Objectives, ServiceRates

PERIOD_S = 1.0  # between reports
ATTAINMENT = 0.99  # goal: share of requests that meet their objectives
PLAN_S = 5.0  # between plans; the greatest need within it counts
BUDGET_SHARE = 0.2  # of the requests that may miss their objectives, those that may for want of replicas: bursts are few
HYSTERESIS = 0.05  # of the GPUs of a plan, by which another must be cheaper
HOLD_S = 20.0  # for which a drafter stays once it was wanted: about as long as one takes to start
LASTING_S = 120.0  # what ran for so long counts for drafters, whatever arrives
DRAFTER_HEADROOM = 1.1
RETRIAL_S = 600.0  # after which a drafter that was not worth its GPUs counts as unknown; doubles with each failed trial
LONGEST_RETRIAL_S = 16 * RETRIAL_S
USEFUL_S = 40.0  # in which plans must have a drafter for its trial to count as one that was worth it


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """``num_reserved_gpus``: paid whether they are used or not. ``min_drafters``, ``max_drafters``: replicas, of those that
    have a bound."""

    max_gpus: float
    min_targets: int = 1
    num_reserved_gpus: float = 0.0
    max_targets: int | None = None
    min_drafters: Mapping[str, int] = field(default_factory=dict)
    max_drafters: Mapping[str, int] = field(default_factory=dict)

    def within(self, num_targets: int) -> int:
        return max(0, num_targets if self.max_targets is None else min(num_targets, self.max_targets))


@dataclass(frozen=True, slots=True)
class _Plan:
    num_targets: int
    num_drafters: Mapping[str, int]
    num_gpus: float  # that it uses
    num_reserved_gpus: float
    served: float = 1.0  # share of the demand for which there are GPUs

    @property
    def cost(self) -> float:
        """GPUs, as many as would be paid if there were enough for the whole demand."""
        return max(self.num_gpus, self.num_reserved_gpus) / max(self.served, 1e-9)

    def is_dearer(self, other: "_Plan") -> bool:
        """Than all but HYSTERESIS of ``other``. Among reserved GPUs, whose cost is the same, those that are used count."""
        used = self.num_gpus / max(self.served, 1e-9), other.num_gpus / max(other.served, 1e-9)
        return self.cost > (1.0 - HYSTERESIS) * other.cost and used[0] > (1.0 - HYSTERESIS) * used[1]


class MeasuredAcceptance:
    """Of one drafter. Targets go on to report that of a drafter without replicas, although nothing is measured any more: it
    then counts until RETRIAL_S have passed, and after that the prior, so that the drafter is tried again under load."""

    def __init__(self, prior: float) -> None:
        self._prior, self._value = prior, prior
        self._last: float | None = None  # that was reported
        self._num_useful = 0  # plans with it since the last retrial, because of a measurement
        self._exploration = Exploration(round(RETRIAL_S / PLAN_S), round(LONGEST_RETRIAL_S / PLAN_S))

    def update(self, reported: float | None, replicas: Replicas) -> float | None:
        """Before a plan, every PLAN_S: the estimate if it changes. ``reported``: None if no draft was judged yet."""
        if reported is not None and reported != self._last and (replicas.num_ready or self._last is None):
            self._value = self._last = reported
        elif self._value != self._prior and not replicas.num_wanted and self._exploration.tries():
            self._value, self._num_useful = self._prior, 0
        else:
            return None
        return self._value

    def is_useful(self) -> None:
        """A plan has the drafter. If it does for USEFUL_S because of measurements, the next retrial is not delayed; plans
        before may be of a service that was computed earlier (`demand.SERVICE_S`)."""
        self._num_useful += self._value == self._last
        if self._num_useful > USEFUL_S / PLAN_S:
            self._exploration.reset()


class FleetScaler:
    """Fed with a report every ``period_s``.

    Args:
        start_s: of a target, from the decision to the first request.
    """

    period_s = PERIOD_S

    def __init__(self, rates: ServiceRates, objectives: Objectives, limits: FleetLimits, start_s: float) -> None:
        self.limits = limits  # may be replaced at any time
        self._rates, self._objectives = rates, objectives
        self._demand = Demand(rates, objectives)
        self._forecast = Forecast(start_s, PLAN_S, BUDGET_SHARE * (1.0 - ATTAINMENT), max(1, limits.min_targets))
        self._running: deque[float] = deque(maxlen=round(LASTING_S / PLAN_S))
        self._num_running = 0.0  # requests for which there shall be drafters
        self._wanted: deque[Mapping[str, int]] = deque(maxlen=round(HOLD_S / PLAN_S))
        self._measured = {name: MeasuredAcceptance(size.acceptance) for name, size in rates.drafters.items()}
        self._drafting: tuple[str, ...] = ()
        self._need = self._num_arrived = self._num_missed = self._plan_s = 0.0
        self._size: FleetSize | None = None

    def decide(self, report: FleetReport) -> FleetSize:
        self._need = max(self._need, self._demand.need(report))
        self._num_arrived += report.num_arrived
        self._num_missed += report.num_missed
        if self._size is not None and report.now_s < self._plan_s:
            return self._size
        self._plan_s = report.now_s + PLAN_S
        for name, measured in self._measured.items():
            replicas = report.drafters.get(name, Replicas())
            acceptance = measured.update(report.acceptance.get(name), replicas)
            if acceptance is not None:
                self._rates.set_acceptance(name, acceptance)
        need, self._need = self._need, 0.0
        self._running.append(report.num_running)
        ready = {name: drafters.num_ready for name, drafters in report.drafters.items()}
        num_ready = report.targets.num_ready * self._gain(report.now_s, ready)
        capacity = self._forecast.add(report.now_s, need, num_ready, self._num_arrived, self._num_missed)
        self._num_arrived = self._num_missed = 0.0
        if not self._forecast.is_ready:
            capacity = max(capacity, float(report.targets.num_wanted))
        self._num_running = max(min(self._running), self._demand.num_running(report.now_s, self._forecast.headroom))
        self._size = self._decide(report, need, capacity)
        return self._size

    def _decide(self, report: FleetReport, need: float, capacity: float) -> FleetSize:
        plan = self._stable(report, capacity)
        self._wanted.append(plan.num_drafters)
        ready = {name: drafters.num_ready for name, drafters in report.drafters.items()}
        wanted = {name: max(one.get(name, 0) for one in self._wanted) for name in self._rates.drafters}
        if not self._forecast.is_ready:  # an earlier scaler may have seen more of the load
            running = {name: drafters.num_wanted for name, drafters in report.drafters.items()}
            wanted = {name: max(num, running.get(name, 0)) for name, num in wanted.items()}
        if report.targets.num_ready < self._targets(report, max(need, capacity), wanted):
            wanted = {name: num or ready.get(name, 0) for name, num in wanted.items()}  # they end when targets suffice
        drafting = {name: min(num, ready.get(name, 0)) for name, num in wanted.items()}  # before they are, targets do it
        num_targets = max(self._targets(report, capacity, drafting), self.limits.min_targets)
        num_targets = min(num_targets, self._most_targets(plan))
        if not self._forecast.is_ready:  # the capacity is in targets without drafts, those that run may have drafters
            num_targets = max(num_targets, report.targets.num_wanted)
        return FleetSize(num_targets, self._fitting(wanted, num_targets), self._reason(need, capacity))

    def _cheapest(self, report: FleetReport, capacity: float) -> tuple[tuple[str, ...], _Plan]:
        """Drafters, and the plan with them: added one after the other while that saves GPUs."""
        chosen: tuple[str, ...] = ()
        plans = {chosen: self._plan(report, capacity, chosen)}
        while True:
            more = [(*chosen, name) for name in self._rates.drafters if name not in chosen]
            for one in more:
                plans[one] = self._plan(report, capacity, one)
            cheapest = min(more, key=lambda one: plans[one].cost, default=chosen)
            if plans[cheapest].cost >= plans[chosen].cost:
                return chosen, plans[chosen]
            chosen = cheapest

    def _stable(self, report: FleetReport, capacity: float) -> _Plan:
        """The cheapest plan, or the one with the drafters of the plan before, if it is about as cheap."""
        chosen, plan = self._cheapest(report, capacity)
        for name in chosen:
            self._measured[name].is_useful()
        if set(self._drafting) != set(chosen):
            before = self._plan(report, capacity, self._drafting)
            if plan.is_dearer(before):
                return before
        self._drafting = chosen
        return plan

    def _plan(self, report: FleetReport, capacity: float, drafting: tuple[str, ...]) -> _Plan:
        sizes = self._rates.drafters
        useful = {name: self._bounded(name, max(1, self._useful(name))) for name in drafting}
        drafters = {**self.limits.min_drafters, **useful}
        needed = max(float(self.limits.min_targets), capacity / self._gain(report.now_s, drafters))
        num_targets = ceil(needed - 1e-9)
        num_gpus = num_targets * self._rates.target.num_gpus
        extra = sum(num * sizes[name].num_gpus for name, num in drafters.items())
        served = 1.0
        fits = self.limits.within(int((self.limits.max_gpus - extra) / self._rates.target.num_gpus + 1e-9))
        if num_targets > fits:
            served, num_targets = min(1.0, fits / needed), fits
            num_gpus = num_targets * self._rates.target.num_gpus
        return _Plan(num_targets, drafters, num_gpus + extra, self.limits.num_reserved_gpus, served)

    def _targets(self, report: FleetReport, capacity: float, drafters: Mapping[str, int]) -> int:
        """That suffice beside these drafters for what ``capacity`` targets would serve without any."""
        return ceil(capacity / self._gain(report.now_s, drafters) - 1e-9)

    def _gain(self, now_s: float, drafters: Mapping[str, int]) -> float:
        """Requests per second of a target beside these drafters, over those of one without."""
        shares = self._rates.shares(drafters, self._num_running)
        return self._demand.service(now_s, shares).requests_per_s / self._demand.service(now_s).requests_per_s

    def _most_targets(self, plan: _Plan) -> int:
        """Within the GPUs. Where they are short, drafters of the plan keep theirs: it serves more with them than without."""
        held = sum(num * self._rates.drafters[name].num_gpus for name, num in plan.num_drafters.items())
        return max(1, self.limits.within(int((self.limits.max_gpus - held) / self._rates.target.num_gpus + 1e-9)))

    def _useful(self, name: str) -> int:
        """Replicas. One more than needed stays until half of another is too many: loads are never quite the same."""
        size = self._rates.drafters[name]
        exact = DRAFTER_HEADROOM * self._num_running * size.share / size.capacity
        before = self._wanted[-1].get(name, 0) if self._wanted else 0
        return before if before - 1 - 0.1 * before < exact <= before else ceil(exact)

    def _bounded(self, name: str, num: int) -> int:
        return max(self.limits.min_drafters.get(name, 0), min(num, self.limits.max_drafters.get(name, num)))

    def _fitting(self, drafters: Mapping[str, int], num_targets: int) -> dict[str, int]:
        """As many as GPUs are left for; and on reserved GPUs that are idle, drafters that are not in the plan."""
        sizes, used = self._rates.drafters, num_targets * self._rates.target.num_gpus
        fitting = {name: self.limits.min_drafters.get(name, 0) for name in sizes}  # these never end
        used += sum(num * sizes[name].num_gpus for name, num in fitting.items())
        for name, size in sizes.items():
            left = int((self.limits.max_gpus - used) / size.num_gpus + 1e-9)
            more = max(0, min(drafters.get(name, 0) - fitting[name], left))
            fitting[name] += more
            used += more * size.num_gpus
        num_running = self._num_running
        for name, size in sizes.items():
            idle = int((min(self.limits.num_reserved_gpus, self.limits.max_gpus) - used) / size.num_gpus + 1e-9)
            useful = self._bounded(name, ceil(num_running * size.share / size.capacity)) - fitting[name]
            if min(idle, useful) > 0 and self._speeds_up(name):
                fitting[name] += min(idle, useful)
                used += min(idle, useful) * size.num_gpus
        return fitting

    def _speeds_up(self, name: str) -> bool:
        """Whether tokens come faster with this drafter than without, at the load of a full target."""
        service = self._demand.service(self._plan_s)
        context = service.batch * self._demand.workload.prompt_len
        plain = self._rates.plain_tokens_per_s(service.batch, context)
        return self._rates.drafted_tokens_per_s(name, service.batch, context) > plain

    def _reason(self, need: float, capacity: float) -> str:
        drafting = ", ".join(self._drafting) or "none"
        return f"need {need:.1f}, to have {capacity:.1f}: {self._forecast.expert}; drafting: {drafting}"
