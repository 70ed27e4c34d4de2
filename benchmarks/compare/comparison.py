"""Figures and table of what was measured."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.compare.arms import LLAMA_CPP, LOOKUPS, NGRAM, OUTRIDER, OUTRIDER_VLLM, PLAIN, PLUGIN, POOL, Q4_1, VLLM, Arm
from benchmarks.compare.turns import Turn, spread
from benchmarks.load import percentile
from benchmarks.report import BenchResult, Cell, Table

OWN = (OUTRIDER, OUTRIDER_VLLM)
WORST_PERCENTILE = 0.99


class Comparison:
    """Collects turns."""

    def __init__(self, arms: Sequence[Arm], batches: Sequence[int]) -> None:
        self._arms, self._batches = arms, batches
        self._turns: dict[tuple[Arm, int], list[Turn]] = {}
        self._bursts: dict[Arm, list[Turn]] = {}
        self._overheads: dict[int, list[float]] = {}
        precision = next((arm.precision for arm in arms if arm.family in (OUTRIDER_VLLM, PLUGIN)), "")
        self.overhead_arms = Arm(OUTRIDER_VLLM, precision, PLAIN), Arm(VLLM, precision, PLAIN)

    def add(self, arm: Arm, batch: int, turn: Turn) -> None:
        self._turns.setdefault((arm, batch), []).append(turn)

    def add_overhead(self, batch: int, ratio: float) -> None:
        """``ratio``: tokens a second of the second of ``overhead_arms`` over the first's, with the same prompts."""
        self._overheads.setdefault(batch, []).append(ratio)

    def add_burst(self, arm: Arm, turn: Turn) -> None:
        self._bursts.setdefault(arm, []).append(turn)

    def reference_speed(self, batch: int) -> float:
        """Tokens a second of vLLM's best arm, or of Outrider's where vLLM is missing."""
        speed = self._best(batch, VLLM) or self._best(batch, *OWN)
        assert speed is not None
        return speed

    def result(self, notes: Sequence[str]) -> BenchResult:
        return BenchResult("compare", self.figures(), (self._table(),), tuple(notes))

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for batch in self._batches:
            best = partial(self._best, batch)
            ratios = {
                "over_vllm": (best(*OWN), best(VLLM)),
                "over_vllm_bf16": (best(*OWN), best(VLLM, precision="bf16")),
                "over_llama_cpp": (best(OUTRIDER, precision="bf16"), best(LLAMA_CPP, precision="bf16")),
                "over_llama_cpp_same_weights": (best(OUTRIDER, drafting=POOL), best(LLAMA_CPP, precision=Q4_1)),
                "plain_over_llama_cpp": (best(OUTRIDER, drafting=PLAIN), best(LLAMA_CPP, precision=Q4_1, drafting=PLAIN)),
            }
            figures |= {
                f"{name}.batch_{batch}": own / theirs
                for name, (own, theirs) in ratios.items()
                if own is not None and theirs is not None
            }
            figures |= self._over_plain(batch)
        overheads = {batch: statistics.median(ratios) for batch, ratios in self._overheads.items()}
        figures |= {f"vllm_target_overhead.batch_{batch}": ratio for batch, ratio in overheads.items()}
        if overheads:
            figures["vllm_target_overhead"] = max(overheads.values())
        figures |= self._burst_figures() | self._identity()
        for (arm, batch), turns in self._turns.items():
            figures[f"tokens_per_s.{_slug(arm.name)}.batch_{batch}"] = _median_speed(turns)
        return figures

    def _over_plain(self, batch: int) -> dict[str, float]:
        """Ways to draft for vLLM, over its server without drafts, of one precision."""
        own, plain = self.overhead_arms
        arms = {
            "vllm_target_speedup": replace(own, drafting=POOL),
            "plugin_over_vllm": Arm(PLUGIN, plain.precision, LOOKUPS),
            "vllm_ngram_over_vllm": replace(plain, drafting=NGRAM),
        }
        plain_turns = self._turns.get((plain, batch))
        found = {name: self._turns.get((arm, batch)) for name, arm in arms.items()}
        return {
            f"{name}.batch_{batch}": _median_speed(turns) / _median_speed(plain_turns)
            for name, turns in found.items()
            if turns and plain_turns
        }

    def _burst_figures(self) -> dict[str, float]:
        figures = {}
        for name, of in (("tpot_mean", statistics.fmean), ("tpot_p99", _worst)):
            by_arm = {arm: statistics.median(of(turn.tpot_s) for turn in turns) for arm, turns in self._bursts.items()}
            own = [value for arm, value in by_arm.items() if arm.family in OWN]
            theirs = [value for arm, value in by_arm.items() if arm.family == VLLM]
            if own and theirs:
                figures[f"{name}_over_vllm"] = min(own) / min(theirs)
        return figures

    def _identity(self) -> dict[str, float]:
        """Of each arm with drafts, against the plain arm of its family and precision, if both answer the same prompts."""
        plain = {(arm.family, arm.precision): arm for arm in self._arms if arm.drafting == PLAIN}
        plain |= {(PLUGIN, precision): arm for (family, precision), arm in plain.items() if family == VLLM}
        figures = {}
        for arm in self._arms:
            if arm.drafting == PLAIN:
                continue
            other = plain[arm.family, arm.precision]
            if arm.prompt_set != other.prompt_set:
                continue
            same = [
                a == b
                for batch in self._batches
                for one, two in zip(self._turns.get((arm, batch), ()), self._turns.get((other, batch), ()), strict=True)
                for a, b in zip(one.texts, two.texts, strict=True)
            ]
            figures[f"identical_fraction.{_slug(arm.name)}"] = statistics.fmean(same)
        return figures

    def _best(self, batch: int, *families: str, precision: str | None = None, drafting: str | None = None) -> float | None:
        """Tokens a second of the fastest arm, of all precisions and ways of drafting or of one."""
        speeds = [
            _median_speed(turns)
            for (arm, of_batch), turns in self._turns.items()
            if of_batch == batch and arm.family in families
            if precision in (None, arm.precision) and drafting in (None, arm.drafting)
        ]
        return max(speeds, default=None)

    def _table(self) -> Table:
        rows = []
        for arm in self._arms:
            row: list[Cell] = [f"{arm.family}, {arm.drafting}", arm.precision]
            for batch in self._batches:
                turns = self._turns.get((arm, batch))
                if turns is None:
                    row.append("")
                    continue
                median, half = spread([turn.tokens_per_s for turn in turns])
                row.append(f"{median:.1f} ± {100 * half:.0f}%")
            bursts = self._bursts.get(arm, ())
            tpots_s = [tpot_s for turn in bursts for tpot_s in turn.tpot_s]
            ttfts_s = [ttft_s for turn in bursts for ttft_s in turn.ttft_s]
            row.append(f"{1e3 * statistics.fmean(tpots_s):.1f}" if tpots_s else "")
            row.append(f"{1e3 * _worst(tpots_s):.1f}" if tpots_s else "")
            row.append(f"{1e3 * _worst(ttfts_s):.0f}" if ttfts_s else "")
            rows.append(tuple(row))
        return Table(
            "tokens a second by streams; trace: TPOT mean and p99, TTFT p99, ms",
            ("system", "weights", *map(str, self._batches), "TPOT", "p99", "TTFT p99"),
            tuple(rows),
        )


def _median_speed(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.tokens_per_s for turn in turns)


def _worst(values: Sequence[float]) -> float:
    return percentile(values, WORST_PERCENTILE)


def _slug(name: str) -> str:
    return name.lower().replace(", ", "-").replace(" ", "-").replace(".", "_")
