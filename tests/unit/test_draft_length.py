"""How far requests are drafted for, and what a row costs: the rule, what objectives change, and the real loops."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import DraftLengthConfig
from cluster.types import Commit, DraftTerms, ModelInfo
from drafters.model import ModelDrafter
from drafters.protocol import Demand, Draft
from drafters.small_model import SmallModel
from engine.factory import load_model, load_target
from engine.loop_status import StepReport
from engine.pass_costs import PassCosts, PassCounts
from router.cost_model import TableCost
from router.drafting.length import DraftLengths
from router.drafting.length_rule import longest_draft, weighted
from router.drafting.policies import build_draft_lengths
from router.drafting.value import PRICE_STEPS, DecodeRate, DraftingValue, row_price
from router.plan import DrafterView, SequenceView, StepPlan
from router.planning.planner import PlannerSettings, StepPlanner
from router.planning.slo import NO_LIMITS, RoundLimits, Stream
from tests.support.linked_loops import LinkedTarget
from tests.support.requests import a_request
from tests.support.tiny_model import write_tiny_model

COST = TableCost((1, 8, 16, 32), (0.01, 0.01, 0.026, 0.042))


def view(name: str, drafter: str | None) -> SequenceView:
    return SequenceView(name, 20, 19, 0, True, drafter, None, 50)


def test_each_request_is_drafted_for_as_far_as_its_drafter_goes() -> None:
    lengths = DraftLengths({"a": 4, "b": 12})
    sequences = [view("r", "a"), view("s", "b/1"), view("t", None), view("u", "unknown"), view("v", "a")]
    budgets = lengths.budgets(sequences, DraftingValue(COST, row_price=0.25))
    assert {key: budget.num_tokens for key, budget in budgets.items()} == {"r": 4, "s": 12, "u": 8, "v": 4}
    assert {budget.row_price for budget in budgets.values()} == {0.25}


def test_a_price_that_hardly_moves_stays_the_same() -> None:
    lengths = DraftLengths({"a": 4})
    budgets = [
        lengths.budgets([view("r", "a")], DraftingValue(COST, row_price=price))["r"]
        for price in (0.25, 0.25 + 0.4 / PRICE_STEPS, 0.3)
    ]
    assert budgets[0] is budgets[1]
    assert budgets[2] == DraftTerms(4, pytest.approx(0.3, abs=0.5 / PRICE_STEPS))


def decoded_over_plain(rate: DecodeRate) -> float:
    assert rate.over_plain is not None
    return rate.over_plain


def test_a_row_costs_the_tokens_that_could_be_decoded_in_its_time() -> None:
    assert row_price(500.0, 12, 0, COST) == pytest.approx(0.002 * 500)
    assert row_price(500.0, 16, 0, COST) == pytest.approx(0.001 * 500), "at a knee the cheaper side"
    assert row_price(500.0, 2, 0, COST) == 0.0, "a row that is free"


def test_at_a_knee_a_row_is_worth_the_best_draft_token_that_has_none() -> None:
    """Up to 8 rows cost nothing, each further one a token, and beyond 16 half of one."""
    assert row_price(500.0, 8, 0, COST, 0.6) == pytest.approx(0.6)
    assert row_price(200.0, 8, 0, COST, 0.6) == pytest.approx(0.4), "it would pay beyond the knee, too"
    assert row_price(500.0, 7, 0, COST, 0.6) == 0.0, "there are more"
    assert row_price(500.0, 12, 0, COST, 0.6) == pytest.approx(1.0), "no knee"
    assert row_price(500.0, 16, 0, COST, 0.7) == pytest.approx(0.5), "the next row is cheaper"


def test_the_time_of_prompts_and_of_pauses_does_not_count() -> None:
    rate = DecodeRate()
    began_s = 0.0
    assert rate.over_plain is None, "before anything is known"
    for _ in range(10):
        rate.note(began_s, 8, 0.1, 2, 0.008)
        began_s += 0.116
    assert decoded_over_plain(rate) == pytest.approx(2.0)
    rate.interrupt()
    rate.note(began_s + 100.0, 8, 0.0, 2, 0.008)
    rate.note(began_s + 100.016, 8, 0.0, 2, 0.008)
    assert decoded_over_plain(rate) == pytest.approx(2.0)


def test_rounds_of_requests_that_have_only_begun_do_not_count() -> None:
    """A prompt of which only the last token is computed commits a token in a batch that does not decode."""
    costs = PassCosts(COST)
    begun = PassCounts(1, 0, 1, 1, 0, frozenset(), 0)
    for number in range(10):
        costs.plan(0, 0)
        costs.note(number * 0.1, 0.1, begun, [Commit("r", 10, (1,))], 0.0)
    costs.plan(8, 0)
    assert costs.planned.tokens_per_s == pytest.approx(8 / COST.step_s(8, 0))
    costs.plan(0, 0)
    for number in range(10, 20):
        costs.note(number * 0.1, 0.1, begun, [Commit("r", 10, (1,))], 0.0)
    costs.plan(8, 0)
    assert costs.planned.tokens_per_s == pytest.approx(8 / COST.step_s(8, 0)), "nor by the price of the batch before"


def test_the_value_of_a_second_follows_the_batch_at_once() -> None:
    """As many tokens over plain decoding as so far, of the batch that is there: a mean rate would lag behind a burst."""
    costs = PassCosts(COST)
    costs.plan(8, 0)
    assert costs.planned.tokens_per_s == pytest.approx(8 / COST.step_s(8, 0)), "plain decoding, before anything is known"
    decoded = PassCounts(8, 0, 8, 8, 0, frozenset(), 0)
    commits = [Commit(str(i), 10, (1, 2), num_proposed=1, num_accepted=1) for i in range(8)]
    for number in range(10):
        costs.plan(8, 0)
        costs.note(number * COST.step_s(8, 0), COST.step_s(8, 0), decoded, commits, 0.0)
    for batch in (1, 16, 2):
        costs.plan(batch, 0)
        assert costs.planned.tokens_per_s == pytest.approx(2 * batch / COST.step_s(batch, 0))


def test_a_burst_does_not_count_as_fast_decoding() -> None:
    """Rounds of a large batch have more tokens than those before, and as many over plain decoding."""
    rate, began_s = DecodeRate(), 0.0
    for batch in (1, 64, 1):
        plain_s = COST.step_s(batch, 0)
        for _ in range(100):
            rate.note(began_s, 2 * batch, 0.0, batch, plain_s)
            began_s += 1.25 * plain_s
            if rate.over_plain is not None:
                assert rate.over_plain == pytest.approx(1.6)


def test_a_long_pause_within_a_round_hardly_counts() -> None:
    rate, began_s = DecodeRate(), 0.0
    for pause_s in (*[0.0] * 64, 10.0, 0.0):
        rate.note(began_s, 2, 0.0, 1, 0.01)
        began_s += 0.01 + pause_s
    assert decoded_over_plain(rate) == pytest.approx(2.0, rel=0.05)


def test_the_price_of_a_row_at_a_knee_is_that_of_what_is_left_out() -> None:
    costs = PassCosts(COST)
    costs.plan(8, 0)
    at_knee = PassCounts(8, 0, 8, 8, 0, frozenset(), 0)
    commits = [Commit(str(i), 10, (1,)) for i in range(8)]
    for left_out, price in ((0.0, 0.0), (0.6, 0.3)):
        costs.note(0.0, 0.01, at_knee, commits, left_out)
        assert costs.row_price == pytest.approx(price, abs=0.02), "a mean of the passes"


def test_the_price_of_a_row_does_not_swing_with_each_pass_at_a_knee() -> None:
    """By the last pass alone everybody would draft in every other round."""
    costs, prices = PassCosts(COST), []
    for number in range(64):
        num_rows = (4, 12)[number % 2]  # below and beyond the knee at 8 rows
        costs.plan(4, 0)
        counts = PassCounts(num_rows, 0, 4, num_rows, 0, frozenset(), 0)
        commits = [Commit(str(i), 10, (1,), num_proposed=num_rows // 4 - 1) for i in range(4)]
        costs.note(number * 0.01, COST.step_s(num_rows, 0), counts, commits, 0.0)
        prices.append(costs.row_price)
    beyond = row_price(costs.planned.tokens_per_s, 12, 0, COST)
    assert beyond > 0.1
    assert all(0.3 * beyond < price < 0.7 * beyond for price in prices[32:])


def test_drafts_take_as_long_as_measured_with_the_transit_of_replies_and_before_that_as_profiled() -> None:
    class Profiled(TableCost):
        def draft_s(self, drafter: str, batch: int, draft_len: int) -> float:  # type: ignore[override]
            return 0.001 * draft_len

    cost, usual = Profiled((1, 64), (0.01, 0.01)), DrafterView(0.08, 3.0, 0.8, batch=4.0, draft_len=8.0)

    def drafting_s(**measured: float) -> float:
        return DraftingValue(cost, {"d": replace(usual, **measured)}).draft_s("d", 4, 4)

    assert drafting_s() == pytest.approx(0.004)
    assert drafting_s(draft_s=0.002) == pytest.approx(0.001), "a cascade whose most expensive member is seldom queried"
    assert drafting_s(draft_s=0.08, transit_s=0.01) == pytest.approx(0.05), "a drafter that became slow, on a distant device"


# ---- with the real loops: a native target, a model drafter in another process' loop, and a clock by hand


VOCAB_SIZE = 257
MODEL = ModelInfo("tiny", VOCAB_SIZE, 512, (VOCAB_SIZE - 1,), "tiny")
MAX_LEN = 5
PASS_S = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3)


class Noting(ModelDrafter):
    """Keeps the lengths of its drafts."""

    def __init__(self, model: SmallModel) -> None:
        super().__init__(model)
        self.model = model
        self.lens: list[int] = []

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = super().propose(demands)
        self.lens += [len(draft.token_ids) for draft in drafts]
        return drafts


class Load:
    """A cost model whose rows become dearer."""

    row_s = 0.0

    def step_s(self, num_rows: int, num_context: int) -> float:
        return PASS_S + self.row_s * num_rows

    prefill_s = step_s

    def table(self, num_context: int) -> TableCost:
        return TableCost((1, 64), (self.step_s(1, 0), self.step_s(64, 0)))

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> None:
        return None

    def catch_up_s(self, drafter: str, num_tokens: int) -> None:
        return None


class Switched(DraftLengths):
    """A length that the test sets."""

    num_tokens = MAX_LEN

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        return {s.request_id: DraftTerms(self.num_tokens) for s in sequences if s.drafter is not None}


class Served(LinkedTarget):
    """A target and a drafter of the same weights, which is always right."""

    def __init__(
        self, folder: Path, lengths: DraftLengths, chain: tuple[str, ...] | None = None, spare: float = 1.0
    ) -> None:
        self.cost, model = Load(), load_model(folder, "float32")
        engine = load_target(folder, dtype="float32", kv_cache_bytes=2**25, max_model_len=512)
        planner = StepPlanner(PlannerSettings("all", max_hold_s=1.0))
        super().__init__(engine, self.cost, planner, lengths, drafter="d", model=MODEL)
        self.drafter = Noting(SmallModel(model, num_blocks=64, vocab_size=VOCAB_SIZE, eos_token_ids=(VOCAB_SIZE - 1,)))
        self.drafts = self.drafter_loop("d", self.drafter, spare, max_draft_len=MAX_LEN)
        self.submit(a_request("r", range(40, 72), max_tokens=400, temperature=0.0, ignore_eos=True, chain=chain))
        self.plans: list[StepPlan] = []
        self.num_waits = 0

    def run(self, num_passes: int) -> list[Commit]:
        """Its commits. The drafter answers while the target waits or computes."""
        self.plans, self.num_waits = [], 0
        commits: list[Commit] = []
        while len(self.plans) < num_passes:
            begun = self.loop.begin(self.clock.now_s)
            while self.drafts.step(self.clock.now_s):
                pass
            if isinstance(begun, StepReport):
                assert begun.wake_s is not None, "the request has ended"
                self.num_waits += 1
                self.clock.now_s += 0.001
            else:
                self.loop.execute(begun)
                self.clock.now_s += PASS_S
                self.loop.finish(begun, self.clock.now_s)
                self.plans.append(begun.plan)
            commits += self.commits()
        self.drafts.check_integrity()
        return commits


@pytest.mark.slow
def test_proposals_of_a_remote_model_get_shorter_when_the_price_of_a_row_rises(folder: Path) -> None:
    """The tiny model's confidences are low, so little is drafted at a price until they are calibrated."""

    def lens_before_and_after(lengths: DraftLengths) -> tuple[set[int], set[int]]:
        served = Served(folder, lengths)
        served.run(10)
        before = set(served.drafter.lens)
        served.cost.row_s = 0.05 * PASS_S  # at six tokens a pass and its wait a row costs nearly a third of a token
        served.run(4)  # until the price has come
        served.drafter.lens.clear()
        served.run(10)
        return before, set(served.drafter.lens)

    max_lens = {"d": MAX_LEN}
    before, after = lens_before_and_after(build_draft_lengths(DraftLengthConfig(), max_lens))
    assert before == {MAX_LEN}
    assert after
    assert max(after) < MAX_LEN
    assert lens_before_and_after(build_draft_lengths(DraftLengthConfig(kind="fixed", num_tokens=MAX_LEN), max_lens)) == (
        {MAX_LEN},
        {MAX_LEN},
    )


@pytest.mark.slow
@pytest.mark.parametrize("spare", [1.0, 0.0], ids=["kept in step", "catches up"])
def test_without_a_budget_a_request_is_decoded_plainly_and_acceptance_is_at_once_what_it_was(
    folder: Path, spare: float
) -> None:
    lengths = Switched()
    served = Served(folder, lengths, spare=spare)
    served.run(3)
    drafted = served.run(10)
    assert {commit.num_accepted for commit in drafted} == {MAX_LEN}
    assert served.num_waits, "the round waits for drafts"

    lengths.num_tokens = 0
    served.run(2)  # the proposal under way is verified
    served.drafter.lens.clear()
    plain = served.run(60)
    assert served.num_waits == 0
    assert not served.drafter.lens
    assert all(not plan.held and [span.num_drafts for span in plan.spans] == [0] for plan in served.plans)
    assert {(commit.num_proposed, commit.drafter, len(commit.token_ids)) for commit in plain} == {(0, None, 1)}

    lengths.num_tokens = MAX_LEN
    num_rows = served.drafter.model.num_rows
    again = served.run(10)
    first = next(i for i, commit in enumerate(again) if commit.num_proposed)
    assert first <= 2, "one round to say so, one to draft"
    assert {commit.num_accepted for commit in again[first:]} == {MAX_LEN}
    # A row for each token, and those that were missed once: nothing is computed twice.
    num_missed = 0 if spare else 62
    assert served.drafter.model.num_rows - num_rows <= num_missed + sum(len(commit.token_ids) for commit in again) + MAX_LEN


def test_a_drafter_that_forgets_what_it_was_sent_does_not_pass_the_test_above(folder: Path) -> None:
    """The control: with tokens missing in its context, drafts are wrong."""
    served = Served(folder, Switched())
    served.run(3)
    lose: Callable[[str, Sequence[int]], None] = lambda request_id, token_ids: None  # noqa: E731
    served.drafter.model.extend = lose  # type: ignore[method-assign]
    assert {commit.num_accepted for commit in served.run(10)[2:]} != {MAX_LEN}


def test_who_opts_out_of_drafting_is_neither_held_nor_drafted_for(folder: Path) -> None:
    served = Served(folder, build_draft_lengths(DraftLengthConfig(kind="fixed", num_tokens=4), {"d": MAX_LEN}), chain=())
    commits = served.run(20)
    assert served.num_waits == 0
    assert not served.drafter.lens
    assert not served.drafts.sessions.num_drafted
    assert not served.drafts.sessions.num_shadows
    assert all(not plan.held for plan in served.plans)
    assert {commit.num_proposed for commit in commits} == {0}
    drafted = Served(folder, build_draft_lengths(DraftLengthConfig(kind="fixed", num_tokens=4), {"d": MAX_LEN})).run(20)
    assert max(commit.num_proposed for commit in drafted) == 4
    tokens = [token for commit in drafted for token in commit.token_ids]
    assert [token for commit in commits for token in commit.token_ids] == tokens[: len(commits)]


# ---- what objectives change


SLO_COST = TableCost((1, 1001), (0.01, 0.01))
DRAFTERS = {"d": DrafterView(0.04, 4.0, 0.8, draft_s=0.04, batch=2.0, draft_len=8.0)}  # 5 ms for each token of a batch
BUDGET = DraftTerms(8, 0.2, 100.0)


def slo_view(name: str, drafter: str | None = "d") -> SequenceView:
    return SequenceView(name, 20, 19, 0, True, drafter, None, 50)


def round_s(length: int) -> float:
    return 0.01 + 0.005 * length


def longest(*streams: Stream, acceptance: float = 0.0) -> int:
    return longest_draft(streams, lambda request_id: acceptance, round_s, 8)


def test_rows_of_a_request_that_falls_behind_cost_it_less_and_others_more() -> None:
    views = [slo_view(name) for name in ("behind", "far", "ahead", "free")]
    budgets = {one.request_id: BUDGET for one in views}
    assert weighted(budgets, views, {}, {}) == budgets
    found = weighted(budgets, views, {"behind": 2.0, "far": 4.0}, {})
    assert {name: one.row_price for name, one in found.items()} == {
        "behind": pytest.approx(0.2),  # of the mean weight
        "far": pytest.approx(0.1),
        "ahead": pytest.approx(0.4),
        "free": pytest.approx(0.4),
    }
    assert found["ahead"] is found["free"], "comparing budgets is quick"
    assert all(replace(one, row_price=0.2) == BUDGET for one in found.values())
    dear = weighted({one.request_id: replace(BUDGET, row_price=0.9) for one in views}, views, {"far": 4.0}, {})
    assert dear["free"].row_price == 1.0


def test_requests_that_are_not_drafted_for_stay_so() -> None:
    paused, plain = DraftTerms(0, 0.2), slo_view("plain", None)
    views = [slo_view("paused"), slo_view("behind"), plain]
    found = weighted({"paused": paused, "behind": BUDGET}, views[:2], {"behind": 2.0, "paused": 3.0}, {"d": 5})
    assert found["paused"] is paused
    assert found["behind"].num_tokens == 5
    assert "plain" not in found


def test_a_round_takes_what_the_tokens_of_each_stream_are_worth() -> None:
    assert longest() == 8
    assert longest(Stream("a", 0.021, -1.0)) == 2, "it commits one token of a request that is mostly wrong"
    assert longest(Stream("a", 0.021, 0.0101)) == 4, "or more while it is ahead"
    assert longest(Stream("a", 0.011, -1.0), acceptance=0.8) == 7, "4.16 tokens in 45 ms"
    assert longest(Stream("a", 0.021, -1.0), Stream("b", 0.03, 0.0)) == 2, "the tightest counts"


def test_what_no_length_can_meet_costs_others_nothing_and_drafts_of_others_never_end() -> None:
    assert longest(Stream("a", 0.009, -1.0)) == 8
    assert longest(Stream("a", 0.0105, -1.0)) == 1


class TestOutrider:
    @staticmethod
    def budgets(limits: RoundLimits, num_micro_batches: int = 1) -> dict[str, DraftTerms]:
        lengths = build_draft_lengths(DraftLengthConfig(), {"d": 8})
        batch = DraftingValue(SLO_COST, DRAFTERS, 0.25, 100.0, num_micro_batches, limits)
        return lengths.budgets([slo_view("a"), slo_view("b")], batch)

    def test_without_objectives_nothing_changes(self) -> None:
        found = self.budgets(NO_LIMITS)
        assert found == self.budgets(RoundLimits())
        assert found["a"] is found["b"]
        assert (found["a"].num_tokens, found["a"].row_price) == (8, 0.25)

    def test_prices_follow_weights_and_lengths_the_round(self) -> None:
        found = self.budgets(RoundLimits(weights={"a": 3.0}))
        assert (found["a"].row_price, found["b"].row_price) == (pytest.approx(0.25 / 1.5), pytest.approx(0.5))
        assert {one.num_tokens for one in found.values()} == {8}
        # 10 ms for the pass and 5 for each draft token; 1 + 0.8 + 0.64 tokens are expected with two.
        pressed = RoundLimits(streams=(Stream("b", 0.0083, 0.0),))
        assert {one.num_tokens for one in self.budgets(pressed).values()} == {2}
        assert {one.num_tokens for one in self.budgets(pressed, num_micro_batches=2).values()} == {8}, (
            "drafts are not awaited"
        )
