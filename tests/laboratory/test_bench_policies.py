"""The parts of `outrider bench policies` that compute: loads, arms and figures."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policies import Case, figures
from benchmarks.policy_scenarios import (
    ARMS,
    DEFAULT,
    DRAFT_LEN,
    FIXED,
    MAX_SEQUENCES,
    PLAIN,
    Machine,
    Text,
    Workload,
    gpu_machine,
    scaled,
    trace_lens,
)
from router.cost_model import TableCost
from router.planning import slo
from router.planning.planner import StepPlanner
from simulator.scenario import Lens
from simulator.simulation import DrafterSpec
from simulator.speculation import ArmResult, VerificationAlone, run_arm
from simulator.synthetic import DrafterFamily, Family

FAMILY = Family(drafters={"small": DrafterFamily(acceptance=0.7, token_spread=1.5)})
TEXT = Text(Lens(median=32, spread=0.0), Lens(median=40, spread=0.0), family=FAMILY)
MACHINE = Machine("table", TableCost((1, 512), (0.01, 0.03)), DrafterSpec("small", 64, DRAFT_LEN), (TEXT,))


def _result(goodput: float, request_speed: float) -> ArmResult:
    return ArmResult(1.0, int(goodput), goodput / request_speed, np.ones(1), np.ones(1), 1.0, 0.0, 0.0)


def test_figures_take_the_worst_case_against_the_best_arm() -> None:
    arms = [arm.name for arm in ARMS]
    equal = {name: _result(100, 10.0) for name in arms}
    slow_trace = equal | {DEFAULT.name: _result(100, 9.0), FIXED[0].name: _result(100, 12.0)}
    fast_batch = equal | {DEFAULT.name: _result(150, 10.0), PLAIN.name: _result(50, 10.0)}
    found = figures({Case("m", "trace"): slow_trace, Case("m", "batch 1"): fast_batch}, {"batch 1"})
    assert found["outrider_over_best_fixed"] == pytest.approx(9.0 / 12.0)
    assert found["outrider_over_best_paper"] == pytest.approx(0.9)
    assert found["outrider_over_best_fixed.closed"] == pytest.approx(1.5)
    assert found["worst_over_plain.simulated"] == pytest.approx(3.0)


def test_a_trace_keeps_its_shape_and_asks_for_a_share_of_what_plain_decoding_serves() -> None:
    rows = [(10.0, 100, 50), (11.0, 200, 50), (14.0, 100, 100)]
    found = scaled(MACHINE, rows, load=0.5)
    arrivals = [at_s for at_s, _, _ in found]
    token_s = MACHINE.token_s(MAX_SEQUENCES) / MAX_SEQUENCES
    work_s = sum(MACHINE.cost.prefill_s(prompt_len, 0) + output_len * token_s for _, prompt_len, output_len in rows)
    assert arrivals[0] == 0.0
    assert arrivals[2] == pytest.approx(work_s / 0.5)
    assert arrivals[1] == pytest.approx(arrivals[2] / 4)


def test_a_trace_is_thinned_over_its_whole_length_and_cut_to_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = [f"{number}.0,5000,{number + 1}" for number in range(100)]
    path.write_text("\n".join(("arrival_s,prompt_tokens,output_tokens", *lines)))
    found = trace_lens(Workload("trace", trace=path, num_requests=10), MACHINE, np.random.default_rng(0))
    assert [at_s for at_s, _, _ in found] == [10.0 * number for number in range(10)]
    assert {prompt_len for _, prompt_len, _ in found} == {MACHINE.max_prompt_len}


@pytest.mark.parametrize("workload", [Workload("batch 2", 2, 100), Workload("synthetic", num_requests=20)])
def test_a_workload_has_the_same_requests_for_every_arm(workload: Workload) -> None:
    first, second = (list(islice(workload.load(MACHINE).requests, 8)) for _ in range(2))
    assert [(one.arrival_s, one.prompt_len, one.output_len) for one in first] == [
        (one.arrival_s, one.prompt_len, one.output_len) for one in second
    ]
    assert all(a.answer.of("small").right == b.answer.of("small").right for a, b in zip(first, second, strict=True))


def test_an_arm_is_measured_by_what_its_drafter_gets_right() -> None:
    workload = Workload("batch 2", 2, 2000)
    sure = Family(drafters={"small": DrafterFamily(acceptance=0.99, spread=0.0)}, common=0.0)
    machine = replace(MACHINE, texts=(replace(TEXT, family=sure),))

    def played(name: str) -> ArmResult:
        arm = next(arm for arm in ARMS if arm.name == name)
        return run_arm(machine.spec(), machine.settings(), arm, workload.load(machine), workload.until_s(machine))

    plain, four = played("plain"), played("fixed-4")
    assert plain.accepted_len == 1.0
    assert plain.verified_len == 0.0
    assert 4.0 < four.accepted_len <= 5.0
    assert four.rejected_share < 0.1
    assert four.goodput > 3.0 * plain.goodput
    assert four.attainment(float(plain.tpot_s.min())) == 1.0
    assert plain.attainment(float(four.tpot_s.max())) == 0.0


def test_confidences_of_tokens_that_differ_are_calibrated() -> None:
    agreement = FAMILY.answer(np.random.default_rng(0), 20_000, DRAFT_LEN).of("small")
    drafts = [agreement.draft(position, 1) for position in range(20_000)]
    confidences = np.array([told[0] for _, _, told in drafts])
    right = np.array([right for _, right, _ in drafts])
    assert confidences.std() > 0.15
    for low, high in ((0.2, 0.5), (0.5, 0.8), (0.8, 0.99)):
        part = (confidences >= low) & (confidences < high)
        assert right[part].mean() == pytest.approx(confidences[part].mean(), abs=0.03)


def test_machines_of_scenarios_cost_what_their_roofline_says() -> None:
    machine = gpu_machine("a100-70b", "middle-1b")
    assert machine.cost.draft_s("middle-1b", 1, 4) == pytest.approx(4 * (machine.cost.draft_s("middle-1b", 1, 1) or 0.0))
    assert 0.005 < machine.cost.step_s(1, 512) < 0.1


def test_adaspec_reads_objectives_in_verification_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are computed as without objectives; the default's wait for streams that are due."""
    monkeypatch.setattr(slo, "LATE_TOKENS", 0)  # the answers are short
    prompts = Text(Lens(median=400, spread=0.0), Lens(median=40, spread=0.0), family=FAMILY)
    machine = replace(MACHINE, texts=(prompts,))
    load = Workload("synthetic", num_requests=20)

    def ttft_s(planner: type[StepPlanner], tpot_slo_s: float | None) -> float:
        arm = replace(DEFAULT, planner=planner)
        result = run_arm(machine.spec(), machine.settings(), arm, load.load(machine), tpot_slo_s=tpot_slo_s)
        return float(result.ttft_s.mean())

    assert ttft_s(VerificationAlone, 0.02) < 1.2 * ttft_s(StepPlanner, None) < ttft_s(StepPlanner, 0.02)


# ---- a batch is not cut into micro-batches where a barrier with shorter drafts is faster


def test_the_default_is_faster_than_a_fixed_length_where_half_a_batch_takes_a_whole_pass() -> None:
    machine = gpu_machine("h100-32b", "qwen-1.5b")  # a pass for 2 requests takes as long as one for 4; 8 drafts take a pass
    workload = Workload("batch 4", 4, 2000)

    def played(name: str) -> ArmResult:
        arm = next(arm for arm in ARMS if arm.name == name)
        return run_arm(machine.spec(), machine.settings(), arm, workload.load(machine), workload.until_s(machine))

    default, two = played("outrider"), played("fixed-2")
    assert default.verified_len < 6.0
    assert default.goodput > two.goodput
