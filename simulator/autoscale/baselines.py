"""What others decide by: Ray Serve's default, and the Kubernetes autoscaler on queue length and on utilisation.

Serve's (2.60, `ray.serve.autoscaling_policy`) looks at requests that run or wait, averaged over the look-back period:

    desired = ceil(requests / target_ongoing_requests)

and follows it once it has been above for 30 s, or below for 600 s. Smoothing factors are 1. Drafters are a deployment of
their own, whose requests are those that decode.

Kubernetes' horizontal pod autoscaler looks every 15 s, may double or add four pods in each, and goes down to the greatest
number that was right within 300 s. On a metric per pod:

    desired = ceil(pods * value / target), unless value / target is within 0.1 of 1
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from router.scaling.report import FleetReport, FleetSize

LOOK_BACK_S = 30.0
UP_S = 30.0
DOWN_S = 600.0
HPA_PERIOD_S = 15.0
HPA_DOWN_S = 300.0
HPA_TOLERANCE = 0.1
HPA_MIN_STEP = 4
_EPS_S = 1e-6  # of times that were added up


@dataclass(slots=True)
class ServeDeployment:
    """The rule for one deployment, of at least ``least`` replicas."""

    target_ongoing: float
    most: int
    least: int = 1
    _seen: deque[tuple[float, float]] = field(default_factory=deque)
    _total: float = 0.0
    _since_s: float | None = None  # since when the same direction is wanted
    _upwards: bool = True

    def decide(self, now_s: float, num_requests: float, num_target: int) -> int:
        """``num_target``: replicas that were wanted so far."""
        seen = self._seen
        seen.append((now_s, num_requests))
        self._total += num_requests
        while seen[0][0] < now_s - LOOK_BACK_S:
            self._total -= seen.popleft()[1]
        desired = min(max(ceil(self._total / len(seen) / self.target_ongoing), self.least), self.most)
        if desired == num_target:
            self._since_s = None
            return num_target
        if self._since_s is None or self._upwards != (desired > num_target):
            self._since_s, self._upwards = now_s, desired > num_target
        if now_s - self._since_s + _EPS_S < (UP_S if self._upwards else DOWN_S):
            return num_target
        self._since_s = None
        return desired


class ServeDefault:
    """Serve's default policy for targets, and for drafters where there are any.

    Args:
        drafters: of each its target of ongoing requests, and the most replicas.
    """

    period_s = 1.0

    def __init__(
        self, target_ongoing: float, max_targets: int, drafters: Mapping[str, tuple[float, int]], min_targets: int = 1
    ) -> None:
        self._targets = ServeDeployment(target_ongoing, max_targets, min_targets)
        self._drafters = {name: ServeDeployment(ongoing, most) for name, (ongoing, most) in drafters.items()}

    def decide(self, report: FleetReport) -> FleetSize:
        num_requests = report.num_running + report.num_waiting
        targets = self._targets.decide(report.now_s, num_requests, report.targets.num_wanted)
        return FleetSize(
            targets,
            {
                name: deployment.decide(report.now_s, report.num_running, report.drafters[name].num_wanted)
                for name, deployment in self._drafters.items()
            },
        )


@dataclass(slots=True)
class HpaRule:
    """Kubernetes' rule on one metric."""

    most: int
    least: int
    _right: deque[tuple[float, int]] = field(default_factory=deque)

    def decide(self, now_s: float, desired: int, num_wanted: int) -> int:
        desired = min(max(desired, self.least), self.most)
        right = self._right
        right.append((now_s, desired))
        while right[0][0] < now_s - HPA_DOWN_S:
            right.popleft()
        if desired > num_wanted:
            return min(desired, max(2 * num_wanted, num_wanted + HPA_MIN_STEP))
        return min(num_wanted, max(number for _, number in right))


class QueueLength:
    """As many targets as the requests that wait are times ``target_waiting`` (KEDA's and vLLM production-stack's scaler)."""

    period_s = HPA_PERIOD_S

    def __init__(self, target_waiting: float, max_targets: int, min_targets: int = 1) -> None:
        self._target_waiting = target_waiting
        self._rule = HpaRule(max_targets, min_targets)

    def decide(self, report: FleetReport) -> FleetSize:
        desired = ceil(report.num_waiting / self._target_waiting)
        return FleetSize(self._rule.decide(report.now_s, desired, report.targets.num_wanted))


class Utilisation:
    """Targets shall be busy for this share: of their time with prompts, or of their places."""

    period_s = HPA_PERIOD_S

    def __init__(self, target_busy: float, max_targets: int, min_targets: int = 1) -> None:
        self._target_busy = target_busy
        self._rule = HpaRule(max_targets, min_targets)

    def decide(self, report: FleetReport) -> FleetSize:
        num_wanted, ratio = report.targets.num_wanted, report.busy / self._target_busy
        desired = num_wanted if abs(ratio - 1.0) <= HPA_TOLERANCE else ceil(report.targets.num_ready * ratio)
        return FleetSize(self._rule.decide(report.now_s, desired, num_wanted))


class Fixed:
    """Always the same."""

    period_s = 60.0

    def __init__(self, size: FleetSize) -> None:
        self._size = size

    def decide(self, report: FleetReport) -> FleetSize:
        return self._size
