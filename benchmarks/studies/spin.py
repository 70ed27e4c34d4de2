"""SPIN's evaluation (section VI, figures 10, 11 and 13) rebuilt: its parts switched on in turn, its policies against each
other, and numbers of micro-batches.

    vanilla                 one drafter for all; sequences padded to the longest; draft, then verify
    spin w/o bat. & pipe.   LBSS chooses the drafter of each request
    spin w/o pipe.          and sequences are packed: what fast batch verification is for
    spin                    and the batch is verified in micro-batches, in turn, while others are drafted
    outrider                the default instead of LBSS, lengths by goodput, passes when it pays to leave

All but the last verify every draft whole, and in all but vanilla drafters keep in step (fast switching). Figure 11 compares
LBSS with SPIN's two baselines, without packing and pipeline. Figure 13 compares fixed numbers of micro-batches with those
that our rules choose: `micro-batch` at least two, `gain` (the default) as many as pay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from cluster.config import DraftLengthConfig, PolicyConfig
from cluster.types import MAX_DRAFT_LEN
from router.assignment import Scored, everybody, nobody
from router.drafter.policies import build_policy
from router.drafting.verification import PassContext
from router.plan import SequenceView, StepPlan
from router.planning.planner import Planner, PlannerSettings, StepPlanner
from simulator.agreement import SimulatedRequest
from simulator.scenario import SpinScenario, TextWorkload
from simulator.simulation import ClusterSpec, DrafterSpec, in_turn, simulate
from simulator.study import Cell, Panel, Said, Study, Table
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass, PaddedPass

MIX = "mix"
PARTS = ("spin w/o bat. & pipe.", "spin w/o pipe.", "spin")
SELECTION = ("greedy", "epsilon-greedy", "lbss")
_LONGEST_S = 60.0  # wait for a proposal
_MOST_TOKENS_PER_S = 200  # per request: bounds the length of an endless answer

# What the paper's text says (figures 10 and 11 are pictures): text, target, of what, over what, ratio.
PAPER = (
    ("alpaca", "llama-7b", "spin w/o bat. & pipe.", "vanilla llama-68m", 62.33 / 32.21),
    ("alpaca", "llama-7b", "spin", "mean vanilla", 2.34),
    ("cp", "llama-7b", "spin w/o bat. & pipe.", "mean vanilla", 1.45),
    ("cp", "llama-7b", "spin w/o pipe.", "mean vanilla", 1.81),
    ("cp", "llama-7b", "spin", "mean vanilla", 1.99),
    ("alpaca", "llama-7b", "lbss", "greedy", 65.31 / 32.21),
    ("alpaca", "llama-7b", "lbss", "epsilon-greedy", 65.31 / 43.78),
    ("cp", "llama-7b", "lbss", "epsilon-greedy", 1.45),
    ("cp", "llama-30b", "lbss", "epsilon-greedy", 1.79),
)
PAPER_13 = {"alpaca": 1.29}  # with four micro-batches
SIMULATED = "simulated: its texts' acceptance is not published"


class LockStep(Planner):
    """Speculation in lock-step, draft, then verify, then draft: another planner's plans, of those micro-batches all of whose
    proposals have come.

    Requests are dealt to ``num_micro_batches`` in the order of their coming. With one, the target idles while drafters draft
    (SPIN, figure 6a); with several, it verifies the one while others are drafted, and each is still verified once a round
    (figure 6b).
    """

    def __init__(self, planner: Planner, num_micro_batches: int = 1) -> None:
        self._planner = planner
        self._num = num_micro_batches

    def plan(self, sequences: Sequence[SequenceView], context: PassContext) -> StepPlan:
        until_s: dict[int, float] = {}  # of micro-batches that wait
        for number, sequence in enumerate(sequences):
            if sequence.running and sequence.awaiting_since_s is not None and not sequence.num_drafted:
                until_s[number % self._num] = max(
                    until_s.get(number % self._num, 0.0), sequence.awaiting_since_s + _LONGEST_S
                )
        waiting = {group: until for group, until in until_s.items() if until > context.now_s}
        ready = [sequence for number, sequence in enumerate(sequences) if number % self._num not in waiting]
        if ready:
            return self._planner.plan(ready, context)
        held = {sequence.request_id: waiting[number % self._num] for number, sequence in enumerate(sequences)}
        return StepPlan(spans=(), held=held, wake_s=min(waiting.values()))


@dataclass(frozen=True, slots=True)
class _Variant:
    policy: PolicyConfig
    packed: bool = False
    num_micro_batches: int | None = 1  # None: the live rule
    verification: str = "all"
    scored: Scored = everybody
    overlap: str = "gain"  # of the live rule


PADDED_S, PACKED_S = 0.52921, 0.33546  # figure 12: a pass over 16 requests of Alpaca by llama-7b
_NUM_BATCHES = 200
NUMBERS = range(1, 10)  # of micro-batches, figure 13
RULES = ("micro-batch", "gain")
_PIPELINED = 2  # times the requests of the other figures: enough for nine micro-batches

Goodputs = Mapping[tuple[str, str], Mapping[str, float]]  # by text and target, by variant


def run(scenario: SpinScenario, said: Said = lambda what: None) -> Study:
    texts = [*scenario.texts, *([MIX] if scenario.mix and len(scenario.texts) > 1 else [])]
    goodputs: dict[tuple[str, str], dict[str, float]] = {}
    for target in scenario.targets:
        for text in texts:
            said(f"{target}, {text}")
            goodputs[text, target] = goodputs_of(scenario, target, text)
    target = next(iter(scenario.targets))
    numbers = {text: micro_batches_of(scenario, target, text) for text in list(scenario.texts)[:2]}
    study = _study(scenario, goodputs, _verification_s(scenario))
    return _with_micro_batches(study, target, numbers)


def goodputs_of(scenario: SpinScenario, target: str, text: str) -> dict[str, float]:
    """Tokens per second of all variants, means over the scenario's sets of requests."""
    sets = [_requests(scenario, text, repeat) for repeat in range(scenario.repeats)]
    found = {
        name: fmean(_goodput(scenario, target, variant, requests) for requests in sets)
        for name, variant in _variants(scenario).items()
    }
    return {**found, SELECTION[2]: found[PARTS[0]]}  # which is the same


def micro_batches_of(scenario: SpinScenario, target: str, text: str) -> dict[str, float]:
    """Tokens per second by number of micro-batches and by rule (figure 13), of one set of requests."""
    batch = _PIPELINED * scenario.batch
    roomy = {name: one.model_copy(update={"capacity": max(batch, one.capacity)}) for name, one in scenario.drafters.items()}
    scenario = scenario.model_copy(update={"batch": batch, "drafters": roomy})
    requests = _requests(scenario, text, 0)
    lbss = _Variant(scenario.lbss, packed=True)
    variants = {str(number): replace(lbss, num_micro_batches=number) for number in NUMBERS}
    variants |= {rule: replace(lbss, num_micro_batches=None, overlap=rule) for rule in RULES}
    return {name: _goodput(scenario, target, variant, requests) for name, variant in variants.items()}


def best_vanilla(found: Mapping[str, float]) -> float:
    return max(goodput for name, goodput in found.items() if name.startswith("vanilla"))


def parts_in_order(found: Mapping[str, float]) -> bool:
    """Figure 10: each part above the one before it, the first above every vanilla."""
    return _ascends([best_vanilla(found), *(found[part] for part in PARTS)])


def selection_in_order(found: Mapping[str, float]) -> bool:
    """Figure 11."""
    return _ascends([found[name] for name in SELECTION])


def _variants(scenario: SpinScenario) -> dict[str, _Variant]:
    vanilla = {
        f"vanilla {name}": _Variant(PolicyConfig(kind="fixed", chain=(name,)), scored=nobody) for name in scenario.drafters
    }
    lbss = scenario.lbss
    return {
        **vanilla,
        PARTS[0]: _Variant(lbss),
        PARTS[1]: _Variant(lbss, packed=True),
        PARTS[2]: _Variant(lbss, packed=True, num_micro_batches=scenario.micro_batches),
        "outrider": _Variant(PolicyConfig(), True, None, "outrider"),
        "greedy": _Variant(PolicyConfig(kind="greedy-length")),
        "epsilon-greedy": _Variant(scenario.epsilon_greedy),
    }


def _requests(scenario: SpinScenario, text: str, repeat: int) -> list[SimulatedRequest]:
    """A set that lasts beyond the horizon; equal for every variant and target."""
    random = np.random.default_rng((scenario.seed, repeat, *text.encode()))
    kinds: list[TextWorkload] = [scenario.texts[text]] if text != MIX else list(scenario.texts.values())
    longest = max(drafter.max_draft_len for drafter in scenario.drafters.values())
    num_tokens = int(scenario.horizon_s * _MOST_TOKENS_PER_S)
    requests = []
    for i in range(scenario.batch):
        kind = kinds[i % len(kinds)]
        # Of different ages, as in a running batch.
        age = int(random.integers(kind.output_len.draw(random)))
        answer = kind.family.answer(random, num_tokens, longest)
        requests.append(SimulatedRequest(f"r{i}", 0.0, kind.prompt_len.draw(random) + age, num_tokens, answer))
    return requests


def _goodput(scenario: SpinScenario, target: str, variant: _Variant, requests: list[SimulatedRequest]) -> float:
    cost = scenario.cost(scenario.targets[target])
    settings = PlannerSettings(variant.verification, scenario.max_hold_s, 4096, variant.overlap)

    def planner() -> Planner:
        planner = StepPlanner(settings)
        return planner if variant.num_micro_batches is None else LockStep(planner, variant.num_micro_batches)

    spec = ClusterSpec(
        cost,
        PackedPass(cost) if variant.packed else PaddedPass(cost),
        DraftByCost(cost),
        TargetLimits(16, 2**24, scenario.batch, 2**16, 2**24),
        tuple(DrafterSpec(name, one.capacity, one.max_draft_len) for name, one in scenario.drafters.items()),
        planner,
        link_s=scenario.link_us * 1e-6,
        slot_s=scenario.slot_s,
        scored=variant.scored,
        jitter=scenario.jitter,
        draft_length=DraftLengthConfig(kind="fixed", num_tokens=MAX_DRAFT_LEN),  # what the drafter can, as SPIN has it
    )
    load = in_turn(requests, scenario.batch)
    return simulate(spec, build_policy(variant.policy), load, scenario.seed, scenario.horizon_s).goodput


def _verification_s(scenario: SpinScenario) -> tuple[float, float] | None:
    """For sixteen requests of Alpaca by llama-7b, padded and packed (figure 12)."""
    text, target = scenario.texts.get("alpaca"), scenario.targets.get("llama-7b")
    if text is None or target is None:
        return None
    cost = scenario.cost(target)
    random = np.random.default_rng(scenario.seed)
    num_rows = 1 + max(drafter.max_draft_len for drafter in scenario.drafters.values())
    batches = [
        [(num_rows, text.prompt_len.draw(random) + int(random.integers(text.output_len.draw(random)))) for _ in range(16)]
        for _ in range(_NUM_BATCHES)
    ]
    return (
        fmean(PaddedPass(cost).seconds(batch, ()) for batch in batches),
        fmean(PackedPass(cost).seconds(batch, ()) for batch in batches),
    )


def _study(scenario: SpinScenario, goodputs: Goodputs, verification_s: tuple[float, float] | None) -> Study:
    vanilla = [f"vanilla {name}" for name in scenario.drafters]
    figures: dict[str, float] = {}
    num_held = {"parts": 0, "selection": 0}
    parts_rows: list[tuple[Cell, ...]] = []
    selection_rows: list[tuple[Cell, ...]] = []
    for (text, target), found in goodputs.items():
        best = best_vanilla(found)
        num_held["parts"] += parts_in_order(found)
        num_held["selection"] += selection_in_order(found)
        key = f"{text}.{target}"
        figures[f"spin_over_best_vanilla.{key}"] = found["spin"] / best
        figures[f"outrider_over_spin.{key}"] = found["outrider"] / found["spin"]
        figures[f"lbss_over_epsilon_greedy.{key}"] = found["lbss"] / found["epsilon-greedy"]
        goodput = [found[name] for name in (*vanilla, *PARTS, "outrider")]
        parts_rows.append((text, target, *goodput, "yes" if parts_in_order(found) else "no"))
        selection = [found[name] for name in SELECTION]
        selection_rows.append((text, target, *selection, "yes" if selection_in_order(found) else "no"))
    figures["order_holds.figure_10"] = num_held["parts"] / len(goodputs)
    figures["order_holds.figure_11"] = num_held["selection"] / len(goodputs)
    short = tuple(name.removeprefix("vanilla llama-") for name in vanilla)
    tables: tuple[Table, ...] = (
        Table(
            "figure 10: goodput, tokens/s, simulated",
            ("text", "target", *short, "w/o bat. & pipe.", "w/o pipe.", "spin", "outrider", "in order"),
            tuple(parts_rows),
        ),
        Table("figure 11: goodput, tokens/s, simulated", ("text", "target", *SELECTION, "in order"), tuple(selection_rows)),
        _paper_table(goodputs, vanilla),
    )
    if verification_s is not None:
        padded_s, packed_s = verification_s
        figures["packed_over_padded.figure_12"] = packed_s / padded_s
        rows: tuple[tuple[Cell, ...], ...] = (
            ("padded, ms", 1e3 * PADDED_S, 1e3 * padded_s, SIMULATED),
            ("packed, ms", 1e3 * PACKED_S, 1e3 * packed_s, SIMULATED),
            ("packed over padded", PACKED_S / PADDED_S, packed_s / padded_s, SIMULATED),
        )
        title = "figure 12: a pass over 16 requests, alpaca, llama-7b"
        tables = (*tables, Table(title, ("what", "paper", "ours", "how"), rows))
    return Study(
        "spin",
        figures,
        tables,
        _panels(goodputs, vanilla),
        (
            "simulated: costs by a roofline, acceptance by families that were chosen by hand; ratios are what came of it.",
            "in order: each part above the one before it, the first above every vanilla; then greedy, epsilon-greedy, lbss.",
        ),
    )


def _with_micro_batches(study: Study, target: str, found: Mapping[str, Mapping[str, float]]) -> Study:
    figures = dict(study.figures)
    rows: list[tuple[Cell, ...]] = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    numbers = [float(number) for number in NUMBERS]
    for text, goodputs in found.items():
        fixed = [goodputs[str(number)] for number in NUMBERS]
        figures[f"micro_batches_over_best.{text}"] = goodputs[RULES[1]] / max(fixed)
        over_one = [goodput / fixed[0] for goodput in (*fixed, *(goodputs[rule] for rule in RULES))]
        rows.append((text, *over_one, PAPER_13.get(text, "-"), SIMULATED))
        series[text] = (numbers, [goodput / fixed[0] for goodput in fixed])
        series[f"{text}, gain"] = (numbers, [goodputs[RULES[1]] / fixed[0]] * len(fixed))
    title = f"figure 13: goodput by micro-batches over one, {target}, simulated"
    table = Table(title, ("text", *map(str, NUMBERS), *RULES, "4, paper", "how"), tuple(rows))
    dashed = frozenset(name for name in series if name.endswith("gain"))
    panel = Panel(f"figure 13, {target}: over one micro-batch", series, "micro-batches", dashed=dashed)
    return replace(study, figures=figures, tables=(*study.tables, table), panels=(*study.panels, panel))


def _paper_table(goodputs: Goodputs, vanilla: list[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for text, target, what, over, ratio in PAPER:
        found = goodputs.get((text, target))
        if found is None or (over != "mean vanilla" and over not in found):
            rows.append((text, target, what, over, ratio, "-", "not in this run"))
            continue
        base = fmean(found[name] for name in vanilla) if over == "mean vanilla" else found[over]
        rows.append((text, target, what, over, ratio, found[what] / base, SIMULATED))
    return Table("the paper's ratios beside ours", ("text", "target", "of", "over", "paper", "ours", "how"), tuple(rows))


def _panels(goodputs: Goodputs, vanilla: list[str]) -> tuple[Panel, ...]:
    panels: list[Panel] = []
    texts = tuple(dict.fromkeys(text for text, _ in goodputs))
    for target in dict.fromkeys(target for _, target in goodputs):
        for title, names in (("figure 10", [*vanilla, *PARTS, "outrider"]), ("figure 11", list(SELECTION))):
            series = {name: (list[float](), [goodputs[text, target][name] for text in texts]) for name in names}
            panels.append(Panel(f"{title}, {target}", series, y="tokens/s", labels=texts))
    return tuple(panels)


def _ascends(values: list[float]) -> bool:
    return all(a < b for a, b in pairwise(values))
