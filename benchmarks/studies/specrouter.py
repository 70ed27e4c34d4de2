"""SpecRouter's table 2: chains selected by the live chain policy, against every static chain that the pool allows.

All arms draft as far as each drafter can, await every draft and verify it whole; one more, ``default``, has selected chains
with the default rules of lengths, verification and overlap. Each model has its own device. Sets of requests follow each
other to the end of the run. Cases beside the paper's are pools in which three levels win, and in which they lose.

- ``chosen_over_best_static``: over the fastest static chain, the target alone included; the least.
- ``prediction_error``: the most that a predicted time per token of any candidate chain is off that of decoding with it
  alone. The policy predicts in each slot from what it has learned; the slot half-way counts, since contexts grow. It has
  served few of these chains.
- ``prediction_error.equation_7``: the same by the paper's formula, from agreement that is known.
- ``CASE.gain``: three levels over the fastest chain of fewer, the least over batches.

Beside these, a map of costs and agreements where three levels win, with the paper's points (`chain_map.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.studies import chain_map
from cluster.config import DraftLengthConfig
from router.assignment import AssignmentPolicy, Chain, PoolMember, RequestView
from router.cost_model import TableCost, monotone
from router.drafter.chains import MAX_WINDOW, PROPOSAL_LEN, Level
from router.drafter.policies import build_policy, scored_by
from router.drafter.seats import Fixed
from router.papers.specrouter import ModelChains
from router.planning.planner import PlannerSettings, StepPlanner
from simulator.agreement import SimulatedRequest
from simulator.chain_timing import ChainTimer
from simulator.scenario import SpecRouterScenario
from simulator.simulation import ClusterSpec, DrafterSpec, SimulationResult, in_turn, simulate
from simulator.study import Cell, Panel, Said, Study, Table
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
MAX_HOLD_S, MAX_CHUNK_LEN = 10.0, 4096
_PAPER = ""  # the case of the scenario itself
_MAPPED_BATCHES = (1, 16)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A chain that everybody has. Seconds per token of a request."""

    goodput: float  # tokens per second
    per_token_s: float
    predicted_s: float
    simplified_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.per_token_s - 1.0)

    @property
    def simplified_error(self) -> float:
        return abs(self.simplified_s / self.per_token_s - 1.0)


@dataclass(frozen=True, slots=True)
class _Found:
    """For one batch size: tokens per second."""

    plain: float
    two_level: float
    three_level: float
    chosen: float
    default: float
    chains: Mapping[Chain, float]  # share of requests at the end
    candidates: Mapping[Chain, _Candidate]

    @property
    def best_static(self) -> float:
        return max(self.plain, *(one.goodput for one in self.candidates.values()))

    @property
    def three_level_gain(self) -> float:
        """Of the best chain of three levels, the target included, over the best of fewer."""
        three = max(one.goodput for chain, one in self.candidates.items() if len(chain) == 2)
        return three / max(self.plain, *(one.goodput for chain, one in self.candidates.items() if len(chain) < 2))


class _Watched(ModelChains):
    """Keeps the predictions of each slot."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.predicted: list[dict[Chain, float]] = []

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        chains = super().assign(requests, pool)
        self.predicted.append(dict(self.per_token_s))
        return chains


def run(scenario: SpecRouterScenario, said: Said = lambda what: None) -> Study:
    found = {}
    for case, one in {_PAPER: scenario, **{name: scenario.of_case(name) for name in scenario.cases}}.items():
        for batch in one.batches:
            said(f"{case or 'table 2'}, batch {batch}")
            found[case, batch] = _at(one, batch)
    return _study(found)


def _at(scenario: SpecRouterScenario, batch: int) -> _Found:
    num_sets = -(-scenario.least_requests // batch)
    sets = [_requests(scenario, batch, number) for number in range(num_sets)]
    selecting, predicted = _Watched(**scenario.chain.parameters), list[dict[Chain, float]]()
    whole = max(drafter.max_draft_len for drafter in scenario.drafters.values())

    def serve(policy: AssignmentPolicy, spec: ClusterSpec) -> list[SimulationResult]:
        """Serves set after set; a policy keeps what it learned."""
        outcomes = []
        for requests in sets:
            outcomes.append(simulate(spec, policy, in_turn(requests, batch), scenario.seed, scenario.horizon_s))
            if policy is selecting:
                predicted.append(selecting.predicted[len(selecting.predicted) // 2])
                selecting.predicted.clear()
        return outcomes

    barrier = PlannerSettings("all", MAX_HOLD_S, MAX_CHUNK_LEN, "barrier")
    spec = replace(_cluster(scenario, batch, barrier), draft_length=DraftLengthConfig(kind="fixed", num_tokens=whole))
    informed = scored_by(scenario.chain)
    chosen = serve(selecting, replace(spec, scored=informed))
    counts = Counter(chain for outcome in chosen for chain in outcome.open_chains)
    settings = PlannerSettings(max_hold_s=MAX_HOLD_S, max_chunk_len=MAX_CHUNK_LEN)
    default = replace(_cluster(scenario, batch, settings), scored=informed)
    everything = [request for requests in sets for request in requests]

    def candidate(chain: Chain, predicted_s: float) -> _Candidate:
        alone = serve(Fixed(chain), spec)
        levels = _levels(scenario, chain, everything)
        simplified_s = simplified_per_token_s(levels, _target_passes(scenario, batch, alone))
        return _Candidate(_goodput(alone), batch / fmean(map(_decoding_rate, alone)), predicted_s, simplified_s)

    # Of sets that each have their requests: as goodput, the mean over the sets.
    found = {
        chain: candidate(chain, 1.0 / fmean(1.0 / of_set[chain] for of_set in predicted)) for chain in sorted(predicted[-1])
    }
    return _Found(
        _goodput(serve(Fixed(()), spec)),
        found[(scenario.two_level,)].goodput,
        found[scenario.three_level].goodput,
        _goodput(chosen),
        _goodput(serve(build_policy(scenario.chain), default)),
        {one: count / counts.total() for one, count in counts.items()},
        found,
    )


def _goodput(outcomes: Sequence[SimulationResult]) -> float:
    return fmean(outcome.goodput for outcome in outcomes)


def _decoding_rate(outcome: SimulationResult) -> float:
    """Tokens per second from the first slot with tokens on: without the prompts, which come first."""
    began_s, num_before = next(slot for slot in outcome.slots if slot[1])
    return (outcome.num_tokens - num_before) / (outcome.end_s - began_s)


def _requests(scenario: SpecRouterScenario, batch: int, number: int) -> list[SimulatedRequest]:
    """A set that lasts beyond the horizon."""
    random = np.random.default_rng((scenario.seed, batch, number))
    text = scenario.text
    longest = max(MAX_WINDOW, *(drafter.max_draft_len for drafter in scenario.drafters.values()))
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


def _cluster(scenario: SpecRouterScenario, batch: int, settings: PlannerSettings) -> ClusterSpec:
    cost = scenario.cost(scenario.target)
    context_len = int(scenario.text.prompt_len.median + scenario.text.output_len.median / 2)

    def pass_s(drafter: str, num_rows: int) -> float:
        return cost.drafters[drafter].seconds(num_rows, min(num_rows, batch) * context_len, num_rows)

    def catch_up_s(drafter: str, num_tokens: int) -> float:
        return cost.catch_up_s(drafter, num_tokens) or 0.0

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
        spare_share=1.0,  # of a device of its own
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


def _study(found: Mapping[tuple[str, int], _Found]) -> Study:
    """``found``: by case and batch."""
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    errors: list[tuple[Cell, ...]] = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for (case, batch), one in found.items():
        ours = (one.two_level / one.plain, one.three_level / one.plain, one.chosen / one.plain)
        paper = PAPER.get(batch) if case == _PAPER else None
        at = f"{case}.batch_{batch}" if case else f"batch_{batch}"
        for name, value in zip(("two_level", "three_level", "chosen"), ours, strict=True):
            figures[f"speedup.{name}.{at}"] = value
            if case == _PAPER:
                series.setdefault(name, ([], []))[0].append(float(batch))
                series[name][1].append(value)
        figures[f"chosen_over_best_static.{at}"] = one.chosen / one.best_static
        figures[f"prediction_error.{at}"] = max(candidate.error for candidate in one.candidates.values())
        chain, share = max(one.chains.items(), key=lambda item: item[1])
        cells: list[Cell] = [case or "table 2", batch]
        for i, value in enumerate(ours):
            cells += ["-" if paper is None else paper[i], value]
        how = "simulated: its costs and agreements are not published" if paper else "simulated, no figure of the paper"
        rows.append((*cells, one.default / one.plain, one.best_static / one.plain, _name(chain), share, how))
        for of, each in one.candidates.items():
            times_ms = (1e3 * each.per_token_s, 1e3 * each.predicted_s, each.error, 1e3 * each.simplified_s)
            errors.append((case or "table 2", batch, _name(of), *times_ms, each.simplified_error))
    candidates = [candidate for one in found.values() for candidate in one.candidates.values()]
    figures["prediction_error"] = max(candidate.error for candidate in candidates)
    figures["prediction_error.mean"] = fmean(candidate.error for candidate in candidates)
    figures["prediction_error.equation_7"] = max(candidate.simplified_error for candidate in candidates)
    figures["chosen_over_best_static"] = min(one.chosen / one.best_static for one in found.values())
    for case in {case: None for case, _ in found if case}:
        figures[f"{case}.gain"] = min(one.three_level_gain for (name, _), one in found.items() if name == case)
    for i, name in enumerate(("two_level", "three_level", "chosen")):
        batches = [batch for case, batch in found if case == _PAPER and batch in PAPER]
        series[f"{name}, paper"] = ([float(batch) for batch in batches], [PAPER[batch][i] for batch in batches])
    dashed = frozenset(name for name in series if name.endswith("paper"))
    return Study(
        "specrouter",
        figures,
        (
            Table(
                "speed-up over the target alone, the paper's beside the simulated",
                (
                    *("case", "batch", "two, paper", "two", "three, paper", "three", "chosen, paper", "chosen"),
                    *("by default rules", "best static", "mostly", "share", "how"),
                ),
                tuple(rows),
            ),
            Table(
                "time per token of every candidate chain, ms",
                ("case", "batch", "chain", "simulated", "predicted", "error", "by equation 7", "its error"),
                tuple(errors),
            ),
        ),
        (
            Panel("table 2", series, x="batch", y="speed-up", log_x=True, dashed=dashed),
            *(chain_map.panel(batch, *PAPER[batch][:2]) for batch in _MAPPED_BATCHES),
        ),
        (
            "simulated: costs by a roofline, acceptance by a family; those of the paper are not published.",
            "share: of the requests that in the end were with the chain that most were with.",
            "predicted: by the policy, from what it learned in its run; equation 7: from agreement that is known.",
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
