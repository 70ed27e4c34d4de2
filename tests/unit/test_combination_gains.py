"""What is expected of a combination, from what its parts would have drafted for the same request."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from cluster.config import HedgePolicy
from router.assignment import PoolMember, RequestView, ScoreCounts
from router.drafter.expiring_cache import GENERATION_SLOTS
from router.estimates.acceptance import AcceptanceModel, AcceptanceSnapshot
from tests.support.observations import right_at

CONFIG = HedgePolicy()
NUM_ROUNDS = 50


def new_model() -> AcceptanceModel:
    return AcceptanceModel(CONFIG, np.random.default_rng(0))


def pool(*parts: str) -> list[PoolMember]:
    return [PoolMember("a", 8, 0.1), PoolMember("b", 8, 0.1), PoolMember("both", 8, 0.1, leads=False, parts=parts)]


def expected(model: AcceptanceModel, request_id: str, drafters: Sequence[PoolMember]) -> tuple[float, float, float]:
    """Tokens of a round with a, b, and both."""
    rows = model.follow([RequestView(request_id, 50, 100, ())])
    a, b, both = model.expected_lens(rows, drafters)[0][0].tolist()
    return a, b, both


def draft(model: AcceptanceModel, request_id: str, **tokens: float) -> None:
    """``tokens`` of a round, by drafter."""
    counts = {name: right_at(NUM_ROUNDS, round(NUM_ROUNDS * (one - 1.0))) for name, one in tokens.items()}
    model.observe([], [ScoreCounts(request_id, name, positions) for name, positions in counts.items()])


def taught(drafters: Sequence[PoolMember]) -> AcceptanceModel:
    """Twenty requests with which both brought half a token more than the best part."""
    model = new_model()
    for i in range(20):
        expected(model, f"r{i}", drafters)
        draft(model, f"r{i}", a=2.0 + i % 2, b=1.2)
        expected(model, f"r{i}", drafters)
        draft(model, f"r{i}", both=2.5 + i % 2)
    return model


def test_what_the_best_part_would_bring_is_expected_of_a_combination_that_never_drafted() -> None:
    def lens(*parts: str) -> list[tuple[float, float, float]]:
        model = new_model()
        for request_id, a, b in (("x", 2.8, 1.2), ("y", 1.6, 1.8)):
            expected(model, request_id, pool(*parts))
            draft(model, request_id, a=a, b=b)
        return [expected(model, request_id, pool(*parts)) for request_id in "xy"]

    for a, b, both in lens("a", "b"):
        assert max(a, b) <= both <= max(a, b) + 0.1
    a, b, unknown = lens()[0]
    assert min(a, b) < unknown < 0.8 * max(a, b)


def test_the_gain_over_the_best_part_is_learned_from_other_requests() -> None:
    def of_new(*parts: str) -> tuple[float, float, float]:
        model = taught(pool(*parts))
        expected(model, "new", pool(*parts))
        draft(model, "new", a=4.0, b=1.2)
        return expected(model, "new", pool(*parts))

    a, _, both = of_new("a", "b")
    assert both - a == pytest.approx(0.45, abs=0.1)
    assert of_new()[2] == pytest.approx(3.0, abs=0.2)  # the mean over requests


def test_before_a_request_has_drafts_the_mean_over_requests_is_expected() -> None:
    assert expected(taught(pool("a", "b")), "new", pool("a", "b"))[2] == pytest.approx(3.0, abs=0.2)


def test_drafts_of_a_combination_outweigh_its_parts() -> None:
    model = new_model()
    expected(model, "x", pool("a", "b"))
    draft(model, "x", a=3.0, both=1.5)
    a, _, both = expected(model, "x", pool("a", "b"))
    assert a > 2.8
    assert both == pytest.approx(1.7, abs=0.15)


def test_parts_that_nobody_scores_tell_nothing() -> None:
    drafters = [PoolMember("a", 8, 0.1, leads=False), *pool("a")[1:]]
    model = new_model()
    expected(model, "x", drafters)
    draft(model, "x", a=3.0, both=1.5)
    assert expected(model, "x", drafters) == expected(model, "x", [*drafters[:2], *pool()[2:]])


def learned() -> AcceptanceModel:
    """One request, with the gain of its drafts."""
    model = new_model()
    expected(model, "x", pool("a", "b"))
    draft(model, "x", a=3.0)
    expected(model, "x", pool("a", "b"))
    assert not model.snapshot()["gains"]
    draft(model, "x", both=3.5)
    assert model.snapshot()["gains"]
    return model


def row_of(model: AcceptanceModel, request_id: str) -> int:
    return int(model.follow([RequestView(request_id, 50, 100, ())])[0])


def test_drafts_are_not_compared_with_what_was_expected_of_another_request() -> None:
    """The parts leave; then the request ends, and a new one gets its row."""
    model = learned()
    gains, row = model.snapshot()["gains"], row_of(model, "x")
    for _ in range(2 * GENERATION_SLOTS):
        model.requests.next_slot()
    assert row_of(model, "new") == row
    model.expected_lens(np.array([row]), pool("a", "b")[2:])
    draft(model, "new", both=1.0)
    assert model.snapshot()["gains"] == gains


def test_nothing_is_compared_after_a_restart() -> None:
    model = learned()
    gains, row = model.snapshot()["gains"], row_of(model, "x")
    model.restore(AcceptanceSnapshot.model_validate(model.snapshot()))
    assert row_of(model, "new") == row
    draft(model, "new", both=1.0)
    assert model.snapshot()["gains"] == gains


@pytest.mark.parametrize(("a", "both", "a_of_new", "bound"), [(6.0, 9.0, 8.9, 9.0), (6.0, 1.0, 1.0, 1.0)])
def test_no_more_than_the_longest_draft_and_no_less_than_none_is_expected(
    a: float, both: float, a_of_new: float, bound: float
) -> None:
    """Gains that lead beyond either end, since the best part of other requests was far from it."""
    model = new_model()
    for i in range(20):
        expected(model, f"r{i}", pool("a", "b"))
        draft(model, f"r{i}", a=a)
        expected(model, f"r{i}", pool("a", "b"))
        draft(model, f"r{i}", both=both)
    expected(model, "new", pool("a", "b"))
    draft(model, "new", a=a_of_new)
    assert expected(model, "new", pool("a", "b"))[2] == bound


def test_gains_outlive_the_model() -> None:
    first, second = taught(pool("a", "b")), new_model()
    second.restore(AcceptanceSnapshot.model_validate(json.loads(json.dumps(first.snapshot()))))
    found = []
    for model in (first, second):
        expected(model, "new", pool("a", "b"))
        draft(model, "new", a=4.0)
        found.append(expected(model, "new", pool("a", "b"))[2])
    assert found[0] == pytest.approx(found[1], abs=0.05)
