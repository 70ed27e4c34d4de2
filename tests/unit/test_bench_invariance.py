"""The benchmark of invariance itself: whole on a random tiny model, and blind to none of the ways to break the rule."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch

import engine.native
import router.drafting.policies
from benchmarks import invariance
from benchmarks.fault_injection import MidRequest, TruncatedDrafter, every_second, truncate_by_content
from benchmarks.harness import Harness, RunConditions
from benchmarks.report import BenchOptions, BenchResult
from cluster.config import DrafterConfig, HiddenStateKind, HiddenStateOptions
from cluster.sampling_params import SamplingParams
from drafters.ngram import NgramDrafter
from drafters.protocol import Demand
from engine.sampling import Chosen
from engine.vllm.environment import RUNNER_V2
from router.cost_model import TableCost
from router.drafting.policies import OVERLAP_POLICIES, VERIFICATION_POLICIES
from router.drafting.verification import PassContext
from router.plan import Capacity, SequenceView, Span
from router.planning.planner import StepPlanner
from tests.support.dspark import write_dspark
from tests.support.tiny_model import ship, write_tiny_layers, write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> BenchOptions:
    """A tiny model, and short prompts in which lookups find something to propose."""
    folder = tmp_path_factory.mktemp("invariance")
    prompts = [{"id": str(i), "domain": "short", "prompt": f"{i} {chr(97 + i) * 3} {chr(97 + i) * 3}"} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return BenchOptions(True, (folder / "prompts.jsonl",), str(write_tiny_model(folder / "tiny", seed=3)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products of a tiny model are too small to share."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _rows(result: BenchResult) -> dict[str, dict[str, object]]:
    (table,) = result.tables
    return {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_every_scenario_holds_on_a_tiny_model(options: BenchOptions) -> None:
    result = invariance.run(options)
    assert result.figures["identical_fraction"] == 1.0
    assert result.figures["tie_fraction"] <= 0.01
    assert result.figures["self_draft_acceptance"] >= 0.98
    assert result.figures["as_meant_fraction"] == 1.0
    rows = _rows(result)
    assert result.figures["num_runs"] == 2 * invariance.NUM_PROMPTS_QUICK * len(rows)
    assert {"ngram", "suffix", "model", "other vocabulary", "remote eagle3, a rank dies", invariance.SELF} <= rows.keys()
    of_kinds = {f"{where} {kind}" for where in ("pool's", "remote") for kind in get_args(HiddenStateKind)}
    assert of_kinds <= rows.keys()
    planned = {f"draft_length {kind}" for kind in router.drafting.policies.DRAFT_LENGTHS} - {"draft_length outrider"}
    planned |= {f"verify {name}" for name in VERIFICATION_POLICIES} - {"verify all"}
    planned |= {f"overlap {name}" for name in OVERLAP_POLICIES} - {"overlap gain"}
    assert planned <= rows.keys()
    for name, row in rows.items():
        assert (row["proposed"] == 0) == name.startswith("no drafts"), name


@pytest.mark.nightly
def test_all_that_is_shipped_is_held_to_the_target(
    options: BenchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in the cascade; those in the target's process also while it preempts."""
    target, folder = Path(options.model), tmp_path / "drafters"
    write_dspark(folder / "dspark", target, block_size=5)
    write_tiny_layers(folder / "layers-2", target, range(257))
    ship(monkeypatch, folder, options.model)
    result = invariance.run(options)
    assert result.figures["identical_fraction"] == 1.0
    assert result.figures["as_meant_fraction"] == 1.0
    names = {name.partition("pool's ")[2] for name in _rows(result)}
    assert {"table", "dspark", "layers-2", "cascade"} <= names
    assert {"half preempted, dspark", "half preempted, cascade"} <= _rows(result).keys()


def test_a_rule_that_is_broken_shows(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that takes the first draft token unseen: wrong wherever a drafter errs. Other ranks, in their own processes,
    would not, and end."""

    def trusting(span: Span, drafts: Sequence[int], chosen: Chosen) -> None:
        span.num_accepted = len(drafts[:1])
        span.chosen = (*drafts[:1], chosen.token_ids[span.num_accepted])
        span.logprobs = chosen.logprobs[: len(span.chosen)]

    monkeypatch.setattr(engine.native, "accept", trusting)
    scenarios = invariance.scenarios
    monkeypatch.setattr(
        invariance, "scenarios", lambda *made: {name: case for name, case in scenarios(*made).items() if case.num_ranks == 1}
    )
    result = invariance.run(options)
    assert result.figures["identical_fraction"] < 1.0
    assert any("different" in note for note in result.notes)
    rows = _rows(result)
    assert rows["no drafts, small batches"]["different"] == 0
    assert rows["ngram"]["different"] != 0


def test_a_missing_prompt_file_ends_the_benchmark_before_it_runs(options: BenchOptions, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a JSONL file"):
        invariance.run(BenchOptions(quick=True, model=options.model, prompts=(tmp_path / "none",)))


def test_drafters_beside_the_target_are_held_to_it_too(options: BenchOptions, tmp_path: Path) -> None:
    folder = write_dspark(tmp_path / "drafter", Path(options.model), block_size=5)
    dspark = DrafterConfig(name="dspark", options=HiddenStateOptions(path=str(folder), dtype="float32", min_survival=0.0))
    rig = Harness(options.model, ["aaa aaa aaa", "b b c", "d"], 16)
    plain = rig.run(RunConditions(prefix_cache=False))
    for preempt in (False, True):
        ran = rig.run(RunConditions(companions=(dspark,), prefix_cache=not preempt, preempt=preempt))
        assert ran.as_intended
        assert [c.token_ids for c in ran.completions] == [c.token_ids for c in plain.completions]


def test_cut_shortens_tokens_and_confidences_alike() -> None:
    drafter = TruncatedDrafter(NgramDrafter(2, 1), truncate_by_content)
    drafter.open("r", [1, 2, 4, 6, 8, 1, 2], 7, SamplingParams(max_tokens=8, temperature=0.0))
    (draft,) = drafter.propose([Demand("r", 4)])
    assert draft.token_ids == (4,)
    assert len(draft.confidences) == 1


def _view(name: str, num_generated: int, running: bool = True) -> SequenceView:
    return SequenceView(
        request_id=name,
        committed_len=4 + num_generated,
        computed_len=3 + num_generated if running else 0,
        num_drafted=0,
        running=running,
        drafter=None,
        awaiting_since_s=None,
        max_new_tokens=8 - num_generated,
    )


def test_midway_preempts_half_of_the_running_once() -> None:
    planner = MidRequest(StepPlanner(), 5, every_second)
    context = PassContext({}, Capacity(16, 64, 64, 8, 64, 256), TableCost((1,), (0.01,)), now_s=0.0)
    views = [_view(name, 2) for name in "abcd"]
    assert planner.plan(views, context).preempted == ()
    views = [_view("a", 2), _view("b", 3), _view("c", 2), _view("d", 0, running=False)]
    plan = planner.plan(views, context)
    assert set(plan.preempted) == {"a", "c"}
    assert not {"a", "c"} & {span.request_id for span in plan.spans}
    assert planner.plan(views, context).preempted == ()


def test_of_vllms_model_runners_the_lower_fraction_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fraction = {"0": 1.0, "1": 0.5}
    measured: list[str] = []

    def measure(options: BenchOptions) -> BenchResult:
        measured.append(os.environ[RUNNER_V2])
        return BenchResult("invariance", {"identical_fraction": fraction[measured[-1]]}, notes=(measured[-1],))

    def child(options: BenchOptions) -> dict[str, object]:
        return {"figures": {"identical_fraction": fraction["1"]}, "notes": ["of V2"]}

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(invariance, "_run", measure)
    monkeypatch.setattr(invariance, "_on_runner_v2", child)
    both = invariance.run(BenchOptions(engine="vllm"))
    assert both.figures == {"identical_fraction": 0.5, "identical_fraction.v1": 1.0, "identical_fraction.v2": 0.5}
    assert both.notes == ("0", "of V2")
    os.environ[RUNNER_V2] = "1"
    assert invariance.run(BenchOptions(engine="vllm")).figures == {"identical_fraction": 0.5}, "the one that is named"
