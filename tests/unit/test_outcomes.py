"""Drafting ahead of several outcomes of a verification."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from cluster.config import DraftLengthConfig
from cluster.messages import OutcomeReport
from cluster.sampling_params import SamplingParams
from drafters.loop import REPORT_PERIOD_S
from drafters.model import ModelDrafter
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from router.cost_model import TableCost
from router.drafter.seats import Fixed
from router.planning.planner import PlannerSettings, StepPlanner
from simulator.agreement import SimulatedRequest
from simulator.simulation import ClusterSpec, DrafterSpec, SimulationResult, in_turn, simulate
from simulator.synthetic import DrafterFamily, Family
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass
from tests.support.drafter_bench import Bench, Counting
from tests.support.tiny_model import write_tiny_model
from tests.unit.test_drafters_model import small_model


class Branching(Counting):
    """Counts on, and names t + 50 and t + 60 as its other choices at position t."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capabilities(forks=self)
        self.forks: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.adopted: list[str] = []

    def fork(self, request_id: str, branch_id: str, ahead: Sequence[int], num_more: int) -> bool:
        self.texts[branch_id] = self.texts[request_id]
        self.forks[branch_id] = request_id, tuple(ahead)
        return True

    def adopt(self, request_id: str, branch_id: str) -> None:
        _, assumed = self.forks[branch_id]
        assert self.texts[request_id][-len(assumed) :] == list(assumed), "not what the branch assumed"
        del self.texts[branch_id]
        self.adopted.append(branch_id)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        found = []
        for demand, draft in zip(demands, super().propose(demands), strict=True):
            others = tuple((token_id + 50, token_id + 60)[: demand.num_runners_up] for token_id in draft.token_ids)
            found.append(Draft(draft.request_id, draft.token_ids, draft.confidences, others))
        return found


class Timed(Bench):
    """A bench whose drafter takes 10 ms for a step, and whose target takes ``verify_s`` for a pass."""

    def __init__(self, max_outcomes: int = 4) -> None:
        super().__init__(drafter=Branching(), max_outcomes=max_outcomes)

    def work(self, until_s: float) -> None:
        while self.now_s < until_s:
            work = self.loop.begin(self.now_s)
            began_s = self.now_s
            if work in ("drafted", "drafted ahead"):
                self.now_s += 0.01 * (4 if work == "drafted" else 1)
            self.loop.finish(work, began_s, self.now_s)
            self.loop.check_integrity()
            if work == "nothing":
                self.now_s = until_s

    def taught(self, max_tokens: int = 1000) -> int:
        """Learns that rejected tokens are replaced by the first other choice. Returns the committed length."""
        self.open("a", 10, max_tokens)
        length = 10
        for _ in range(12):
            self.work(self.now_s + 0.2)
            self.extend("a", length, length, length + 1 + 50)
            length += 2
        self.work(self.now_s + 0.2)
        self.link.take()
        return length


def test_an_outcome_that_was_prepared_is_answered_without_drafting_and_from_its_branch() -> None:
    bench = Timed()
    length = bench.taught()
    drafter = bench.drafter
    assert isinstance(drafter, Branching)
    bench.extend("a", length, length, length + 1 + 50)
    num_batches = len(drafter.batches)
    assert bench.loop.begin(bench.now_s) == "answered"
    assert len(drafter.batches) == num_batches
    (proposal,) = bench.link.take()
    assert (proposal.base_len, len(proposal.token_ids)) == (length + 2, 4)
    assert proposal.token_ids == tuple(range(length + 2, length + 6))
    assert drafter.adopted
    assert drafter.texts.keys() == {"0/a"}, "branches of other outcomes have ended"
    assert bench.loop.sessions.outcomes is not None
    counts = bench.loop.sessions.outcomes.counts
    assert 0 < counts.num_hits <= counts.num_commits
    assert counts.hit_rate == (counts.num_own + counts.num_hits) / counts.num_commits > 0.0


def test_what_came_of_outcomes_is_reported_to_a_target_once() -> None:
    bench = Timed()
    length = bench.taught()
    outcomes = bench.loop.sessions.outcomes
    assert outcomes is not None
    outcomes.take_report()
    before = outcomes.counts
    for _ in range(4):
        bench.extend("a", length, length, length + 1 + 50)
        length += 2
        bench.work(bench.now_s + 1.1 * REPORT_PERIOD_S)
    reports = [report for message in bench.link.sent for report in message.outcomes]
    assert len(reports) >= 2
    assert reduce(OutcomeReport.plus, (*reports, *outcomes.take_report()), before) == outcomes.counts
    assert outcomes.counts.num_commits == before.num_commits + 4
    assert outcomes.take_report() == ()


def test_an_outcome_that_was_not_prepared_is_drafted_for_as_without_any() -> None:
    bench = Timed()
    length = bench.taught()
    bench.extend("a", length, length, 3)
    bench.work(bench.now_s + 0.05)
    (proposal,) = bench.link.take()
    assert (proposal.base_len, proposal.token_ids) == (length + 2, tuple(range(length + 2, length + 6)))


def test_a_commit_never_waits_for_more_than_one_step_and_branches_end_with_their_request() -> None:
    bench = Timed()
    bench.taught()
    assert all(demand.num_tokens == 1 for batch in bench.drafter.batches for demand in batch if "#" in demand.request_id), (
        "a branch grows a token at a time"
    )
    bench.work(bench.now_s + 0.1)
    assert any("#" in key for key in bench.drafter.texts)
    bench.mail(releases=("a",))
    bench.settle()
    assert not bench.drafter.texts


def test_no_branch_grows_beyond_the_end_of_its_request() -> None:
    bench = Timed()
    end_len = 10 + 24 + 5
    length = bench.taught(end_len - 10)
    grown = {
        demand.request_id: length + len(demand.ahead) + 1
        for batch in bench.drafter.batches
        for demand in batch
        if demand.request_id in bench.drafter.texts.keys() - {"0/a"}
    }
    assert max(grown.values()) == end_len - 1, "the last token needs no draft"


def test_without_outcomes_nothing_is_forked_nor_asked_for() -> None:
    bench = Timed(max_outcomes=0)
    bench.taught()
    demands = [demand for batch in bench.drafter.batches for demand in batch]
    assert not any("#" in demand.request_id or demand.num_runners_up for demand in demands)


SAMPLED = SamplingParams(max_tokens=200, temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class TestModel:
    """Branches of a real model: shared blocks, copied tails."""

    @pytest.mark.parametrize("prompt_len", [5, 31, 32, 63, 70])
    def test_a_branch_drafts_what_a_fresh_request_with_its_tokens_drafts(self, folder: Path, prompt_len: int) -> None:
        prompt = [3 + i % 90 for i in range(prompt_len)]
        model = small_model(folder, num_blocks=24)
        drafter = ModelDrafter(model)
        drafter.open("a", prompt, len(prompt), SAMPLED)
        (draft,) = drafter.propose([Demand("a", 4, num_runners_up=2)])
        for chosen, others in zip(draft.token_ids, draft.runners_up, strict=True):
            assert len({chosen, *others}) == 3
        branches = {f"a#{j}": (*draft.token_ids[:j], draft.runners_up[j][0]) for j in range(4)}
        num_rows = model.num_rows
        for name, assumed in branches.items():
            assert drafter.fork("a", name, assumed, 4)
        found = drafter.propose([Demand(name, 4, assumed) for name, assumed in branches.items()])
        drafter.check_integrity()
        # The first pass computes the last assumed token alone, or with it the last draft token, which nobody had computed.
        assert model.num_rows - num_rows == 4 * 4
        for (name, assumed), one in zip(branches.items(), found, strict=True):
            assert one.token_ids == fresh(folder, [*prompt, *assumed], len(prompt)), name
        hit = branches["a#2"]
        drafter.extend("a", hit)
        drafter.adopt("a", "a#2")
        for name in ("a#0", "a#1", "a#3"):
            drafter.release(name)
        drafter.check_integrity()
        num_rows = model.num_rows
        (after,) = drafter.propose([Demand("a", 2, found[2].token_ids)])
        assert model.num_rows - num_rows == 2, "the branch's cache is the request's"
        assert (*found[2].token_ids, *after.token_ids) == fresh(folder, [*prompt, *hit], len(prompt), 6)
        drafter.release("a")
        drafter.check_integrity()

    def test_runners_up_are_what_is_chosen_with_the_better_ones_masked(self, folder: Path) -> None:
        prompt = [3 + i for i in range(20)]
        drafter = ModelDrafter(small_model(folder))
        drafter.open("a", prompt, len(prompt), SAMPLED)
        (draft,) = drafter.propose([Demand("a", 1, num_runners_up=2)])
        better = [draft.token_ids[0]]
        for expected in draft.runners_up[0]:
            masked = ModelDrafter(small_model(folder))
            bias = tuple((token_id, -100.0) for token_id in better)
            masked.open("a", prompt, len(prompt), SamplingParams(200, temperature=0.9, seed=5, logit_bias=bias))
            (other,) = masked.propose([Demand("a", 1)])
            assert other.token_ids == (expected,)
            better.append(expected)

    def test_only_those_that_ask_get_runners_up(self, folder: Path) -> None:
        """Else the first ones of a draft that goes on would be filed under earlier tokens of it."""
        drafter = ModelDrafter(small_model(folder))
        for name in ("a", "b"):
            drafter.open(name, [3, 4, 5], 3, SAMPLED)
        asking, other = drafter.propose([Demand("a", 2, num_runners_up=1), Demand("b", 2)])
        assert [len(others) for others in asking.runners_up] == [1, 1]
        assert other.runners_up == ()

    def test_no_branch_takes_blocks_from_requests(self, folder: Path) -> None:
        prompt = [3 + i % 90 for i in range(60)]
        drafter = ModelDrafter(small_model(folder, num_blocks=3))
        drafter.open("a", prompt, len(prompt), SAMPLED)
        drafter.propose([Demand("a", 4)])
        assert not drafter.fork("a", "a#0", (5,), 40)
        assert drafter.fork("a", "a#1", (5,), 3)
        drafter.check_integrity()

    def test_blocks_that_one_branch_may_come_to_need_are_not_promised_to_another(self, folder: Path) -> None:
        prompt = [3 + i % 90 for i in range(60)]
        model = small_model(folder, num_blocks=5)
        drafter = ModelDrafter(model)
        drafter.open("a", prompt, len(prompt), SAMPLED)
        drafter.propose([Demand("a", 4)])
        assert drafter.fork("a", "a#0", (5,), 10)
        assert not drafter.fork("a", "a#1", (6,), 10), "two of three blocks are free, and one is promised"
        (draft,) = drafter.propose([Demand("a#0", 10, (5,))])
        assert (len(draft.token_ids), model.num_lost) == (10, 0)
        drafter.release("a#0")
        assert drafter.fork("a", "a#1", (6,), 10)
        drafter.check_integrity()

    def test_a_branch_needs_blocks_of_its_own_where_those_of_an_equal_prompt_left_the_index(self, folder: Path) -> None:
        prompt, other = [3 + i % 90 for i in range(70)], [4 + i % 80 for i in range(70)]
        drafter = ModelDrafter(small_model(folder, num_blocks=7))
        for name in ("a", "b"):
            drafter.open(name, prompt, len(prompt), SAMPLED)
        drafts = drafter.propose([Demand("a", 2), Demand("b", 2)])
        for name, draft in zip(("a", "b"), drafts, strict=True):  # both have computed the prompt; the blocks of a are listed
            drafter.extend(name, draft.token_ids)
            drafter.propose([Demand(name, 2)])
        drafter.release("a")
        drafter.open("c", other, len(other), SAMPLED)
        drafter.propose([Demand("c", 2)])
        assert not drafter.fork("b", "b#0", (5,), 4), "it would have to copy three blocks, and one is free"
        drafter.check_integrity()
        drafter.release("c")
        assert drafter.fork("b", "b#0", (5,), 4)
        (draft,) = drafter.propose([Demand("b#0", 4, (5,))])
        assert draft.token_ids == fresh(folder, [*prompt, *drafts[1].token_ids, 5], len(prompt))
        drafter.check_integrity()


def fresh(folder: Path, token_ids: Sequence[int], prompt_len: int, num_tokens: int = 4) -> tuple[int, ...]:
    drafter: Drafter = ModelDrafter(small_model(folder))
    drafter.open("r", token_ids, prompt_len, SAMPLED)
    (draft,) = drafter.propose([Demand("r", num_tokens)])
    return draft.token_ids


class Cost(TableCost):
    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return 0.008 * draft_len

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        return 0.0


def simulated(max_outcomes: int, runner_up: float = 0.6) -> SimulationResult:
    cost = Cost((1, 64), (0.04, 0.044))
    spec = ClusterSpec(
        cost,
        PackedPass(cost),
        DraftByCost(cost),
        TargetLimits(max_num_sequences=4, block_len=16, num_blocks=256, max_pass_tokens=512, max_model_len=1024),
        (DrafterSpec("small", 8, 4, max_outcomes=max_outcomes),),
        lambda: StepPlanner(PlannerSettings("all", 1.0, overlap="barrier")),
        draft_length=DraftLengthConfig(kind="fixed", num_tokens=4),
    )
    family = Family(drafters={"small": DrafterFamily(acceptance=0.7, spread=0.0, runner_up=runner_up)}, common=0.0)
    random = np.random.default_rng(3)
    requests = [SimulatedRequest(f"r{i}", 0.0, 16, 800, family.answer(random, 800, 8)) for i in range(4)]
    return simulate(spec, Fixed(("small",)), in_turn(requests, 1))


@pytest.mark.slow
def test_simulated_outcomes_raise_goodput_and_change_no_token() -> None:
    without, prepared, unknown = simulated(0), simulated(4), simulated(4, runner_up=0.0)
    assert prepared.num_tokens == without.num_tokens
    assert prepared.accepted_len == pytest.approx(without.accepted_len, rel=0.02)
    assert prepared.goodput > 1.2 * without.goodput
    assert prepared.goodput > 1.05 * unknown.goodput, "control: the drafter's own guess alone gains less"
