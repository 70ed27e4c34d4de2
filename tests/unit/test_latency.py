"""Latency surfaces: what is put in is found again, nothing falls, and the form that fits is the one that is chosen."""

import itertools
import random
from collections.abc import Callable

import pytest
from pydantic import TypeAdapter, ValidationError

from profiler.latency import (
    FORMS,
    Form,
    Kind,
    LatencyPoint,
    Linear,
    MonotoneTable,
    Piecewise,
    compare,
    fit_linear,
    fit_piecewise,
    fit_table,
    folds,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (0, 512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16)
LENS = (1, 2, 4, 8)


def surface(
    function: Callable[[int, int], float], xs: tuple[int, ...] = ROWS, ys: tuple[int, ...] = CONTEXTS, noise: float = 0.0
) -> list[LatencyPoint]:
    rng = random.Random(7)
    return [LatencyPoint(x, y, function(x, y) * rng.uniform(1 - noise, 1 + noise)) for x, y in itertools.product(xs, ys)]


def knee(x: int, y: int) -> float:
    return 0.02 + 1e-4 * min(x, 32) + 2e-3 * max(0, x - 32) + 1e-6 * y


def block_draft(b: int, s: int) -> float:
    """A block drafter: one pass however long the draft is, and a little for each token."""
    return 2e-3 + 3e-4 * b + 1e-5 * b * s


def test_the_linear_form_of_a_pass_finds_its_coefficients() -> None:
    fit = fit_linear(Kind.PASS, surface(lambda x, y: 0.013 + 8e-4 * x + 2e-6 * y))
    assert (fit.delta, fit.gamma, fit.alpha) == pytest.approx((0.013, 8e-4, 2e-6), rel=1e-6)


def test_the_linear_form_of_a_draft_sums_its_passes() -> None:
    def passes(b: int, s: int) -> float:
        return sum(0.004 + 3e-4 * b + 1e-5 * b * i for i in range(s))

    fit = fit_linear(Kind.DRAFT, surface(passes, BATCHES, LENS))
    assert (fit.delta, fit.gamma, fit.alpha) == pytest.approx((0.004, 3e-4, 1e-5), rel=1e-6)
    assert fit.at(3, 5) == pytest.approx(passes(3, 5))


def test_the_piecewise_form_finds_the_knee() -> None:
    fit = fit_piecewise(surface(knee))
    assert fit.knee == 32
    assert (fit.before, fit.beyond) == pytest.approx((1e-4, 2e-3), rel=1e-6)
    assert fit.at(100, 1000) == pytest.approx(knee(100, 1000))


def test_a_table_is_exact_where_it_was_measured_and_linear_between() -> None:
    fit = fit_table(surface(block_draft, BATCHES, LENS))
    for b, s in itertools.product(BATCHES, LENS):
        assert fit.at(b, s) == pytest.approx(block_draft(b, s))
    assert fit.at(12, 6) == pytest.approx(block_draft(12, 6))


@pytest.mark.parametrize("missing", [(4, 2), (1, 1), (16, 8), (16, 1), (8, 8)])
def test_a_cell_that_was_not_measured_is_filled(missing: tuple[int, int]) -> None:
    points = [p for p in surface(block_draft, BATCHES, LENS) if (p.x, p.y) != missing]
    assert fit_table(points).at(*missing) == pytest.approx(block_draft(*missing), rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_no_form_ever_falls_whatever_was_measured(seed: int) -> None:
    rng = random.Random(seed)
    grid = rng.sample(list(itertools.product(ROWS, CONTEXTS)), 20)
    points = [LatencyPoint(x, y, rng.uniform(0.001, 0.1)) for x, y in grid]
    places = (0, 1, 3, 7, 20, 100, 255, 300, 1000, 10**5)
    for kind, fits in ((kind, compare(kind, points).fits) for kind in Kind):
        for form, fit in fits.items():
            for axis_y in (0, 100, 700, 5000, 9000, 10**5):
                along = [fit.at(x, axis_y) for x in places]
                assert along == sorted(along), (kind, form)
            for axis_x in places[1:]:
                along = [fit.at(axis_x, y) for y in places]
                assert along == sorted(along), (kind, form)


def test_disorder_is_smoothed_to_the_nearest_order() -> None:
    points = [LatencyPoint(1, 0, 2.0), LatencyPoint(2, 0, 8.0), LatencyPoint(4, 0, 2.0), LatencyPoint(8, 0, 16.0)]
    assert fit_table(points).seconds == ((2.0,), (pytest.approx(4.0),), (pytest.approx(4.0),), (pytest.approx(16.0),))


def test_a_fifth_is_held_out_and_every_point_once() -> None:
    parts = folds(40)
    assert [len(part) for part in parts] == [8] * 5
    assert frozenset().union(*parts) == frozenset(range(40))


def test_the_form_that_made_the_points_foresees_those_it_has_not_seen() -> None:
    linear = compare(Kind.PASS, surface(lambda x, y: 0.013 + 8e-4 * x + 2e-6 * y, noise=0.02))
    assert linear.held_out["linear"] < 0.03
    bent = compare(Kind.PASS, surface(knee, noise=0.02))
    assert bent.best == "piecewise"
    assert bent.held_out["piecewise"] < 0.03 < bent.held_out["linear"]
    draft = compare(Kind.DRAFT, surface(block_draft, BATCHES, LENS, noise=0.02))
    assert draft.best == "table"
    assert draft.held_out["table"] < 0.05 < 0.3 < draft.held_out["linear"]


def test_errors_are_of_points_that_the_fit_has_not_seen() -> None:
    # A table has no error at all at points that it has seen.
    rng = random.Random(3)
    points = [LatencyPoint(x, 0, 0.01 * 2**i * rng.uniform(0.9, 1.1)) for i, x in enumerate(ROWS)]
    assert compare(Kind.CATCH_UP, points).held_out["table"] > 0.02


@pytest.mark.parametrize(
    "points",
    [
        [LatencyPoint(1, 0, 0.1), LatencyPoint(2, 0, 0.2), LatencyPoint(4, 0, 0.3)],
        [LatencyPoint(1, 0, 0.1)] * 5,
        [LatencyPoint(x, 0, 0.0) for x in ROWS],
        [LatencyPoint(x, 0, float("nan")) for x in ROWS],
    ],
)
def test_points_that_say_nothing_are_refused(points: list[LatencyPoint]) -> None:
    with pytest.raises(ValueError, match=r"points|durations"):
        compare(Kind.PASS, points)


@pytest.mark.parametrize(
    "fit",
    [
        Linear(Kind.DRAFT, 0.1, 0.2, 0.3),
        Piecewise(0.1, 0.2, 0.3, 0.4, 8.0),
        MonotoneTable((1, 4), (0, 512), ((0.1, 0.2), (0.2, 0.3))),
    ],
)
def test_a_fit_is_the_same_after_json(fit: Linear | Piecewise | MonotoneTable) -> None:
    adapter: TypeAdapter[Linear | Piecewise | MonotoneTable] = TypeAdapter(Form)
    assert adapter.validate_json(adapter.dump_json(fit)) == fit
    assert fit.form in FORMS


@pytest.mark.parametrize(
    "text",
    [
        '{"form": "cubic"}',
        '{"form": "linear", "kind": "pass", "delta": -1, "gamma": 0, "alpha": 0}',
        '{"form": "table", "xs": [1, 2], "ys": [0], "seconds": [[0.2], [0.1]]}',
        '{"form": "table", "xs": [2, 1], "ys": [0], "seconds": [[0.1], [0.2]]}',
        '{"form": "table", "xs": [1, 2], "ys": [0], "seconds": [[0.1]]}',
        '{"form": "table", "xs": [1, 2], "ys": [0], "seconds": [[0.1], [NaN]]}',
    ],
)
def test_a_fit_that_could_mislead_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Form).validate_json(text)
