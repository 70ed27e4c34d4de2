"""The cost model that follows what passes really take."""

import random

import pytest

from profiler.online_cost import OnlineCost
from router.cost_model import TableCost, relative_draft_cost

BASE = TableCost((1, 8, 64, 512), (0.02, 0.025, 0.06, 0.4), 1e-6)
ROWS = (1, 2, 5, 8, 12, 40, 64, 200, 512)


def passes(
    cost: OnlineCost, ratio: float, num: int, rows: tuple[int, ...] = (8,), noise: float = 0.1, seed: int = 0
) -> None:
    rng = random.Random(seed)
    for i in range(num):
        num_rows = rows[i % len(rows)]
        cost.observe(num_rows, 1000, BASE.step_s(num_rows, 1000) * ratio * rng.uniform(1 - noise, 1 + noise))


def test_without_passes_it_is_what_was_measured() -> None:
    cost = OnlineCost(BASE, knots=BASE.rows)
    for rows in ROWS:
        assert cost.step_s(rows, 3000) == pytest.approx(BASE.step_s(rows, 3000))


def test_it_comes_to_what_passes_take_and_other_regions_follow() -> None:
    cost = OnlineCost(BASE, knots=BASE.rows)
    passes(cost, 1.3, 400)
    assert cost.ratio(8) == pytest.approx(1.3, rel=0.03)
    assert cost.step_s(8, 1000) == pytest.approx(1.3 * BASE.step_s(8, 1000), rel=0.03)
    assert cost.step_s(512, 0) == pytest.approx(1.3 * BASE.step_s(512, 0), rel=0.03)  # has seen none of its own


def test_what_a_draft_costs_is_relative_to_what_passes_take_now() -> None:
    class Drafting(TableCost):
        def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
            return 0.002 * draft_len

    cost = OnlineCost(Drafting(BASE.rows, BASE.step_s_at, BASE.per_context_s), knots=BASE.rows)
    assert relative_draft_cost(cost, "d", 4) == pytest.approx(0.1)
    passes(cost, 2.0, 400, rows=(1,))
    assert relative_draft_cost(cost, "d", 4) == pytest.approx(0.05, rel=0.05)


def test_regions_have_ratios_of_their_own_and_the_steps_never_fall() -> None:
    cost = OnlineCost(BASE, knots=BASE.rows)
    for seed in range(100):
        passes(cost, 2.5, 3, rows=(8,), seed=seed)
        passes(cost, 0.7, 3, rows=(64,), seed=seed)
    assert cost.ratio(8) == pytest.approx(2.5, rel=0.1)
    assert cost.ratio(64) == pytest.approx(0.7, rel=0.1)
    steps = [cost.step_s(rows, 500) for rows in range(1, 600)]
    assert steps == sorted(steps)


def test_a_region_that_is_avoided_does_not_seem_dear_for_ever() -> None:
    """Something else ran whenever it was visited; since then only others were, and they are as they always were."""
    cost = OnlineCost(BASE, knots=BASE.rows)
    for seed in range(50):
        passes(cost, 2.0, 3, rows=(8,), seed=seed)
        passes(cost, 1.0, 3, rows=(64,), seed=seed)
    assert cost.ratio(8) > 1.8
    passes(cost, 1.0, 100, rows=(64,))
    assert cost.ratio(8) > 1.4
    passes(cost, 1.0, 900, rows=(64,))
    assert cost.ratio(8) < 1.05
    passes(cost, 1.0, 10, rows=(8,))
    assert cost.ratio(8) < 1.05


def test_the_first_passes_do_not_carry_it_away() -> None:
    cost = OnlineCost(BASE)
    cost.observe(8, 0, 100.0)  # kernels were compiled meanwhile
    assert cost.ratio(8) < 1.25
    assert cost.ratio(64) < 1.25


@pytest.mark.parametrize("num", [20, 40, 80])
def test_a_range_of_its_own_speed_is_told_from_the_machine_where_it_is_visited_alone(num: int) -> None:
    """Drafts stay on: no pass without them shows that those are as they were."""
    cost = OnlineCost(BASE)
    passes(cost, 1.0, 500, rows=(64,))
    passes(cost, 1.5, num, rows=(181,))
    assert 1.3 < cost.ratio(181) / cost.ratio(64) <= 1.5


@pytest.mark.parametrize("seed", range(8))
def test_what_slows_the_machine_is_not_taken_for_a_trait_of_the_passes_that_it_met(seed: int) -> None:
    """Whether drafts pay is decided by the ratio of both. One range was measured wrongly, and is visited less."""
    cost, rng = OnlineCost(BASE), random.Random(seed)
    for i in range(30):
        speed = rng.choice((0.7, 1.0, 1.5))
        passes(cost, speed, 8, rows=(8,), seed=100 * seed + i)
        passes(cost, 1.3 * speed, 4, rows=(128,), seed=100 * seed + i)
    passes(cost, 0.7, 20, rows=(8,), seed=seed)
    ratio = BASE.step_s(128, 1000) / BASE.step_s(8, 1000)
    assert cost.step_s(128, 1000) / cost.step_s(8, 1000) == pytest.approx(1.3 * ratio, rel=0.15)


@pytest.mark.parametrize("ratio", [1.5, 0.6, 3.0])
def test_a_sudden_change_is_followed_soon_and_by_all_ranges(ratio: float) -> None:
    cost = OnlineCost(BASE)
    passes(cost, 1.0, 500, rows=(8, 64))
    passes(cost, ratio, 20)
    assert cost.ratio(8) == pytest.approx(ratio, rel=0.15)
    assert cost.ratio(64) == pytest.approx(ratio, rel=0.25)
    passes(cost, ratio, 100)
    assert cost.ratio(8) == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_a_disturbed_pass_now_and_then_change_little(seed: int) -> None:
    cost = OnlineCost(BASE)
    rng = random.Random(seed)
    for i in range(2000):
        disturbed = 3.0 if rng.random() < 0.02 else 1.0
        cost.observe(16, 2000, BASE.step_s(16, 2000) * disturbed * rng.lognormvariate(0.0, 0.1))
        if i > 100:
            assert cost.ratio(16) == pytest.approx(1.0, abs=0.25)


def test_a_slow_drift_is_followed() -> None:
    cost = OnlineCost(BASE)
    for i in range(3000):
        passes(cost, 1.0 + 0.5 * i / 3000, 1, seed=i)
    assert cost.ratio(8) == pytest.approx(1.5, rel=0.05)


def test_a_pass_without_a_duration_teaches_nothing() -> None:
    cost = OnlineCost(BASE)
    cost.observe(8, 0, 0.0)
    assert cost.ratio(8) == 1.0
