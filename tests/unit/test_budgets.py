"""Token buckets: what a tenant may use per minute, and when it may again."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.planning.token_budgets import Budget, Limits, TokenBucket


def test_a_bucket_is_full_at_first_and_fills_at_its_rate() -> None:
    bucket = TokenBucket(10, 2.0)
    assert bucket.wait_s(10, 100.0) == 0
    bucket.take(10, 100.0)
    assert bucket.wait_s(4, 100.0) == 2.0
    assert bucket.level(101.0) == 2.0
    assert bucket.wait_s(4, 101.0) == 1.0
    assert bucket.level(1e6) == 10


def test_what_is_given_back_can_be_taken_and_never_exceeds_the_size() -> None:
    bucket = TokenBucket(10, 1.0)
    bucket.take(8, 0.0)
    bucket.give_back(5)
    assert bucket.level(0.0) == 7
    bucket.give_back(50)
    assert bucket.level(0.0) == 10


def test_a_clock_that_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(10, 1.0)
    bucket.take(10, 50.0)
    assert bucket.level(20.0) == 0
    assert bucket.level(51.0) == 1


@given(seed=st.integers(0, 2**32), per_minute=st.integers(1, 10_000), burst=st.floats(0.1, 10.0))
def test_no_interval_sees_more_than_the_rate_and_a_burst(seed: int, per_minute: int, burst: float) -> None:
    """Whoever asks at any times for any amounts, and gives some back, gets at most size + rate x time."""
    rng = random.Random(seed)
    bucket = Budget(Limits(tokens_per_minute=per_minute, burst_minutes=burst)).tokens
    assert bucket is not None
    now_s, used = 0.0, 0.0
    for _ in range(60):
        now_s += rng.expovariate(1.0)
        amount = rng.uniform(0, 1.2) * bucket.size
        if amount <= bucket.size and bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            unused = rng.choice([0.0, amount / 2])
            bucket.give_back(unused)
            used += amount - unused
        assert -1e-6 <= bucket.level(now_s) <= bucket.size
        assert used <= bucket.size + now_s * per_minute / 60 + 1e-6


def test_after_its_wait_the_amount_is_there() -> None:
    bucket = TokenBucket(7, 0.3)
    bucket.take(7, 0.0)
    wait_s = bucket.wait_s(5, 0.0)
    assert bucket.wait_s(5, math.ceil(wait_s)) == 0


@pytest.mark.parametrize(("per_minute", "burst", "size"), [(60, 1.0, 60), (60, 0.5, 30), (1, 0.1, 1)])
def test_a_burst_is_in_minutes_and_at_least_one(per_minute: int, burst: float, size: float) -> None:
    budget = Budget(Limits(requests_per_minute=per_minute, burst_minutes=burst))
    assert budget.requests is not None
    assert (budget.requests.size, budget.tokens) == (size, None)
