"""Each draft-length policy against cases worked by hand, with a control for each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import DEFAULT_DRAFT_LEN, DraftLengthConfig
from cluster.types import Commit, DraftTerms
from router.cost_model import TableCost
from router.drafting.length import DraftLengths, PassFeedback
from router.drafting.policies import build_draft_lengths
from router.drafting.value import DraftingValue, QuotedPrice
from router.estimates.drafter_stats import Judgement
from router.estimates.trial import Exploration
from router.papers.faser import MAX_UPDATES, lower_bounds
from router.papers.turbospec import PROBE_PERIOD
from router.plan import DrafterView, SequenceView

FLAT = TableCost((1, 1024), (0.01, 0.01))
MAX_LEN = 8
LONGEST = {"d": MAX_LEN, "short": 2}
GOOD = {"d": DrafterView(0.0, 3.0, 0.8)}


def view(name: str, drafter: str | None = "d") -> SequenceView:
    return SequenceView(name, 20, 19, 0, True, drafter, None, 50)


def policy(config: DraftLengthConfig) -> DraftLengths:
    return build_draft_lengths(config, LONGEST)


def passed(num_right: Mapping[str, int], drafted: int = 4, round_s: float = 0.02, drafter: str = "d") -> PassFeedback:
    """Verdicts on proposals of ``drafted`` tokens, of which so many were right."""
    judgements = {
        name: Judgement(drafter, (0.5,) * min(drafted, right + 1), right) for name, right in num_right.items() if drafted
    }
    commits = [Commit(name, 20, tuple(range(right + 1)), drafted, right, drafter) for name, right in num_right.items()]
    return PassFeedback(commits, judgements, 0.01, round_s)


def lens(budgets: Mapping[str, DraftTerms]) -> dict[str, int]:
    return {name: budget.num_tokens for name, budget in budgets.items()}


def test_a_fixed_length_is_at_most_that_of_the_drafter_and_rows_are_free() -> None:
    budgets = policy(DraftLengthConfig(kind="fixed", num_tokens=3)).budgets(
        [view("a"), view("b", "short"), view("c", None)], DraftingValue(FLAT, GOOD, row_price=0.9)
    )
    assert lens(budgets) == {"a": 3, "b": 2}
    assert budgets["a"].row_price == 0.0


def test_a_threshold_is_told_to_the_drafter() -> None:
    budgets = policy(DraftLengthConfig(kind="threshold", min_confidence=0.3)).budgets(
        [view("a")], DraftingValue(FLAT, GOOD, row_price=0.9)
    )
    assert budgets == {"a": DraftTerms(MAX_LEN, min_confidence=0.3)}


def test_a_quoted_price_stays_while_the_true_one_is_near_and_falls_to_nothing_at_once() -> None:
    price = QuotedPrice(0.1, 0.02)
    assert [price.follow(one) for one in (0.5, 0.54, 0.46, 0.56, 0.5, 0.01, 0.0, 0.0)] == [
        True, False, False, True, True, True, True, False
    ]  # fmt: skip
    assert price.value == 0.0


def test_the_row_price_of_a_batch_that_wavers_about_a_threshold_is_sent_once() -> None:
    lengths = policy(DraftLengthConfig())
    prices = [0.3, 0.31, 0.29, 0.31, 0.29, 0.4, 0.39]
    quoted = [lengths.budgets([view("a")], DraftingValue(FLAT, GOOD, price))["a"].row_price for price in prices]
    assert len(set(quoted)) == 2
    control = [round(price * 64) / 64 for price in prices]
    assert len(set(control)) > 2


class TestOutrider:
    @pytest.mark.parametrize(("num_free", "is_drafted"), [(2, True), (0, False)])
    def test_drafts_that_fill_the_rows_before_a_knee_pay_whatever_a_row_costs(self, num_free: int, is_drafted: bool) -> None:
        """At 0.55 a row a first token gains 0.05 of each request, and the wait for it costs 0.1. Two rows cost nothing: they
        gain 1.2 tokens, and the wait costs 0.4 of all."""
        knee = TableCost((1, 4 + num_free, 12 + num_free), (0.01, 0.01, 0.09))
        drafters = {"d": DrafterView(0.008, 1.5, 0.6, draft_s=0.008, batch=4.0, draft_len=8.0)}
        budgets = policy(DraftLengthConfig()).budgets(
            [view(name) for name in "abcd"], DraftingValue(knee, drafters, 0.55, 400.0)
        )
        assert all(lens(budgets).values()) is is_drafted

    @pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
    def test_a_drafter_pays_where_some_number_of_rows_at_some_length_does(self, num_micro_batches: int) -> None:
        """Every number of rows of a pass is tried, of tables with steps and of slow and quick drafters."""
        chance, seen = np.random.default_rng(num_micro_batches), []
        for _ in range(100):
            num_requests, tokens_per_s = int(chance.integers(1, 12)), float(chance.uniform(50, 800))
            points = np.sort(chance.choice(np.arange(1, 60), size=8, replace=False))
            pass_s = 0.01 * np.cumsum(chance.exponential(1.0, 8) * np.tile([0, 1], 4))
            table = TableCost(tuple(map(int, points)), tuple(map(float, pass_s)))
            acceptance, reply_s = float(chance.uniform(0.1, 0.95)), float(chance.choice([0.0005, 0.005, 0.05]))
            drafters = {"d": DrafterView(reply_s, 3.0, acceptance)}
            batch = DraftingValue(table, drafters, 0.0, tokens_per_s, num_micro_batches)
            budgets = policy(DraftLengthConfig()).budgets([view(f"r{i}") for i in range(num_requests)], batch)

            num = ceil(num_requests / num_micro_batches)
            gains = [
                sum(sorted((acceptance ** (1 + i // num) for i in range(length * num)), reverse=True)[:rows])
                - tokens_per_s * (table.at(num + rows) - table.at(num))
                - 0.9 * num * tokens_per_s / num_requests * reply_s * length / MAX_LEN
                for length in range(1, MAX_LEN + 1)
                for rows in range(1, length * num + 1)
            ]
            seen.append(bool(max(gains) > 0))
            assert all(lens(budgets).values()) is seen[-1]
        assert 10 < sum(seen) < 90, "cases of both kinds"

    @pytest.mark.parametrize(
        ("shares_device", "num_requests", "step_s", "row_price", "expected"),
        [
            (True, 1, 0.0005, 0.0, 7),  # a step costs 0.05 tokens, and the 7th is right in 0.06
            (True, 1, 0.0005, 0.16, 5),  # half of a row's price counts: the 5th gains 0.135 - 0.08, the 6th 0.01
            (True, 4, 0.0005, 0.0, 8),  # as many tokens are drafted in a step as there are requests
            (True, 1, 0.02, 0.0, 1),
            (True, 1, None, 0.0, 8),
            (False, 1, 0.0005, 0.0, 8),  # another process ends its drafts itself
        ],
    )
    def test_drafts_on_the_target_s_device_are_as_long_as_gains_most(
        self, shares_device: bool, num_requests: int, step_s: float | None, row_price: float, expected: int
    ) -> None:
        """Of acceptance 0.67, beside 100 tokens per second."""

        class Profiled(TableCost):
            def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:  # type: ignore[override]
                return None if step_s is None else 0.003 + step_s * draft_len

        cost = Profiled((1, 1024), (0.01, 0.01))

        def longest(measured_over_profiled: float) -> int:
            draft_s = measured_over_profiled * (cost.draft_s("d", num_requests, MAX_LEN) or 0.005)
            one = DrafterView(draft_s, 2.0, 0.67, draft_s=draft_s, batch=num_requests, shares_device=shares_device)
            requests = [view(f"r{i}") for i in range(num_requests)]
            budgets = policy(DraftLengthConfig()).budgets(requests, DraftingValue(cost, {"d": one}, row_price, 100.0))
            return max(lens(budgets).values())

        assert longest(1.0) == expected
        if row_price == 0.0:
            assert longest(0.01) == MAX_LEN, "a cascade whose most expensive member is seldom queried"

    def test_where_certain_drafts_would_not_pay_nobody_is_drafted_for(self) -> None:
        sequences = [view(f"r{i}") for i in range(4)]
        slow = {"d": DrafterView(1.0, 3.0, 0.9, exposure=1.0)}  # 100 tokens a second are lost in each of its replies
        lengths = policy(DraftLengthConfig())
        assert set(lens(lengths.budgets(sequences, DraftingValue(FLAT, slow, 0.0, 400.0))).values()) == {0}
        overlapped = {"d": DrafterView(1.0, 3.0, 0.9, exposure=0.0)}
        in_turn = DraftingValue(FLAT, overlapped, 0.0, 400.0, num_micro_batches=2)
        assert set(lens(lengths.budgets(sequences, in_turn)).values()) == {MAX_LEN}
        at_once = DraftingValue(FLAT, overlapped, 0.0, 400.0)
        assert set(lens(lengths.budgets(sequences, at_once)).values()) == {0}, "they would wait for it from now on"

    def test_a_drafter_that_pays_for_nobody_is_tried_by_one_request_and_taken_again_once_it_is_fast(self) -> None:
        """Else its reply time would stay what it was when it was last used."""
        sequences, lengths = [view("a"), view("b")], policy(DraftLengthConfig())
        slow, fast = {"d": DrafterView(1.0, 3.0, 0.9)}, {"d": DrafterView(0.001, 3.0, 0.9)}
        drafted = []
        for number in range(2 * Exploration().longest):
            found = lens(lengths.budgets(sequences, DraftingValue(FLAT, slow, 0.0, 400.0)))
            assert found["b"] == 0
            drafted += [number] if found["a"] else []
        assert drafted[0] == Exploration().longest - 1, "a trial loses many rounds"
        assert len(drafted) == 8, "one trial of eight rounds"
        assert lens(lengths.budgets(sequences, DraftingValue(FLAT, fast, 0.0, 400.0))) == {"a": MAX_LEN, "b": MAX_LEN}

    def test_the_price_of_a_second_is_what_the_request_itself_could_decode(self) -> None:
        sequences = [view(f"r{i}") for i in range(4)]
        half = {"d": DrafterView(0.0, 3.0, 0.9, exposure=0.5)}
        for num_micro_batches, expected in ((1, 100.0), (2, 50.0)):
            batch = DraftingValue(FLAT, half, 0.0, 400.0, num_micro_batches)
            budgets = policy(DraftLengthConfig()).budgets(sequences, batch)
            assert budgets["r0"].second_price == pytest.approx(expected)


class TestTurboSpec:
    """Worked by hand: with a = 0.5 the expected tokens of 0, 1, 2, 3 draft tokens are 1, 1.5, 1.75, 1.875."""

    VIEW: Mapping[str, DrafterView] = {"d": DrafterView(0.0, 1.0, 0.5)}

    @pytest.mark.parametrize(
        ("row_s", "expected"),
        [
            (0.0, MAX_LEN),
            (0.001, 2),  # of 10 ms: 1/10, 1.5/11 = 0.136, 1.75/12 = 0.1458, 1.875/13 = 0.1442
            (0.003, 1),  # 1/10, 1.5/13 = 0.115, 1.75/16 = 0.109
            (0.006, 0),  # 1/10, 1.5/16 = 0.094
        ],
    )
    def test_the_length_with_the_most_goodput(self, row_s: float, expected: int) -> None:
        cost = TableCost((1, 100), (0.01, 0.01 + 99 * row_s))
        assert lens(policy(DraftLengthConfig(kind="turbospec")).budgets([view("a")], DraftingValue(cost, self.VIEW))) == {
            "a": expected
        }

    def test_a_length_ends_at_the_row_behind_which_passes_take_long(self) -> None:
        knee = TableCost((1, 3, 4, 100), (0.01, 0.01, 0.1, 1.0))
        assert lens(policy(DraftLengthConfig(kind="turbospec")).budgets([view("a")], DraftingValue(knee, self.VIEW))) == {
            "a": 2
        }

    @given(
        drafters=st.lists(st.sampled_from(["d", "short", None]), min_size=1, max_size=5),
        acceptance=st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)),
        row_s=st.sampled_from([0.0, 0.0005, 0.002, 0.01]),
        reply_s=st.sampled_from([0.0, 0.004, 0.04, 0.2]),
    )
    def test_goodput_as_the_paper_has_it(
        self, drafters: list[str | None], acceptance: tuple[float, float], row_s: float, reply_s: float
    ) -> None:
        cost = TableCost((1, 1001), (0.01, 0.01 + 1000 * row_s))
        rates = dict(zip(("d", "short"), acceptance, strict=True))
        views = {name: DrafterView(reply_s, 1.0, rate) for name, rate in rates.items()}

        def goodput(length: int) -> float:
            lens = [0 if one is None else min(length, LONGEST[one]) for one in drafters]
            tokens = sum(
                1.0 if one is None else (1 - rates[one] ** (k + 1)) / (1 - rates[one])
                for one, k in zip(drafters, lens, strict=True)
            )
            drafting_s = max(reply_s * k / DEFAULT_DRAFT_LEN for k in lens)
            return tokens / (drafting_s + cost.step_s(sum(lens) + len(lens), 0))

        sequences = [view(f"r{i}", one) for i, one in enumerate(drafters)]
        prompt = replace(view("prompt"), computed_len=3)  # not counted: it decodes nothing yet
        found = lens(policy(DraftLengthConfig(kind="turbospec")).budgets([*sequences, prompt], DraftingValue(cost, views)))
        best = max(goodput(length) for length in range(MAX_LEN + 1))
        assert goodput(max(found[s.request_id] for s in sequences if s.drafter) if any(drafters) else 0) == pytest.approx(
            best
        )

    def test_one_length_for_the_batch_and_more_rows_cost_more(self) -> None:
        cost = TableCost((1, 8, 100), (0.01, 0.01, 0.102))  # free up to 8 rows
        alone = lens(policy(DraftLengthConfig(kind="turbospec")).budgets([view("a")], DraftingValue(cost, self.VIEW)))
        many = lens(
            policy(DraftLengthConfig(kind="turbospec")).budgets(
                [view(f"r{i}") for i in range(8)], DraftingValue(cost, self.VIEW)
            )
        )
        assert alone["a"] >= 7
        assert set(many.values()) == {0}

    def test_the_time_of_drafts_counts(self) -> None:
        slow = {"d": DrafterView(0.16, 1.0, 0.5)}  # 20 ms for each of 8 tokens
        assert lens(policy(DraftLengthConfig(kind="turbospec")).budgets([view("a")], DraftingValue(FLAT, slow))) == {"a": 0}

    def test_length_0_is_probed_by_a_token_so_that_it_is_left_when_acceptance_rises(self) -> None:
        cost, lengths = TableCost((1, 100), (0.01, 0.01 + 99 * 0.006)), policy(DraftLengthConfig(kind="turbospec"))

        def drafted(acceptance: float, num: int) -> list[int]:
            value = DraftingValue(cost, {"d": DrafterView(0.0, 1.0, acceptance)})
            return [lengths.budgets([view("a")], value)["a"].num_tokens for _ in range(num)]

        assert drafted(0.5, 2 * PROBE_PERIOD + 2) == [*[0] * PROBE_PERIOD, 1] * 2
        assert drafted(0.9, 2) == [2, 2]  # 1.9/16 = 0.119, 2.71/22 = 0.123, 3.44/28 = 0.123
        assert drafted(0.5, PROBE_PERIOD) == [0] * PROBE_PERIOD  # counted from the last draft


def test_adaspec_tells_what_a_row_and_a_second_cost_at_the_plain_rate_and_the_mean_confidence() -> None:
    cost = TableCost((1, 2, 4, 100), (0.01, 0.02, 0.03, 0.51))
    lengths = policy(DraftLengthConfig(kind="adaspec"))
    sequences = [view("a"), view("b")]
    for _ in range(20):
        lengths.learn(passed({"a": 3}))  # with confidences of 0.5
    budget = lengths.budgets(sequences, DraftingValue(cost, GOOD))["a"]
    # Two requests take 20 ms, a row of each more 10 ms: a row is 5 ms of 100 tokens a second.
    assert budget.row_price == pytest.approx(0.5)
    assert budget.second_price == pytest.approx(50.0)
    assert budget.expected_confidence == pytest.approx(0.5, abs=0.02)


def test_adaspec_sends_prices_again_only_where_they_moved() -> None:
    """By more than a tenth, a row price also by more than a 64th of a token; a confidence by more than 0.02."""
    lengths = policy(DraftLengthConfig(kind="adaspec"))

    def quoted(plain_s: float, row_price: float) -> DraftTerms:
        cost = TableCost((1, 2), (plain_s, plain_s * (1.0 + row_price)))
        return lengths.budgets([view("a")], DraftingValue(cost, GOOD))["a"]

    prices = [quoted(0.01, price).row_price for price in (0.02, 0.0355, 0.0357, 0.5, 0.46, 0.44)]
    assert prices == pytest.approx([0.02, 0.02, 0.0357, 0.5, 0.5, 0.44])
    rates = [quoted(seconds, 0.5).second_price for seconds in (0.01, 0.0092, 0.009)]
    assert rates == pytest.approx([100.0, 100.0, 1 / 0.009])
    expected = []
    for num, confidence in ((5, 0.5), (1, 0.56), (1, 0.66)):  # means of 0.5, 0.51 and 0.531
        lengths.learn(PassFeedback([], {"a": Judgement("d", (confidence,) * num, 0)}, 0.01, 0.02))
        expected.append(quoted(0.01, 0.5).expected_confidence)
    assert expected == pytest.approx([0.5, 0.5, 0.5314], abs=1e-4)


def test_faser_bounds_the_cost_of_a_length_by_a_gaussian_process() -> None:
    """Equation 3 at length 2 and another batch, by the inverse of a matrix of two rows, and of one for the second request.

    J of 10, 10 and 40 ms are -0.7071 (twice) and 1.4142 standard deviations; of one round alone 0. Kernel: exp(-1/2) between
    lengths 1 and 3, exp(-1/8) from both to 2, times exp(-1/2) for a doubling of the batch."""
    far, near = exp(-1 / 2), exp(-1 / 8 - 1 / 2)
    determinant = 1.5 * 2.0 - far**2
    mean = near * ((2.0 - far) * -sqrt(0.5) + (1.5 - far) * sqrt(2.0)) / determinant
    variance = 1.0 - near**2 * (2.0 + 1.5 - 2.0 * far) / determinant
    tried = [[(1, 1, 0.01), (1, 1, 0.01), (3, 1, 0.04)], [(3, 1, 0.02)]]
    bounds = lower_bounds(tried, 3, 2, [3, 1])
    assert bounds.shape == (2, 3)
    assert bounds[0, 1] == pytest.approx(mean - sqrt(0.2 * log(6) * variance))
    assert bounds[1, 1] == pytest.approx(-sqrt(0.2 * log(2) * (1.0 - near**2 / 2.0)))


def test_faser_keeps_batches_apart_and_trusts_what_it_saw_often() -> None:
    """J of 10 and 30 ms, at the present batch and at its double, are -1 and 1 standard deviations."""
    far = exp(-1 / 2)
    ((_, bound),) = lower_bounds([[(2, 1, 0.01), (2, 2, 0.03)]], 2, 1, [2])
    variance = 1.0 - 2.0 / (4.0 - far**2)
    assert bound == pytest.approx((far - 1.0) / (2.0 - far) - sqrt(0.2 * log(4) * variance))
    # Of 19 rounds of one length, the mean has a variance of 1/19.
    ((often,),) = lower_bounds([[(1, 1, 0.01)] * 19], 1, 1, [19])
    assert often == pytest.approx(-sqrt(0.2 * log(38) / 20))


class TestFaser:
    def test_it_begins_with_half_the_longest_draft_and_forgets_who_left(self) -> None:
        lengths = build_draft_lengths(DraftLengthConfig(kind="faser"), {"d": 8, "short": 2, "one": 1})
        batch, everybody = DraftingValue(FLAT, GOOD), [view("a"), view("b", "short"), view("c", "one"), view("e", None)]
        assert lens(lengths.budgets(everybody, batch)) == {"a": 4, "b": 1, "c": 1}
        lengths.learn(passed({"a": 0}, 4))
        assert lens(lengths.budgets(everybody, batch))["a"] != 4
        lengths.budgets(everybody[1:], batch)
        assert lens(lengths.budgets(everybody, batch))["a"] != 4, "as many may be live as are remembered"
        lengths.budgets(everybody[1:3], batch)
        assert lens(lengths.budgets(everybody, batch))["a"] == 4

    def test_it_learns_of_its_own_proposals_alone(self) -> None:
        lengths, batch = policy(DraftLengthConfig(kind="faser")), DraftingValue(FLAT, GOOD)
        lengths.budgets([view("a")], batch)
        for feedback in (passed({"a": 0}, drafter="e"), passed({"a": 0}, drafted=0)):
            lengths.learn(feedback)
            assert lens(lengths.budgets([view("a")], batch)) == {"a": 4}
        lengths.learn(passed({"a": 0}))
        assert lens(lengths.budgets([view("a")], batch)) != {"a": 4}, "control"

    def test_each_drafter_has_lengths_of_its_own(self) -> None:
        lengths, batch = policy(DraftLengthConfig(kind="faser")), DraftingValue(FLAT, GOOD)
        drafted = {"a": 0, "b": 0}
        for _ in range(40):
            asked = lens(lengths.budgets([view("a"), view("b", "short")], batch))
            for name, drafter in (("a", "d"), ("b", "short")):
                if drafted[name]:
                    lengths.learn(passed({name: drafted[name]}, drafted[name], 0.01 + 0.001 * drafted[name], drafter))
            drafted = asked
        assert drafted["a"] >= 6
        assert drafted["b"] == 2

    def test_a_length_that_was_best_in_a_small_batch_is_taken_again_there(self) -> None:
        """Alone nothing is right, and a draft token takes 3 ms; beside fifteen others all are right."""
        lengths, batch = policy(DraftLengthConfig(kind="faser", window=200)), DraftingValue(FLAT, GOOD)
        others, drafted, seen = [view(f"r{i}", None) for i in range(15)], 0, []
        for number in range(84):
            crowded = 40 <= number < 80
            asked = lengths.budgets([view("a"), *(others if crowded else [])], batch)["a"].num_tokens
            if drafted:
                lengths.learn(
                    passed({"a": drafted if crowded else 0}, drafted, 0.01 + 0.003 * drafted / (3 if crowded else 1))
                )
            drafted = asked
            seen.append(asked)
        assert max(seen[36:40]) == 1
        assert min(seen[76:80]) >= 7
        assert max(seen[82:]) == 1

    @staticmethod
    def run(num_right: Sequence[int], time_of: float, num_rounds: int = 60) -> int:
        """The commonest length at last, where a round takes 10 ms and ``time_of`` for each draft token; the drafter is right
        as far as ``num_right`` says, in turn."""
        lengths, batch, drafted, seen = policy(DraftLengthConfig(kind="faser")), DraftingValue(FLAT, GOOD), 0, []
        for number in range(num_rounds):
            asked = lengths.budgets([view("a")], batch)["a"].num_tokens
            if drafted:
                right = min(drafted, num_right[number % len(num_right)])
                lengths.learn(passed({"a": right}, drafted, 0.01 + time_of * drafted))
            drafted = asked
            seen.append(asked)
        return max(set(seen[-20:]), key=seen[-20:].count)

    def test_it_finds_the_length_of_the_least_time_per_token(self) -> None:
        # Always 3 right: a round of s tokens commits min(s, 3) + 1 in 10 + 3 s ms; 19 / 4 is the least at s = 3.
        assert self.run([3], 0.003) == 3
        # All right: (10 + s) / (s + 1) falls with s.
        assert self.run([8], 0.001) >= 7
        # None right: each token is lost time.
        assert self.run([0], 0.003) == 1

    def test_an_old_load_is_forgotten(self) -> None:
        lengths, batch, drafted = policy(DraftLengthConfig(kind="faser", window=16)), DraftingValue(FLAT, GOOD), 0
        seen = []
        for number in range(160):
            asked = lengths.budgets([view("a")], batch)["a"].num_tokens
            right = 8 if number < 80 else 0
            if drafted:
                lengths.learn(passed({"a": min(drafted, right)}, drafted, 0.01 + 0.003 * drafted))
            drafted = asked
            seen.append(asked)
        assert sum(seen[60:80]) / 20 > 5
        assert sum(seen[-20:]) / 20 < 3

    def test_at_most_so_many_posteriors_are_updated_in_a_round_and_each_in_its_turn(self) -> None:
        names = [f"r{i}" for i in range(3 * MAX_UPDATES)]
        lengths, sequences = policy(DraftLengthConfig(kind="faser")), [view(name) for name in names]
        batch = DraftingValue(FLAT, GOOD)
        first = lens(lengths.budgets(sequences, batch))
        for _ in range(3):
            lengths.learn(passed(dict.fromkeys(names, 0), 4))
        changes = []
        for _ in range(3):
            now = lens(lengths.budgets(sequences, batch))
            changes.append(sum(now[name] != first[name] for name in names))
        assert changes == [MAX_UPDATES, 2 * MAX_UPDATES, 3 * MAX_UPDATES]
