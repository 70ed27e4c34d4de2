"""``outrider bench figures``: figures and bounds of papers, rebuilt with the live loops in virtual time. All simulated.

- DSpark, figure 5: accepted length and acceptance by the confidence below which a draft ends.
- DSpark, figure 8: tokens per second, and draft tokens verified, by concurrency. ``budget_rise.ARM``: the most by which the
  tokens verified of a request rise from one concurrency to the next, as a ratio; at most 1 where they fall throughout.
  Drafts are awaited, as in the paper.
- DSpark, figure 7: throughput against the speed of a user, where a whole draft takes as long as one of its tokens, as of a
  block drafter. ``same_speed.ARM``: throughput over the one with one draft token, as of MTP-1, at the speed that this one
  gives in the middle of CONCURRENCY.
- Drafting beside verification, over a barrier, by r = K t_d / t_v, the time of a draft over that of a pass:
  ``two batches``: as many requests again, verified in turn (MineDraft): at most (1 + r) / max(1, r), 1.75 at r = 0.75.
  ``outcomes``: a drafter that prepares several outcomes (Saguaro): at most (1 + r) / (1 + (1 - h) r) at the hit rate h.
  A drafter that is never awaited: 1 + r.

SPIN's figures are `outrider simulate spin`; AdaSpec's table 2 and FASER's figure 15 are tables of `outrider bench policies`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.overlap_simulated import DRAFT_LEN, DRAFTER, MAX_OUTCOMES, SCENARIO, play, with_runners_up
from benchmarks.policy_scenarios import DEFAULT, FIXED, PAPERS, Machine, Workload, gpu_machine
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from cluster.config import DraftLengthConfig
from router.cost_model import CostModel, TableCost
from router.drafting.overlap_gains import remote_bound
from simulator.scenario import Lens
from simulator.speculation import Arm, ArmResult, run_arm
from simulator.study import Panel, plot

AUTHORS, SIMULATED = "measured by the authors", "simulated: the paper's pairs of models do not run here"
PAPER_5 = {"chat": "0.457 to 0.957", "math": "0.769 to 0.925", "code": "0.676 to 0.920"}  # acceptance
PAPER_7 = "1.57 to 1.85", "1.51, 1.52"
PLOT = Path("outrider-figures.png")
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
CONCURRENCY = (1, 8, 32, 64, 128, 256)
LOAD_ARMS = (FIXED[0], FIXED[2], *(arm for arm in PAPERS if arm.name == "dspark"), DEFAULT)  # one token: MTP-1
RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)  # r
MINEDRAFT = 1.75  # reported
BATCH = 16  # of each of two batches
TOKENS = {True: 100, False: 300}  # of plain decoding, of each request; quick or not
LEAST_TOKENS = 2000  # of all requests
PROMPT, OUTPUT = Lens(median=64, spread=0.0), Lens(median=150, spread=0.3, least=64, most=256)  # decoding takes the time


@dataclass(frozen=True, slots=True)
class ScaledDrafts:
    """A cost model with drafts that take ``factor`` times as long."""

    cost: CostModel
    factor: float

    def step_s(self, num_rows: int, num_context: int) -> float:
        return self.cost.step_s(num_rows, num_context)

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return self.cost.prefill_s(num_rows, num_context)

    def table(self, num_context: int) -> TableCost:
        return self.cost.table(num_context)

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        seconds = self.cost.draft_s(drafter, batch, draft_len)
        return None if seconds is None else self.factor * seconds

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        seconds = self.cost.catch_up_s(drafter, num_tokens)
        return None if seconds is None else self.factor * seconds


class BlockDrafts(ScaledDrafts):
    """Drafts of any length take as long as those of one token, as of a block drafter."""

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return self.cost.draft_s(drafter, batch, 1)


def run(options: BenchOptions) -> BenchResult:
    machine = gpu_machine(SCENARIO, DRAFTER)
    texts = tuple(replace(text, prompt_len=PROMPT, output_len=OUTPUT) for text in machine.texts)
    machine = replace(machine, texts=texts)
    num_tokens = TOKENS[options.quick]
    parts = tuple(part(machine, num_tokens) for part in (_thresholds, _loads, _frontier, _bounds))
    plot([panel for _, _, panels in parts for panel in panels], f"simulated: {SCENARIO} with {DRAFTER}", PLOT)
    figures = {name: value for found, _, _ in parts for name, value in found.items()}
    notes = ("simulated: all figures; costs of a roofline, agreement of synthetic families.", f"drawn in {PLOT}.")
    return BenchResult("figures", figures, tables=tuple(table for _, table, _ in parts), notes=notes)


Part = tuple[dict[str, float], Table, Sequence[Panel]]


def _played(machine: Machine, arm: Arm, batch: int, num_tokens: int) -> ArmResult:
    load = _closed(batch, num_tokens)
    spec = machine.spec()
    limits = replace(spec.limits, max_num_sequences=max(CONCURRENCY))
    drafters = tuple(replace(drafter, capacity=max(CONCURRENCY)) for drafter in spec.drafters)
    spec = replace(spec, limits=limits, drafters=drafters)
    return run_arm(spec, machine.settings(), arm, load.load(machine), load.until_s(machine))


def _closed(batch: int, num_tokens: int) -> Workload:
    return Workload(f"batch {batch}", batch, max(LEAST_TOKENS, num_tokens * batch))


def _thresholds(machine: Machine, num_tokens: int) -> Part:
    rows: list[tuple[Cell, ...]] = [(f"paper: {text}", "-", "-", share, "-", AUTHORS) for text, share in PAPER_5.items()]
    tokens: dict[str, tuple[list[float], list[float]]] = {}
    acceptance: dict[str, tuple[list[float], list[float]]] = {}
    for text in machine.texts:
        assert text.family is not None
        name = f"median acceptance {text.family.drafters[DRAFTER].acceptance:g}"
        for threshold in THRESHOLDS:
            arm = Arm(name, DraftLengthConfig(kind="threshold", min_confidence=threshold), "all")
            result = _played(replace(machine, texts=(text,)), arm, BATCH, 2 * num_tokens)
            rows.append((name, threshold, result.accepted_len, 1.0 - result.rejected_share, result.verified_len, SIMULATED))
            for series, value in ((tokens, result.accepted_len), (acceptance, 1.0 - result.rejected_share)):
                xs, ys = series.setdefault(name, ([], []))
                xs.append(threshold)
                ys.append(value)
    columns = ("text", "least confidence", "tokens a round", "acceptance", "draft tokens verified", "how")
    panels = [
        Panel("DSpark, figure 5: tokens a round", tokens, "least confidence"),
        Panel("DSpark, figure 5: acceptance", acceptance, "least confidence"),
    ]
    figures = {"threshold_acceptance_rises": min(float(b >= a) for _, ys in acceptance.values() for a, b in pairwise(ys))}
    return figures, Table("DSpark, figure 5: a threshold of confidence", columns, tuple(rows)), panels


def _loads(machine: Machine, num_tokens: int) -> Part:
    rows: list[tuple[Cell, ...]] = [("paper: dspark", "to 150 or 200", "-", "3 to 5", "-", AUTHORS)]
    at = [float(batch) for batch in CONCURRENCY]
    goodput: dict[str, tuple[list[float], list[float]]] = {}
    verified: dict[str, tuple[list[float], list[float]]] = {}
    figures = {}
    for arm in LOAD_ARMS:
        awaited = replace(arm, overlap="barrier")  # so lengths and budgets alone tell how much is verified
        results = [_played(machine, awaited, batch, num_tokens) for batch in CONCURRENCY]
        lens = [result.verified_len for result in results]
        served = [_played(machine, arm, batch, num_tokens).goodput for batch in CONCURRENCY]
        found = zip(CONCURRENCY, results, served, strict=True)
        rows += [(arm.name, batch, one.goodput, one.verified_len, by_gain, SIMULATED) for batch, one, by_gain in found]
        goodput[arm.name], verified[arm.name] = (at, [result.goodput for result in results]), (at, lens)
        figures[f"budget_rise.{arm.name}"] = max(b / a if a else 1.0 for a, b in pairwise(lens))
    columns = ("arm", "requests", "tokens/s", "draft tokens verified of a request", "tokens/s, overlap: gain", "how")
    panels = [
        Panel("DSpark, figure 8: tokens/s", goodput, "requests at once", log_x=True),
        Panel("DSpark, figure 8: draft tokens verified", verified, "requests at once", log_x=True),
    ]
    return figures, Table("DSpark, figure 8: concurrency", columns, tuple(rows)), panels


def _frontier(machine: Machine, num_tokens: int) -> Part:
    machine = replace(machine, cost=BlockDrafts(machine.cost, 1.0))
    users, middle = np.array(CONCURRENCY, float), len(CONCURRENCY) // 2
    rows: list[tuple[Cell, ...]] = [("paper: dspark", *PAPER_7, AUTHORS)]
    figures, series = {}, {}
    arms = [replace(arm, overlap="barrier") for arm in (LOAD_ARMS[0], *LOAD_ARMS[2:])]
    totals = [np.array([_played(machine, arm, batch, num_tokens).goodput for batch in CONCURRENCY]) for arm in arms]
    one_token, *_ = totals = [np.maximum.accumulate(total) for total in totals]
    for arm, total in zip(arms, totals, strict=True):
        matched = np.linspace(max(total[0], one_token[0]), min(total[-1], one_token[middle]), 32)
        more, fewer = [np.exp(np.interp(matched, at, np.log(users))) for at in (one_token, total)]
        gains = more / fewer  # users who share the same throughput
        speeds = total / users
        over = float(np.interp(one_token[middle] / users[middle], speeds[::-1], total[::-1]) / one_token[middle])
        rows.append((arm.name, f"{gains.min():.2f} to {gains.max():.2f}", f"{over:.2f}", SIMULATED))
        figures[f"same_speed.{arm.name}"] = over
        series[arm.name] = speeds.tolist(), total.tolist()
    columns = ("arm", f"speed at its throughput, up to {users[middle]:g} users", "throughput at its speed", "how")
    panel = Panel("DSpark, figure 7: tokens/s by tokens/s of a user", series, "tokens/s of a user")
    return figures, Table("DSpark, figure 7: over one draft token", columns, tuple(rows)), [panel]


def _bounds(machine: Machine, num_tokens: int) -> Part:
    machine = replace(machine, texts=tuple(with_runners_up(text) for text in machine.texts))
    rows: list[tuple[Cell, ...]] = []
    for ratio in RATIOS:
        one, two = _scaled(machine, 1, ratio), _scaled(machine, BATCH, ratio)
        single, awaited, double = (_closed(batch, num_tokens) for batch in (1, BATCH, 2 * BATCH))
        outcomes, hit_rate = play(one, single, "barrier", MAX_OUTCOMES)
        over = outcomes.goodput / play(one, single, "barrier", 0)[0].goodput
        in_turn = play(two, double, "micro-batch", 0)[0].goodput / play(two, awaited, "barrier", 0)[0].goodput
        bounds = (1.0 + ratio) / max(1.0, ratio), (1.0 + ratio) / (1.0 + (1.0 - hit_rate) * ratio)
        rows.append((ratio, remote_bound(1, ratio, 1.0), in_turn, bounds[0], over, bounds[1], hit_rate, SIMULATED))
    columns = ("r", "never awaited", "two batches", "their bound", "outcomes", "their bound at these hits", "hits", "how")
    paper: tuple[Cell, ...] = ("MineDraft", "-", MINEDRAFT, *["-"] * 4, AUTHORS)
    title = f"over a barrier, drafts of {DRAFT_LEN}; two batches of {BATCH}, outcomes of 1"
    table = Table(title, columns, (paper, *rows))
    named = ("bound 1 + K t_d / t_v", "two batches", "bound of two batches", "outcomes", "bound of outcomes at these hits")
    xs = list(RATIOS)
    series = {name: (xs, [float(row[i]) for row in rows]) for i, name in enumerate(named, start=1)}
    series["MineDraft reports"] = (xs, [MINEDRAFT] * len(xs))
    dashed = frozenset({named[0], named[2], named[4], "MineDraft reports"})
    figures = {
        "two_batches_over_barrier": max(float(row[2]) for row in rows),
        "outcomes_over_barrier": max(float(row[4]) for row in rows),
    }
    return figures, table, [Panel("drafting beside verification, over a barrier", series, "K t_d / t_v", dashed=dashed)]


def _scaled(machine: Machine, batch: int, ratio: float) -> Machine:
    """With drafts of DRAFT_LEN tokens for so many requests that take ``ratio`` of a pass."""
    draft_s = machine.cost.draft_s(DRAFTER, batch, DRAFT_LEN)
    assert draft_s is not None
    pass_s = machine.cost.step_s(batch * (1 + DRAFT_LEN), batch * 512)
    return replace(machine, cost=ScaledDrafts(machine.cost, ratio * pass_s / draft_s))
