"""What a simulation promises: it follows from its seed, loses and doubles nothing, and agrees with what is known."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.policy_scenarios import endless
from benchmarks.studies.spin import LockStep
from cluster.config import DraftLengthConfig, PolicyConfig
from cluster.types import FinishReason
from router.assignment import everybody, nobody
from router.cost_model import TableCost
from router.drafter.epsilon_greedy import EpsilonGreedy
from router.drafter.policies import build_policy, scored_by
from router.drafter.seats import Fixed
from router.planning.planner import PlannerSettings, StepPlanner
from simulator.agreement import Agreement, AgreementAnswer, SimulatedRequest
from simulator.simulation import ClusterSpec, DrafterSpec, Load, Simulation, SimulationResult, in_turn, simulate
from simulator.synthetic import DrafterFamily, Family, runs
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass, PaddedPass, Work

FAMILY = Family(
    drafters={"small": DrafterFamily(acceptance=0.4, spread=1.2), "large": DrafterFamily(acceptance=0.75, spread=1.2)}
)
LIMITS = TargetLimits(16, 4096, 16, 512, 4096)


class Cost(TableCost):
    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return {"small": 0.0005, "large": 0.002}[drafter] * draft_len

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        return 1e-5 * num_tokens


class Alike(Cost):
    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return 0.001 * draft_len


COST = Cost((1, 8, 64), (0.02, 0.022, 0.05), 1e-7)


def cluster(cost: TableCost = COST, **how: Any) -> ClusterSpec:
    spec = ClusterSpec(
        cost,
        PackedPass(cost),
        DraftByCost(cost),
        LIMITS,
        (DrafterSpec("small", 8, 4), DrafterSpec("large", 8, 4)),
        lambda: StepPlanner(PlannerSettings()),
    )
    return replace(spec, **how)


def requests(num: int, rate: float, seed: int = 0, output_len: int = 40) -> list[SimulatedRequest]:
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1.0 / rate, num)).tolist()
    return [
        SimulatedRequest(f"r{i}", at_s, 20 + i % 50, output_len + i % 7, FAMILY.answer(random, output_len + i % 7, 4))
        for i, at_s in enumerate(arrivals)
    ]


def essence(outcome: SimulationResult) -> list[tuple[str, float, float, int, int]]:
    return [(f.request.id, f.first_token_s, f.end_s, f.num_tokens, f.num_rounds) for f in outcome.finished]


def test_a_run_is_a_function_of_its_seed() -> None:
    def run(seed: int) -> list[tuple[str, float, float, int, int]]:
        spec = cluster(num_targets=2, jitter=0.2)
        return essence(simulate(spec, EpsilonGreedy(epsilon=0.3), Load(iter(requests(40, 20.0))), seed))

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize(
    "policy",
    [
        PolicyConfig(kind="fixed", chain=()),
        PolicyConfig(kind="epsilon-greedy"),
        PolicyConfig(kind="lbss"),
        PolicyConfig(kind="hedge"),
    ],
)
@pytest.mark.parametrize("num_blocks", [4096, 24])
def test_every_request_ends_and_every_token_counts_once(policy: PolicyConfig, num_blocks: int) -> None:
    load = requests(30, 30.0)
    spec = cluster(num_targets=2, limits=replace(LIMITS, num_blocks=num_blocks), scored=scored_by(policy))
    outcome = simulate(spec, build_policy(policy), Load(iter(load)))
    assert {f.request.id: f.num_tokens for f in outcome.finished} == {r.id: r.output_len for r in load}
    assert outcome.num_tokens == sum(r.output_len for r in load)
    assert all(f.request.arrival_s < f.first_token_s <= f.end_s for f in outcome.finished)
    assert (outcome.num_preempted > 0) == (num_blocks == 24)


def test_a_request_that_a_target_cannot_hold_is_refused() -> None:
    load = [replace(requests(1, 1.0)[0], prompt_len=5000)]
    finished = simulate(cluster(), Fixed(), Load(iter(load))).finished
    assert [f.finish for f in finished] == [FinishReason.ERROR]


def test_waiting_is_as_in_the_queue_that_it_is() -> None:
    """One place, and passes of constant time: M/D/1, whose mean wait is rho S / (2 (1 - rho))."""
    service_s, rho, num = 0.3, 0.6, 4000
    cost = TableCost((1, 2), (0.1, 0.1))  # a prompt's pass and two more of one token each
    answer = AgreementAnswer(3, {})
    random = np.random.default_rng(3)
    arrivals = np.cumsum(random.exponential(service_s / rho, num)).tolist()
    load = [SimulatedRequest(f"r{i}", at_s, 8, 3, answer) for i, at_s in enumerate(arrivals)]
    spec = cluster(cost, limits=replace(LIMITS, max_num_sequences=1), drafters=())
    outcome = simulate(spec, Fixed(()), Load(iter(load)))
    gaps = np.diff(arrivals)
    waits = [0.0]
    for gap in gaps.tolist():
        waits.append(max(0.0, waits[-1] + service_s - gap))  # Lindley's recursion
    assert outcome.ttft_s() - 0.1 == pytest.approx(waits, abs=1e-6)
    assert outcome.target_busy == pytest.approx(rho, rel=0.05)
    assert np.mean(waits) == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.2)
    assert outcome.tpot_s() == pytest.approx(0.1)


def test_right_drafts_save_passes_and_wrong_ones_save_none() -> None:
    def passes(right: int) -> int:
        num = 41
        answer = AgreementAnswer(
            num, {"small": Agreement(b"\4" * num, bytes([min(right, num - p) for p in range(num)]), flat=(0.9,) * 4)}
        )
        load = [SimulatedRequest("r", 0.0, 10, num, answer)]
        spec = cluster(planner=lambda: StepPlanner(PlannerSettings("all", max_hold_s=1.0)))
        return simulate(spec, Fixed(("small",)), Load(iter(load))).num_passes

    assert passes(0) == 41
    assert passes(4) == 1 + 40 // 5, "the prompt's pass, then four drafts and a bonus token each"


@pytest.mark.parametrize("companion", [False, True])
def test_a_round_takes_its_pass_its_draft_and_two_links(companion: bool) -> None:
    """A companion has no links, and its target waits for it."""
    num, link_s = 41, 0.003
    answer = AgreementAnswer(
        num, {"small": Agreement(b"\4" * num, bytes(min(4, num - p) for p in range(num)), flat=(0.9,) * 4)}
    )
    spec = cluster(
        TableCost((1, 64), (0.02, 0.02)),
        drafters=(DrafterSpec("small", 8, 4, companion=companion),),
        draft_timer=DraftByCost(COST),
        planner=lambda: StepPlanner(PlannerSettings("all", max_hold_s=1.0)),
        link_s=link_s,
    )
    load = [SimulatedRequest("r", 0.0, 10, num, answer)]
    outcome = simulate(spec, Fixed(("small",)), Load(iter(load)))
    catch_up_s = (10 + 7) * 1e-5  # the prompt, and the last token of each draft that was right
    between_s = 4 * 0.0005 + (0.0 if companion else 2 * link_s)
    expected_s = 9 * 0.02 + 8 * between_s + catch_up_s
    assert outcome.end_s == pytest.approx(expected_s, abs=1e-9)
    assert outcome.num_passes == 9


class CountingBehind(DraftByCost):
    """Also counts the committed tokens that drafters had to compute first."""

    num_behind = 0

    def seconds(self, drafter: str, batch: Sequence[Work]) -> float:
        CountingBehind.num_behind += sum(work.num_behind for work in batch)
        return super().seconds(drafter, batch)


def test_drafters_in_step_need_not_catch_up() -> None:
    load = requests(8, 100.0, output_len=200)
    behind = []
    for scored in (everybody, nobody):
        CountingBehind.num_behind = 0
        spec = cluster(scored=scored, spare_share=0.5, draft_timer=CountingBehind(COST))
        simulate(spec, EpsilonGreedy(epsilon=1.0), in_turn(load, 8))
        behind.append(CountingBehind.num_behind)
    assert behind[0] < 0.5 * behind[1]


def test_scoring_takes_time() -> None:
    load = requests(8, 100.0, output_len=200)
    busy = []
    for spare_share in (0.0, 0.1):
        spec = cluster(scored=everybody if spare_share else nobody, spare_share=spare_share)
        outcome = simulate(spec, Fixed(("large",)), in_turn(load, 8))
        busy.append(outcome.drafter_busy["small"])
    assert busy[0] == 0.0
    assert 0.01 < busy[1] < 0.1


def test_padding_costs_what_the_longest_does() -> None:
    rows = [(5, 100), (5, 300)]
    assert PackedPass(COST).seconds(rows, ()) == COST.step_s(10, 400)
    assert PaddedPass(COST).seconds(rows, ()) == COST.step_s(10, 600)
    assert PackedPass(COST).seconds((), [(7, 7)]) == COST.prefill_s(7, 7)


def test_prompts_do_not_pay_for_the_context_of_others() -> None:
    class Prefill(TableCost):
        def prefill_s(self, num_rows: int, num_context: int) -> float:
            return super().prefill_s(num_rows, 0) + 1e-4 * num_context  # much more than a decoding row's

    cost = Prefill((1, 8, 64), (0.02, 0.022, 0.05), 1e-7)
    rows, prompts = [(5, 1000), (5, 3000)], [(20, 20)]
    added_s = cost.step_s(30, 0) - cost.step_s(10, 0) + 20 * 1e-4
    assert PackedPass(cost).seconds(rows, prompts) == pytest.approx(cost.step_s(10, 4000) + added_s)


def test_a_horizon_cuts_off() -> None:
    outcome = simulate(cluster(), Fixed(), in_turn(requests(8, 1.0, output_len=2000), 8), until_s=2.0)
    assert outcome.end_s == 2.0
    assert outcome.num_unfinished == 8


def test_slots_come_as_long_as_there_is_work() -> None:
    simulation = Simulation(cluster(slot_s=0.1), Fixed(), in_turn(requests(4, 1.0), 4))
    outcome = simulation.run()
    assert [at_s for at_s, _ in outcome.slots] == pytest.approx(0.1 * np.arange(1, len(outcome.slots) + 1))
    assert outcome.slots[-1][0] <= outcome.end_s + 0.1


def test_a_companion_drafts_while_its_target_computes_nothing() -> None:
    """As one that is stepped on the target's thread does; a drafter on a device of its own drafts meanwhile."""

    def busy(companion: bool) -> float:
        in_turns = StepPlanner(PlannerSettings(max_hold_s=1.0, overlap="micro-batch"))
        drafter = DrafterSpec("large", 8, 4, companion=companion)
        spec = cluster(drafters=(drafter,), link_s=0.0, planner=lambda: in_turns)
        load = in_turn(requests(24, 1000.0, output_len=100), 6)
        outcome = simulate(spec, Fixed(("large",)), load)
        assert min(outcome.target_busy, outcome.drafter_busy["large"]) > 0.05
        return outcome.target_busy + outcome.drafter_busy["large"]

    assert busy(companion=True) <= 1.0 + 1e-9
    assert busy(companion=False) > 1.1


def test_companions_have_no_time_to_score_and_ride_ahead_of_nobody() -> None:
    spec = cluster(drafters=(DrafterSpec("small"), DrafterSpec("large", companion=True)))
    assert [member.leads for member in spec.pool()] == [True, False]


class TestAgreement:
    def test_nothing_is_right_on_what_is_not_the_answer(self) -> None:
        agreement = Agreement(bytes([3, 2]), bytes([2, 1]), flat=(0.5,) * 4)
        assert agreement.draft(0, 8) == (3, 2, (0.5,) * 3)
        assert agreement.draft(0, 1) == (1, 1, (0.5,))
        assert agreement.draft(0, 8, is_right=False)[1] == 0
        assert agreement.draft(7, 8)[1] == 0, "behind the end"

    def test_a_text_can_go_on_for_ever(self) -> None:
        request = endless(requests(1, 1.0)[0], 1000)
        once = requests(1, 1.0)[0].answer.by_drafter["large"].right[1:]
        assert request.output_len == len(request.answer.by_drafter["large"].right[:1000]) == 1000
        assert request.answer.by_drafter["large"].right.startswith(once + once)


class TestFamily:
    def test_runs(self) -> None:
        assert runs(np.array([True, True, False, True]), 4).tolist() == [2, 1, 0, 1]
        assert runs(np.array([True, True, True]), 2).tolist() == [2, 2, 1]

    def test_answers_have_the_acceptance_silence_and_decay_of_their_family(self) -> None:
        family = Family(
            drafters={
                "a": DrafterFamily(acceptance=0.5, spread=0.0, silence=0.5),
                "b": DrafterFamily(acceptance=0.75, spread=0.0, clumps=0.4),
                "c": DrafterFamily(acceptance=0.7, spread=0.0, decay=0.8),
            },
            common=0.0,
        )
        random = np.random.default_rng(0)
        answers = [family.answer(random, 400, 8) for _ in range(60)]
        conditional = {}
        for name, one in family.drafters.items():
            right = np.concatenate([np.frombuffer(a.by_drafter[name].right, np.uint8) for a in answers])
            drafted = np.concatenate([np.frombuffer(a.by_drafter[name].drafted, np.uint8) for a in answers])
            assert (right > 0).mean() == pytest.approx(one.acceptance, abs=0.03)
            assert (drafted[right == 0] == 0).mean() == pytest.approx(one.silence, abs=0.03)
            conditional[name] = (right > 1).sum() / (right > 0).sum()
        assert conditional["b"] > 0.8 > 0.75 > conditional["a"]
        assert conditional["c"] == pytest.approx(0.7 * 0.8, abs=0.03)

    def test_two_that_are_right_agree(self) -> None:
        answer = FAMILY.answer(np.random.default_rng(1), 500, 4, [("small", "large")])
        small, large = (np.frombuffer(answer.by_drafter[n].right, np.uint8) for n in ("small", "large"))
        inner = np.frombuffer(answer.inner["small", "large"].right, np.uint8)
        assert (inner >= np.minimum(small, large)).all()
        assert not ((inner > 0) & ((small > 0) != (large > 0))).any()


def goodput(spec: ClusterSpec, policy: PolicyConfig, load: Sequence[SimulatedRequest], concurrency: int) -> float:
    informed = replace(spec, scored=scored_by(policy))
    return simulate(informed, build_policy(policy), in_turn(load, concurrency)).goodput


def best_single(spec: ClusterSpec, load: Sequence[SimulatedRequest], concurrency: int) -> float:
    return max(goodput(spec, PolicyConfig(kind="fixed", chain=(one.name,)), load, concurrency) for one in spec.drafters)


def test_hedge_is_ahead_of_lbss_and_of_the_best_single_drafter() -> None:
    drafters = {"small": DrafterFamily(acceptance=0.6, spread=2.0), "large": DrafterFamily(acceptance=0.6, spread=2.0)}
    family = Family(drafters=drafters, common=0.0)
    random = np.random.default_rng(5)
    load = [SimulatedRequest(f"r{i}", 0.0, 30, 150, family.answer(random, 150, 4)) for i in range(60)]
    length = DraftLengthConfig(kind="fixed", num_tokens=4)
    spec = cluster(Alike(COST.rows, COST.step_s_at), planner=lambda: LockStep(StepPlanner()), draft_length=length)
    hedge = goodput(spec, PolicyConfig(kind="hedge"), load, 8)
    assert hedge > goodput(spec, PolicyConfig(kind="lbss"), load, 8)
    assert hedge > best_single(spec, load, 8)


class Prompts(TableCost):
    """Of a lookup and of a model in the target's process, where prompts take most of the time."""

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return {"lookup": 1e-5, "model": 0.001 + 0.0012 * batch}[drafter]

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        return 0.0


def prompts_and_short_answers(lookup: DrafterFamily, model: DrafterFamily) -> tuple[ClusterSpec, list[SimulatedRequest]]:
    family = Family(drafters={"lookup": lookup, "model": model}, common=0.3)
    random = np.random.default_rng(7)
    load = []
    for i in range(240):
        num_tokens = int(random.integers(60, 120))
        load.append(
            SimulatedRequest(f"r{i}", 0.0, int(random.integers(50, 450)), num_tokens, family.answer(random, num_tokens, 4))
        )
    cost = Prompts((1, 16, 512), (0.011, 0.017, 0.36))
    drafters = (DrafterSpec("lookup", 8, 4), DrafterSpec("model", 8, 4, companion=True))
    return cluster(cost, drafters=drafters, limits=replace(LIMITS, max_pass_tokens=2048)), load


def test_a_drafter_that_holds_up_all_is_not_taken_for_what_it_brings_to_one() -> None:
    """The model's rounds bring a tenth more, and take a third longer for everybody."""
    spec, load = prompts_and_short_answers(
        DrafterFamily(acceptance=0.55, spread=0.2), DrafterFamily(acceptance=0.6, spread=0.2)
    )
    assert goodput(spec, PolicyConfig(), load, 4) > 0.97 * best_single(spec, load, 4)
