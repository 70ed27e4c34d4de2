"""SpecRouter's table 2: chains selected by the live chain policy, against static drafting with two and three levels.

Static chains verify every draft whole; with selected chains the planner verifies by the default policy. Each model has its
own device. Sets of requests follow each other to the end of the run. ``prediction_error``: the most used final chain is
served alone, with every draft verified, and its time per token compared with the prediction of `router.chains.predict`
from the levels' agreement.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from cluster.config import FixedPolicy, PolicyConfig
from router.assignment import Chain
from router.chains import PROPOSAL_LEN, Level, predict
from router.cost_model import TableCost, monotone
from router.planner import PlannerSettings, StepPlanner
from router.policies import build_policy, keeps_in_step
from simulator.agreement import SimulatedRequest
from simulator.chain_timing import ChainTimer
from simulator.plots import Panel
from simulator.scenario import SpecRouterScenario
from simulator.simulation import ClusterSpec, DrafterSpec, SimulationResult, in_turn, simulate
from simulator.study import Cell, Said, Study, StudyTable
from simulator.target import TargetLimits
from simulator.timing import PackedPass

# Table 2: speed-up over the target alone with two levels, three levels, and selected chains.
PAPER = {
    1: (1.49, 1.11, 1.57),
    4: (1.45, 1.34, 1.69),
    8: (1.38, 1.33, 1.64),
    16: (1.31, 1.20, 1.91),
    32: (1.25, 1.06, 1.52),
    64: (0.99, 1.37, 1.77),
}
_MOST_TOKENS_PER_S = 400  # per request: bounds the length of an endless answer
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class _Found:
    """For one batch size: tokens per second, and the time per token of a request with the most used chain."""

    plain: float
    two_level: float
    three_level: float
    chosen: float
    chains: Mapping[Chain, float]  # share of requests at the end
    chain: Chain
    per_token_s: float
    predicted_s: float
    simplified_s: float


def run(scenario: SpecRouterScenario, said: Said = lambda what: None) -> Study:
    found = {}
    for batch in scenario.batches:
        said(f"batch {batch}")
        found[batch] = _at(scenario, batch)
    return _study(found)


def _at(scenario: SpecRouterScenario, batch: int) -> _Found:
    num_sets = -(-scenario.least_requests // batch)
    sets = [_requests(scenario, batch, number) for number in range(num_sets)]

    def serve(config: PolicyConfig, verification: str = "all") -> list[SimulationResult]:
        """Serves set after set; a policy keeps what it learned."""
        spec = replace(_cluster(scenario, batch, verification), keeps_in_step=keeps_in_step(config))
        policy = build_policy(config)
        return [simulate(spec, policy, in_turn(requests, batch), scenario.seed, scenario.horizon_s) for requests in sets]

    plain = serve(FixedPolicy(chain=()))
    chosen = serve(scenario.chain, "outrider")
    counts = Counter(chain for outcome in chosen for chain in outcome.open_chains)
    chain = counts.most_common(1)[0][0]
    alone = serve(FixedPolicy(chain=chain)) if chain else plain
    levels = _levels(scenario, chain, [request for requests in sets for request in requests])
    target = _target_passes(scenario, batch, alone)
    return _Found(
        _goodput(plain),
        _goodput(serve(FixedPolicy(chain=(scenario.two_level,)))),
        _goodput(serve(FixedPolicy(chain=scenario.three_level))),
        _goodput(chosen),
        {one: count / counts.total() for one, count in counts.items()},
        chain,
        per_token_s=batch / _goodput(alone),
        predicted_s=predict(levels, target, batch).per_token_s,
        simplified_s=simplified_per_token_s(levels, target),
    )


def _goodput(outcomes: Sequence[SimulationResult]) -> float:
    return fmean(outcome.goodput for outcome in outcomes)


def _requests(scenario: SpecRouterScenario, batch: int, number: int) -> list[SimulatedRequest]:
    """A set that lasts beyond the horizon."""
    random = np.random.default_rng((scenario.seed, batch, number))
    text = scenario.text
    longest = max(PROPOSAL_LEN, *(drafter.max_draft_len for drafter in scenario.drafters.values()))
    names = list(scenario.drafters)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    num_tokens = int(scenario.horizon_s * _MOST_TOKENS_PER_S)
    requests = []
    for i in range(batch):
        answer = text.family.answer(random, num_tokens, longest, pairs)
        age = int(random.integers(text.output_len.draw(random)))
        requests.append(SimulatedRequest(f"{number}-{i}", 0.0, text.prompt_len.draw(random) + age, num_tokens, answer))
    return requests


def _target_passes(scenario: SpecRouterScenario, batch: int, outcomes: Sequence[SimulationResult]) -> TableCost:
    """Of the target, in the context that the batch has half-way."""
    cost = scenario.cost(scenario.target)
    text = scenario.text
    num_tokens = fmean(outcome.num_tokens for outcome in outcomes) / batch
    context_len = int(text.prompt_len.median + text.output_len.median / 2 + num_tokens / 2)
    return monotone(tuple((rows, cost.step_s(rows, batch * context_len)) for rows in _ROWS))


def _cluster(scenario: SpecRouterScenario, batch: int, verification: str) -> ClusterSpec:
    cost = scenario.cost(scenario.target)
    context_len = int(scenario.text.prompt_len.median + scenario.text.output_len.median / 2)

    def pass_s(drafter: str, num_rows: int) -> float:
        return cost.drafters[drafter].seconds(num_rows, min(num_rows, batch) * context_len, num_rows)

    def catch_up_s(drafter: str, num_tokens: int) -> float:
        return cost.catch_up_s(drafter, num_tokens) or 0.0

    settings = PlannerSettings(verification, max_hold_s=10.0, max_chunk_len=4096)
    return ClusterSpec(
        cost,
        PackedPass(cost),
        ChainTimer(pass_s, catch_up_s),
        TargetLimits(16, 2**24, batch, 2**16, 2**24),
        tuple(
            DrafterSpec(name, max(batch, one.capacity), one.max_draft_len, verifies=one.verifies)
            for name, one in scenario.drafters.items()
        ),
        lambda: StepPlanner(settings),
        link_s=scenario.link_us * 1e-6,
        slot_s=scenario.slot_s,
        jitter=scenario.jitter,
    )


def _levels(scenario: SpecRouterScenario, chain: Chain, requests: Sequence[SimulatedRequest]) -> list[Level]:
    """Of a chain in the long run: how often each level agrees with the one above."""
    cost = scenario.cost(scenario.target)
    levels = []
    for lower, upper in pairwise([*chain, None]):
        assert lower is not None
        window = scenario.drafters[lower].max_draft_len if upper is None else PROPOSAL_LEN
        runs = [
            request.answer.of(lower).right if upper is None else request.answer.inner[lower, upper].right
            for request in requests
        ]
        placed = cost.drafters[lower]
        context_len = int(scenario.text.prompt_len.median + scenario.text.output_len.median / 2)
        seconds = tuple((rows, placed.seconds(rows, context_len * rows, rows)) for rows in _ROWS)
        levels.append(Level(lower, monotone(seconds), window, _by_position(runs, window)))
    return levels


def _by_position(runs: Sequence[bytes], window: int) -> tuple[float, ...]:
    right = np.frombuffer(b"".join(runs), np.uint8)
    reached = [int(np.count_nonzero(right >= k)) for k in range(window + 1)]
    return tuple(reached[k + 1] / reached[k] if reached[k] else 0.0 for k in range(window))


def _study(found: Mapping[int, _Found]) -> Study:
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    errors: list[tuple[Cell, ...]] = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    error_of: dict[int, float] = {}
    for batch, one in found.items():
        ours = (one.two_level / one.plain, one.three_level / one.plain, one.chosen / one.plain)
        paper = PAPER.get(batch)
        error_of[batch] = abs(one.predicted_s / one.per_token_s - 1.0)
        for name, value in zip(("two_level", "three_level", "chosen"), ours, strict=True):
            figures[f"speedup.{name}.batch_{batch}"] = value
            series.setdefault(name, ([], []))[0].append(float(batch))
            series[name][1].append(value)
        figures[f"chosen_over_best_static.batch_{batch}"] = ours[2] / max(1.0, ours[0], ours[1])
        figures[f"prediction_error.batch_{batch}"] = error_of[batch]
        share = max(one.chains.values())
        cells: list[Cell] = [batch]
        for i, value in enumerate(ours):
            cells += ["-" if paper is None else paper[i], value]
        rows.append((*cells, _name(one.chain), share))
        errors.append(
            (
                batch,
                _name(one.chain),
                1e3 * one.per_token_s,
                1e3 * one.predicted_s,
                error_of[batch],
                1e3 * one.simplified_s,
            )
        )
    figures["prediction_error"] = max(error_of.values())
    figures["chosen_over_best_static"] = min(figures[f"chosen_over_best_static.batch_{batch}"] for batch in found)
    for i, name in enumerate(("two_level", "three_level", "chosen")):
        at = [batch for batch in found if batch in PAPER]
        series[f"{name}, paper"] = ([float(batch) for batch in at], [PAPER[batch][i] for batch in at])
    dashed = frozenset(name for name in series if name.endswith("paper"))
    return Study(
        "specrouter",
        figures,
        (
            StudyTable(
                "table 2: speed-up over the target alone, the paper's beside the simulated",
                ("batch", "two, paper", "two", "three, paper", "three", "chosen, paper", "chosen", "mostly", "share"),
                tuple(rows),
            ),
            StudyTable(
                "time per token of the chosen chain, ms",
                ("batch", "chain", "simulated", "predicted", "error", "by equation 7"),
                tuple(errors),
            ),
        ),
        (Panel("table 2", series, x="batch", y="speed-up", log_x=True, dashed=dashed),),
        (
            "simulated: costs by a roofline, acceptance by a family; those of the paper are not published.",
            "share: of the requests that in the end were with the chain that most were with.",
        ),
    )


def _name(chain: Chain) -> str:
    return " > ".join((*chain, "target"))


def simplified_per_token_s(levels: Sequence[Level], target: TableCost) -> float:
    """SpecRouter's equation 7, for comparison with `predict`.

    Numerator: W T_1, and for every model above W T_j times the probability that verification reaches level j. Denominator:
    what the target accepts of W tokens, and its own. T_1 is a pass of one row; T_j of a verifier is a W-th of a pass over W
    rows. It differs from what a chain does in three ways:

    - Each level passes on what it accepted of one window, and is charged once. Here it asks again until its draft is as long
      as the next level wants it: more passes, and a higher acceptance by the target.
    - The paper does not say when a level is reached: read here as when a token survived each level before. Here each
      level is reached in every round.
    - There is no batch: passes do not grow with it, and nothing waits for its slowest draft.
    """
    if not levels:
        return target.at(1)
    window = levels[-1].window
    reached, cycle_s = 1.0, window * levels[0].passes.at(1)
    for level, verifier in zip(levels, [*(above.passes for above in levels[1:]), target], strict=True):
        cycle_s += verifier.at(window) * reached
        reached *= level.at(0)
    return cycle_s / sum(levels[-1].survival)
