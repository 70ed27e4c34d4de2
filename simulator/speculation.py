"""Speculation policies on the same requests: each arm drafts, verifies and overlaps by other rules, all else equal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.config import DraftLengthConfig
from cluster.types import Slo
from router.cost_model import CostModel, Floats
from router.drafter.seats import Fixed
from router.plan import SequenceView
from router.planning.planner import PlannerSettings, StepPlanner
from router.planning.slo import RoundLimits
from simulator.simulation import ClusterSpec, Load, SimulationResult, simulate


class VerificationAlone(StepPlanner):
    """Objectives are a constraint of verification alone, as in AdaSpec (algorithm 3): prompts are computed as they come."""

    def limits(
        self, decoding: Sequence[SequenceView], prompts: Sequence[SequenceView], cost: CostModel, now_s: float
    ) -> RoundLimits:
        return RoundLimits(tpot_s=super().limits(decoding, prompts, cost, now_s).tpot_s)


@dataclass(frozen=True, slots=True)
class Arm:
    """Rules of speculation. ``draft_length`` None: plain decoding. ``planner``: what reads the objectives."""

    name: str
    draft_length: DraftLengthConfig | None
    verification: str = "outrider"
    overlap: str = "gain"
    planner: type[StepPlanner] = StepPlanner


@dataclass(frozen=True)
class ArmResult:
    """What came of an arm.

    ``num_tokens`` of all requests, ``request_s``: their time from arrival to end; both up to ``end_s``.
    """

    end_s: float
    num_tokens: int
    request_s: float
    tpot_s: Floats  # by request that ended
    ttft_s: Floats
    accepted_len: float
    rejected_share: float  # of verified draft tokens
    verified_len: float  # draft tokens of a request and round

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.end_s

    @property
    def request_speed(self) -> float:
        """Tokens per second of a request, from arrival to end. It tells how long requests took where arrivals are given, and
        with them goodput."""
        return self.num_tokens / self.request_s

    def attainment(self, tpot_s: float) -> float:
        """Share of requests that took no longer per token."""
        return float(np.mean(self.tpot_s <= tpot_s))


def run_arm(
    spec: ClusterSpec,
    settings: PlannerSettings,
    arm: Arm,
    load: Load,
    until_s: float | None = None,
    tpot_slo_s: float | None = None,
) -> ArmResult:
    """``spec`` has one drafter, which all requests use; the arm replaces its planner and draft length.

    Args:
        settings: of the planner, beside the arm's rules.
        tpot_slo_s: objective that every request asks for.
    """
    ruled = replace(settings, verification=arm.verification, overlap=arm.overlap)
    spec = replace(spec, planner=lambda: arm.planner(ruled), sheds=False)
    if arm.draft_length is not None:
        spec = replace(spec, draft_length=arm.draft_length)
    if tpot_slo_s is not None:
        slo = Slo(tpot_s=tpot_slo_s, name="all")
        load = replace(load, requests=(replace(one, slo=slo) for one in load.requests))
    chain = () if arm.draft_length is None else (spec.drafters[0].name,)
    outcome = simulate(spec, Fixed(chain), load, until_s=until_s)
    return _result(outcome, load.concurrency)


def _result(outcome: SimulationResult, concurrency: int | None) -> ArmResult:
    served = outcome.served
    if concurrency is None:
        request_s = sum(one.end_s - one.request.arrival_s for one in served)
    else:
        request_s = concurrency * outcome.end_s
    rounds = sum(one.num_rounds - 1 for one in served)
    return ArmResult(
        outcome.end_s,
        outcome.num_tokens,
        request_s,
        outcome.tpot_s(),
        outcome.ttft_s() if concurrency is None else np.zeros(0),
        outcome.accepted_len,
        1.0 - outcome.num_accepted / outcome.num_verified if outcome.num_verified else 0.0,
        sum(one.num_verified for one in served) / rounds if rounds else 0.0,
    )
