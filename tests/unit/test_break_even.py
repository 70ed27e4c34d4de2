"""When a drafter that keeps the target waiting is asked, and what a row of a pass is worth."""

from collections.abc import Callable

import pytest

from router.break_even import BreakEvenGate, saved_s
from router.cost_model import TableCost

COST = TableCost((1, 2, 4, 8, 16), (0.010, 0.010, 0.012, 0.016, 0.032))


def asked(
    gate: BreakEvenGate,
    batch: int,
    num_rounds: int,
    saves_s: Callable[[int], float | None],
    cost_s: float,
    handling_s: float = 0.0,
    prompts_wait: Callable[[int], bool] = lambda _: False,
) -> list[bool]:
    """In each round, as a loop asks. What the drafts of a round save may depend on it, and is known after the next decision;
    None: none was verified."""
    found: list[bool] = []
    newest: float | None = None
    for number in range(num_rounds):
        found.append(gate.decide(batch, prompts_wait(number)))
        if newest is not None:
            gate.note_saved(newest)
        newest = saves_s(number) if found[-1] else None
        gate.note_draft(batch, cost_s if found[-1] else 0.0)
        gate.note_rest(0.001 + (handling_s if found[-1] else 0.0))
    return found


def test_one_that_saves_more_than_it_takes_is_asked_in_every_round() -> None:
    assert all(asked(BreakEvenGate(), 4, 500, lambda _: 0.005, 0.004))


def test_one_that_saves_less_is_asked_hardly_ever() -> None:
    found = asked(BreakEvenGate(), 16, 2000, lambda _: 0.004, 0.005)
    assert all(found[:16]), "first it is tried"
    assert 10 < sum(found[16:]) < 60, "then now and then"


def test_a_hopeless_trial_of_many_requests_ends_early() -> None:
    """A draft for many can take most of a round; for one, the first few drafts say little."""
    many = asked(BreakEvenGate(), 64, 500, lambda _: 0.004, 0.1)
    assert sum(many[:64]) == 3
    assert sum(many[64:]) <= 6, "later trials are as short, and pauses double twice"
    assert all(asked(BreakEvenGate(), 1, 16, lambda _: 0.004, 0.1))
    assert all(asked(BreakEvenGate(), 64, 16, lambda _: 0.06, 0.1)), "near its price it is tried for as long as ever"
    assert all(asked(BreakEvenGate(), 64, 16, lambda _: None, 0.1)), "nothing is known before drafts are verified"


def test_one_that_becomes_better_for_many_is_found_out() -> None:
    found = asked(BreakEvenGate(), 64, 3000, lambda number: 0.0 if number < 300 else 0.15, 0.1)
    assert all(found[-300:])


def test_one_that_becomes_better_is_found_out() -> None:
    found = asked(BreakEvenGate(), 1, 1000, lambda number: 0.0 if number < 300 else 0.05, 0.004)
    assert sum(found[100:300]) < 30
    assert all(found[-300:])


def test_one_that_becomes_worse_is_found_out() -> None:
    found = asked(BreakEvenGate(), 1, 1500, lambda number: 0.01 if number < 300 else 0.0, 0.004)
    assert all(found[:300])
    assert sum(found[600:]) < 60


def test_rounds_of_other_drafters_take_none_of_its_trials() -> None:
    gate = BreakEvenGate()
    for _ in range(1000):
        gate.skip()
        assert not gate.is_queried
        gate.note_draft(4, 0.0)
        gate.note_rest(0.001)
    assert all(asked(gate, 4, 500, lambda _: 0.005, 0.004))


def test_what_the_round_has_to_do_with_drafts_counts_too() -> None:
    """Known from pauses; one that saves enough from the first is not put to the test."""

    def saves_s(number: int) -> float:
        return 0.0 if number < 300 else 0.02

    assert all(asked(BreakEvenGate(), 1, 2000, saves_s, 0.004, handling_s=0.001)[-300:])
    assert sum(asked(BreakEvenGate(), 1, 2000, saves_s, 0.004, handling_s=0.018)[-1000:]) < 60
    assert all(asked(BreakEvenGate(), 1, 300, lambda _: 0.005, 0.004, handling_s=0.002))


def test_a_trial_does_not_delay_prompts_that_wait() -> None:
    """It comes late, but it comes. Each situation is measured by itself."""
    found = asked(BreakEvenGate(), 16, 3000, lambda _: 0.001, 0.02, prompts_wait=lambda _: True)
    assert found[:256] == [*[False] * 255, True]
    assert 6 < sum(found) < 30
    assert all(asked(BreakEvenGate(), 16, 1000, lambda _: 0.03, 0.02, prompts_wait=lambda _: True)[256:])


@pytest.mark.parametrize("pays", [True, False])
def test_drafts_are_credited_to_the_round_that_asked_for_them(pays: bool) -> None:
    """Prompts wait in single rounds. What was drafted then saves as much, or next to nothing; other drafts the opposite."""

    def waits(number: int) -> bool:
        return number % 4 == 0

    found = asked(
        BreakEvenGate(), 16, 8000, lambda number: 0.03 if waits(number) == pays else 0.001, 0.02, prompts_wait=waits
    )
    late = range(6000, 8000)
    waiting = sum(found[i] for i in late if waits(i)) / 500
    others = sum(found[i] for i in late if not waits(i)) / 1500
    assert (waiting > 0.9, others < 0.1) == (pays, pays)
    assert (waiting < 0.1, others > 0.9) == (not pays, not pays)


def test_a_round_that_asks_for_nothing_is_no_free_draft() -> None:
    """The target waits for no draft then."""
    found = asked(BreakEvenGate(), 64, 4000, lambda _: 0.06, 0.1)
    assert sum(found[100:]) < 200


def test_a_drafter_that_once_had_nothing_to_draft_is_not_taken_for_free() -> None:
    gate = BreakEvenGate()
    asked(gate, 8, 1, lambda _: 0.0, 0.0)
    assert sum(asked(gate, 8, 500, lambda _: 0.001, 0.05)) < 60


def test_what_pays_for_a_few_need_not_pay_for_many() -> None:
    gate, newest = BreakEvenGate(), None
    for number in range(80):
        batch = 16 if number % 2 else 1
        queried = gate.decide(batch)
        if newest is not None:
            gate.note_saved(newest)
        newest = 0.01 if queried else None
        gate.note_draft(batch, (0.02 if batch == 16 else 0.001) if queried else 0.0)
    assert gate.decide(1)
    assert not gate.decide(16)
    assert gate.decide(2), "of another size nothing is known"


def test_catching_up_after_a_pause_is_not_taken_for_the_cost_of_a_draft() -> None:
    gate, newest = BreakEvenGate(), None
    found: list[bool] = []
    for number in range(400):
        paused = bool(found) and not found[-1]
        found.append(gate.decide(1))
        if newest is not None:
            gate.note_saved(newest)
        newest = None if not found[-1] else 0.0 if number < 60 else 0.01
        gate.note_draft(1, (1.0 if paused else 0.004) if found[-1] else 0.0)
    assert all(found[-100:])


def test_drafts_save_the_time_of_their_tokens_less_that_of_their_rows() -> None:
    assert saved_s(4, 4, 2, 0, COST) == pytest.approx(2 * 0.012 / 4 - 0.004)
    assert saved_s(8, 8, 1, 0, COST) < 0.0
    assert saved_s(8, 0, 0, 0, COST) == 0.0


def test_a_pass_that_prompts_fill_is_not_saved() -> None:
    """Of a pass of 2 requests and 6 prompt rows, 16 ms, a request takes 1 ms; without prompts 5 ms of 10."""
    assert saved_s(2, 0, 1, 0, COST) == pytest.approx(0.005)
    assert saved_s(2, 0, 1, 0, COST, num_prompt_rows=6) == pytest.approx(0.001)
    assert saved_s(2, 2, 0, 0, COST, num_prompt_rows=6) == pytest.approx(-0.004)
