"""Whether a dear drafter is worth asking: hoped at first, then learned, and tried again now and then."""

from collections.abc import Callable

import pytest

from router.estimates.draft_times import DraftTimes
from router.estimates.marginal_gain import MarginalGain


def serve(
    worth: MarginalGain,
    num_rounds: int,
    gain: Callable[[int], float],
    price: float,
    batch: int = 1,
    at_hand: float = 0.5,
    num_timed: int | None = None,
) -> list[int]:
    """For how many requests it was asked in each round. ``price``: of each request."""
    asked = []
    for number in range(num_rounds):
        chosen = worth.choose([at_hand] * batch, lambda num: price * num, num_timed)
        for _ in chosen:
            worth.learn(gain(number), at_hand)
        asked.append(len(chosen))
    return asked


def test_one_that_nothing_is_known_of_is_asked_for_what_may_be_hoped() -> None:
    assert serve(MarginalGain(), 1, lambda _: 0.0, price=0.9, batch=3) == [3]
    assert serve(MarginalGain(), 1, lambda _: 0.0, price=1.1, batch=3) == [0]


def test_one_that_nothing_is_known_of_is_tried_for_few_requests_and_in_some_rounds() -> None:
    """Tried for all 16 in each round it took as long as the pass, and the target stopped drafting by lookups, too."""
    assert serve(MarginalGain(), 10, lambda _: 0.0, price=0.9, batch=16, num_timed=8) == [2, *[0] * 9]
    assert serve(MarginalGain(), 8, lambda _: 1.0, price=0.9, batch=16, num_timed=8) == [2, 0, 0, 0, 2, 16, 16, 16]


def test_between_trials_it_is_queried_for_those_alone_for_whom_it_pays() -> None:
    """It gains half a token where much is at hand; where little is, a gain of 1 is expected. A query takes 8 tokens, for any
    number of requests, so that it would pay for all, and not for the half of whom it is known."""
    gains = MarginalGain()
    serve(gains, 100, lambda _: 0.4, price=0.5, at_hand=0.5)

    def chosen() -> list[int]:
        return gains.choose([0.5] * 8 + [0.0] * 8, lambda num: 8.0 if num else 0.0, num_timed=8)

    assert chosen() == list(range(10)), "two on trial, and whom that costs nothing more"
    assert [chosen() for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize("batch", [4, 8, 16])
@pytest.mark.parametrize(("fixed", "each", "gain"), [(0.2, 0.02, 0.8), (0.6, 0.0, 1.0), (1.0, 0.0, 2.0)])
def test_one_whose_drafts_pay_for_many_requests_alone_is_found_by_trials_of_few(
    batch: int, fixed: float, each: float, gain: float
) -> None:
    """``fixed`` and ``each``: of its draft time, in rounds, in which each request decodes a token. Its draft for one request
    costs more tokens than it gains; where it pays for all, all are drafted for soon."""
    gains, times, most = MarginalGain(), DraftTimes(0.0), 0
    asked = []
    for _ in range(60):
        price = lambda num: batch * times.at(num) if times.num else 0.15 * num  # noqa: E731
        chosen = gains.choose([0.5] * batch, price, most)
        for _ in chosen:
            gains.learn(gain, 0.5)
        if chosen:
            times.add(len(chosen), fixed + each * len(chosen))
            most = max(most, len(chosen))
        assert len(chosen) <= max(1, 2 * max(asked, default=0))
        asked.append(len(chosen))
    assert asked[-1] == (batch if gain > fixed + each * batch else 0)


def test_one_that_brings_more_than_it_costs_is_asked_every_time() -> None:
    assert serve(MarginalGain(), 500, lambda _: 0.6, price=0.5) == [1] * 500


def test_hope_is_given_up_soon_and_trials_become_rare() -> None:
    asked = serve(MarginalGain(), 4000, lambda _: 0.1, price=0.5, batch=8)
    assert sum(asked[:20]) <= 16, "a batch or two"
    assert 4 <= sum(asked[20:2000]) <= 16
    assert sum(asked[2000:]) <= 5
    assert max(asked[20:]) == 1, "a trial is of one request"


def test_one_that_has_become_better_is_found_out() -> None:
    asked = serve(MarginalGain(), 9000, lambda number: 2.0 if number >= 5000 else -0.1, price=0.5)
    assert sum(asked[1000:5000]) < 12
    assert all(asked[-2500:])


def test_what_is_not_worth_it_where_much_is_at_hand_may_be_where_there_is_little() -> None:
    worth = MarginalGain()
    for _ in range(100):
        serve(worth, 1, lambda _: 0.8, price=0.5, at_hand=0.0)
        serve(worth, 1, lambda _: 0.1, price=0.5, at_hand=2.0)
    assert serve(worth, 1, lambda _: 0.8, price=0.5, at_hand=0.0) == [1]
    assert serve(worth, 1, lambda _: 0.1, price=0.5, at_hand=2.0) == [0]
