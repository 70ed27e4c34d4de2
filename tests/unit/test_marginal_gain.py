"""Whether a dear drafter is worth asking: hoped at first, then learned, and tried again now and then."""

from collections.abc import Callable

from router.estimates.marginal_gain import MarginalGain, RequestGain


def serve(
    worth: MarginalGain, num_rounds: int, gain: Callable[[int], float], price: float, batch: int = 1, at_hand: float = 0.5
) -> list[int]:
    """For how many requests it was asked in each round. ``price``: of each request."""
    asked = []
    for number in range(num_rounds):
        own = [RequestGain() for _ in range(batch)]
        chosen = worth.choose([(at_hand, one) for one in own], lambda num: price * num)
        for i in chosen:
            worth.learn(gain(number), at_hand, own[i])
        asked.append(len(chosen))
    return asked


def test_one_that_nothing_is_known_of_is_asked_for_what_may_be_hoped() -> None:
    assert serve(MarginalGain(), 1, lambda _: 0.0, price=0.9, batch=3) == [3]
    assert serve(MarginalGain(), 1, lambda _: 0.0, price=1.1, batch=3) == [0]


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
