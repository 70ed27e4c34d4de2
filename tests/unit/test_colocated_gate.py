"""When a drafter that keeps the target waiting is asked, and what a row of a pass is worth."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from router.cost_model import TableCost
from router.drafting.colocated_gate import ColocatedGate
from router.drafting.value import saved_s
from tests.support.quick import first

COST = TableCost((1, 2, 4, 8, 16), (0.010, 0.010, 0.012, 0.016, 0.032))
PLAIN_S = 0.02  # of a plain pass
MOST_MISSED = 50  # tokens of a request


def asked(
    gate: ColocatedGate,
    batch: int,
    num_rounds: int,
    saves_s: Callable[[int], float | None],
    cost_s: float,
    handling_s: float = 0.0,
    prompts_wait: Callable[[int], bool] = lambda _: False,
    catch_up_token_s: float = 0.0,
    num_missed: int = 0,
) -> list[bool]:
    """In each round, as a loop asks. What the drafts of a round save may depend on it, and is known after the next decision;
    None: none was verified. A drafter misses a token of each request in each round in which it is not asked, until others
    have taken the places of these."""
    found: list[bool] = []
    newest: float | None = None
    for number in range(num_rounds):
        found.append(gate.decide(batch, PLAIN_S, prompts_wait(number), partial(int, num_missed)))
        if newest is not None:
            gate.add_saving(newest)
        newest = saves_s(number) if found[-1] else None
        gate.add_draft_time(batch, cost_s + num_missed * catch_up_token_s if found[-1] else 0.0)
        num_missed = 0 if found[-1] else min(num_missed + batch, MOST_MISSED * batch)
        gate.add_overhead(0.001 + (handling_s if found[-1] else 0.0))
    return found


def test_one_that_saves_more_than_it_takes_is_asked_in_every_round() -> None:
    assert all(asked(ColocatedGate(), 4, 500, lambda _: 0.005, 0.004))


@pytest.mark.parametrize("batch", [1, 4, 64])
@pytest.mark.parametrize(("saved_s", "cost_s"), [(0.0, 0.001), (0.004, 0.005), (0.0, 0.02), (0.019, 0.02), (0.0, 0.1)])
def test_one_that_saves_less_takes_a_hundredth_of_the_time(batch: int, saved_s: float, cost_s: float) -> None:
    found = asked(ColocatedGate(), batch, 4000, lambda _: saved_s, cost_s)
    assert found[0], "first it is tried"
    assert any(found[1000:]), "then now and then"
    trial_s = 7 * (cost_s - saved_s)
    assert sum(found) * (cost_s - saved_s) < PLAIN_S + trial_s + 0.0101 * 4000 * PLAIN_S


def test_a_trial_of_many_requests_may_end_after_two_verified_drafts() -> None:
    """A draft for many can take most of a round; for one, the first few drafts say little."""
    assert sum(asked(ColocatedGate(), 64, 100, lambda _: 0.004, 0.1)) == 3
    assert sum(asked(ColocatedGate(), 1, 100, lambda _: 0.004, 0.1)) == 7
    assert all(asked(ColocatedGate(), 64, 100, lambda _: 0.0099, 0.01)), "near its price a trial takes next to no credit"
    assert all(asked(ColocatedGate(), 64, 16, lambda _: None, 0.1)), "nothing is known before drafts are verified"


class Noting(ColocatedGate):
    """Sums what drafts took and saved."""

    taken_s = all_saved_s = 0.0

    def add_draft_time(self, batch: int, seconds: float) -> None:
        self.taken_s += seconds
        super().add_draft_time(batch, seconds)

    def add_saving(self, saved_s: float) -> None:
        self.all_saved_s += saved_s
        super().add_saving(saved_s)


def test_catching_up_counts_as_what_a_trial_takes() -> None:
    """Of 64 requests with 50 tokens it takes 32 ms, and drafts 3 ms."""
    gate = Noting()
    asked(gate, 64, 200, lambda _: 0.0, 0.001, catch_up_token_s=0.00001)
    before_s = gate.taken_s
    found = asked(gate, 64, 20_000, lambda _: 0.0, 0.001, catch_up_token_s=0.00001)
    assert sum(found) > 3
    assert gate.taken_s - before_s < 0.0125 * 20_000 * PLAIN_S


def tries_a_burst(gate: ColocatedGate, num_missed: int) -> bool:
    """Of a batch that is not known yet: a plain pass may be spent, that is 20 ms."""
    return gate.decide(256, PLAIN_S, num_missed=lambda: num_missed)


def test_a_burst_is_not_tried_while_catching_up_takes_too_long() -> None:
    gate = ColocatedGate()
    asked(gate, 64, 1000, lambda _: 0.0, 0.016, catch_up_token_s=0.00001)
    assert not tries_a_burst(gate, 2500)
    assert tries_a_burst(gate, 1500)


def test_catching_up_takes_as_long_as_was_profiled_before_it_is_measured() -> None:
    assert not tries_a_burst(ColocatedGate(catch_up_token_s=0.00001), 2500)
    assert tries_a_burst(ColocatedGate(catch_up_token_s=0.00001), 1500)
    assert tries_a_burst(ColocatedGate(), 5000), "nothing is known"


def test_a_slow_draft_is_not_taken_for_catching_up_with_a_few_tokens() -> None:
    gate = ColocatedGate()
    assert all(asked(gate, 1, 100, lambda _: 0.005, 0.004))
    for _ in range(10):
        gate.decide(1, PLAIN_S, num_missed=lambda: 2)
        gate.add_draft_time(1, 0.01)
    assert tries_a_burst(gate, 1500)


def test_the_first_draft_is_not_taken_for_catching_up() -> None:
    """It makes things ready."""
    gate = ColocatedGate()
    gate.decide(1, PLAIN_S, num_missed=lambda: 100)
    gate.add_draft_time(1, 0.5)
    asked(gate, 1, 100, lambda _: 0.02, 0.004)
    assert tries_a_burst(gate, 1500)


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("num_passes", first(1, [5, 1, 10, 25]))
@pytest.mark.parametrize("is_profiled", [True, False])
@pytest.mark.parametrize("cost_s", [0.002, 0.01])
def test_one_that_pays_is_asked_soon_however_long_it_catches_up_at_first(
    batch: int, num_passes: int, is_profiled: bool, cost_s: float
) -> None:
    """What it takes to catch up is no cost of later drafts. A profiled one may have to wait for so much credit."""
    num_missed = MOST_MISSED * batch
    token_s = num_passes * PLAIN_S / num_missed
    gate = ColocatedGate(token_s) if is_profiled else ColocatedGate()
    found = asked(gate, batch, 3500, lambda _: 2 * cost_s, cost_s, catch_up_token_s=token_s, num_missed=num_missed)
    assert all(found[2500:])


def test_a_drafter_that_needs_long_to_catch_up_is_found_out_to_pay() -> None:
    """50 plain passes each time. What its drafts save is compared with what they take."""
    found = asked(ColocatedGate(), 4, 20_000, lambda number: 0.0 if number < 9000 else 0.006, 0.005, catch_up_token_s=0.005)
    assert sum(found[:9000]) < 50
    assert all(found[12_000:])


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("stall_s", [0.1, 0.5, 60.0])
@pytest.mark.parametrize("at", [0, 1, 300])
def test_a_stall_is_no_cost_of_drafts(batch: int, stall_s: float, at: int) -> None:
    """Of a first draft, which makes things ready, or of a later one; 300 rounds later it is asked in every round."""
    gate, newest = ColocatedGate(), None
    found: list[bool] = []
    for number in range(at + 1000):
        found.append(gate.decide(batch, PLAIN_S))
        if newest is not None:
            gate.add_saving(newest)
        newest = 0.01 if found[-1] else None
        gate.add_draft_time(batch, stall_s if number == at else 0.004)
    assert all(found[at + 300 :])


def test_a_slow_round_is_no_handling_of_drafts() -> None:
    gate, newest = ColocatedGate(), None
    found: list[bool] = []
    for number in range(2000):
        found.append(gate.decide(16, PLAIN_S))
        if newest is not None:
            gate.add_saving(newest)
        newest = None if not found[-1] else 0.0 if number < 300 else 0.01
        gate.add_draft_time(16, 0.004)
        gate.add_overhead(1.0 if number == 1 else 0.001)
    assert all(found[1000:])


@pytest.mark.parametrize("catch_up_token_s", [0.00001, 0.0001, 0.0005])
def test_catching_up_counts_where_a_situation_comes_now_and_then(catch_up_token_s: float) -> None:
    """In one round of 20 prompts wait, and drafts save 30 ms and take 20. Before each the drafter has missed 19 tokens of
    each request: catching up takes 3, 30 or 152 ms."""
    gate, num_rounds = Noting(), 20_000
    asked(
        gate,
        16,
        num_rounds,
        lambda number: 0.001 if number % 20 else 0.03,
        0.02,
        prompts_wait=lambda number: not number % 20,
        catch_up_token_s=catch_up_token_s,
    )
    assert gate.taken_s - gate.all_saved_s < 0.02 * num_rounds * PLAIN_S


def test_a_trial_ends_if_nothing_is_ever_verified() -> None:
    assert sum(asked(ColocatedGate(), 4, 5000, lambda _: None, 0.05)) < 100


def test_passes_that_only_compute_prompts_are_no_drafts_that_take_no_time() -> None:
    gate, newest = ColocatedGate(), None
    num_asked = 0
    for _ in range(1000):
        queried = gate.decide(1, PLAIN_S)
        num_asked += queried
        if newest is not None:
            gate.add_saving(newest)
        newest = 0.003 if queried else None
        for seconds in (0.006, 0.0, 0.0):
            gate.add_draft_time(1, seconds if queried else 0.0)
    assert num_asked < 100


@pytest.mark.parametrize(("saves_s", "most", "least"), [(-0.002, 100, 3), (0.002, 200, 3), (0.01, 1500, 1400)])
def test_rounds_of_others_may_take_turns_with_its_own(saves_s: float, most: int, least: int) -> None:
    """Its drafts are verified in their rounds."""
    gate, queried, num_asked = ColocatedGate(), False, 0
    for number in range(3000):
        if number % 2:
            gate.skip()
            if queried:
                gate.add_saving(saves_s)
        else:
            queried = gate.decide(16, PLAIN_S, num_missed=lambda: 16)
            num_asked += queried
            gate.add_draft_time(16, 0.004 if queried else 0.0)
    assert least <= num_asked <= most


def test_one_that_nearly_pays_is_tried_seldom_and_long() -> None:
    """Each time it would have to catch up."""
    found = asked(ColocatedGate(), 4, 4000, lambda _: 0.01998, 0.02)
    assert sum(before != after for before, after in itertools.pairwise(found)) < 20


def test_one_that_becomes_better_is_found_out() -> None:
    found = asked(ColocatedGate(), 1, 1000, lambda number: 0.0 if number < 300 else 0.05, 0.004)
    assert sum(found[100:300]) < 30
    assert all(found[-300:])


def test_one_that_becomes_worse_is_found_out() -> None:
    """What it has saved is no credit for later."""
    found = asked(ColocatedGate(), 1, 1500, lambda number: 0.01 if number < 300 else 0.0, 0.004)
    assert all(found[:300])
    assert sum(found[600:]) < 60


def test_rounds_of_other_drafters_take_none_of_its_trials() -> None:
    gate = ColocatedGate()
    for _ in range(1000):
        gate.skip()
        assert not gate.is_queried
        gate.add_draft_time(4, 0.0)
        gate.add_overhead(0.001)
    assert all(asked(gate, 4, 500, lambda _: 0.005, 0.004))


def test_drafts_are_credited_after_a_round_of_others_too() -> None:
    gate = ColocatedGate()
    for batch in (1, 64):
        gate.decide(batch, PLAIN_S)
        gate.add_draft_time(batch, 0.1)
    gate.skip()
    gate.add_saving(1.0)
    assert all(asked(gate, 64, 8, lambda _: 0.0, 0.1))


def test_what_the_round_has_to_do_with_drafts_counts_too() -> None:
    """Known from pauses; one that saves enough from the first is not put to the test."""

    def saves_s(number: int) -> float:
        return 0.0 if number < 300 else 0.02

    assert all(asked(ColocatedGate(), 1, 2000, saves_s, 0.004, handling_s=0.001)[-300:])
    assert sum(asked(ColocatedGate(), 1, 2000, saves_s, 0.004, handling_s=0.03)[-1000:]) < 60
    assert all(asked(ColocatedGate(), 1, 300, lambda _: 0.005, 0.004, handling_s=0.002))


def test_a_trial_does_not_delay_prompts_that_wait() -> None:
    """It comes late, but it comes. Each situation is measured by itself."""
    found = asked(ColocatedGate(), 16, 3000, lambda _: 0.001, 0.02, prompts_wait=lambda _: True)
    first = found.index(True)
    assert 95 < first < 105, "a hundredth of so many plain passes is one of them"
    assert 6 < sum(found) < 40
    assert all(asked(ColocatedGate(), 16, 1000, lambda _: 0.03, 0.02, prompts_wait=lambda _: True)[first:])


@pytest.mark.parametrize("pays", [True, False])
def test_drafts_are_credited_to_the_round_that_asked_for_them(pays: bool) -> None:
    """Prompts wait in single rounds. What was drafted then saves as much, or next to nothing; other drafts the opposite."""

    def waits(number: int) -> bool:
        return number % 4 == 0

    found = asked(
        ColocatedGate(), 16, 8000, lambda number: 0.03 if waits(number) == pays else 0.001, 0.02, prompts_wait=waits
    )
    late = range(6000, 8000)
    waiting = sum(found[i] for i in late if waits(i)) / 500
    others = sum(found[i] for i in late if not waits(i)) / 1500
    assert (waiting > 0.9, others < 0.1) == (pays, pays)
    assert (waiting < 0.1, others > 0.9) == (not pays, not pays)


def test_what_pays_for_a_few_need_not_pay_for_many() -> None:
    gate, newest = ColocatedGate(), None
    for number in range(80):
        batch = 16 if number % 2 else 1
        queried = gate.decide(batch, PLAIN_S)
        if newest is not None:
            gate.add_saving(newest)
        newest = 0.01 if queried else None
        gate.add_draft_time(batch, (0.02 if batch == 16 else 0.001) if queried else 0.0)
    assert gate.decide(1, PLAIN_S)
    assert not gate.decide(16, PLAIN_S)
    assert gate.decide(2, PLAIN_S), "of another size nothing is known"


def test_drafts_save_the_time_of_their_tokens_less_that_of_their_rows() -> None:
    assert saved_s(4, 4, 2, 0, COST) == pytest.approx(2 * 0.012 / 4 - 0.004)
    assert saved_s(8, 8, 1, 0, COST) < 0.0
    assert saved_s(8, 0, 0, 0, COST) == 0.0


def test_a_pass_that_prompts_fill_is_not_saved() -> None:
    """Of a pass of 2 requests and 6 prompt rows, 16 ms, a request takes 1 ms; without prompts 5 ms of 10."""
    assert saved_s(2, 0, 1, 0, COST) == pytest.approx(0.005)
    assert saved_s(2, 0, 1, 0, COST, num_prompt_rows=6) == pytest.approx(0.001)
    assert saved_s(2, 2, 0, 0, COST, num_prompt_rows=6) == pytest.approx(-0.004)
