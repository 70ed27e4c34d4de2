"""When the first token of a new request is predicted, and which requests are refused for it."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.counts import MAX_CLASSES, OTHER, Attainment, SloCounts, summed
from cluster.types import Slo
from router.cost_model import TableCost
from router.drafting.verification import MIN_CHUNK_LEN
from router.plan import Capacity, SequenceView, SloProgress
from router.planning.admission import Departures, Load, exceeds_objective, predicted_ttft
from router.planning.slo import LATE_TOKENS
from tests.support.verification import RowsAttend

COST = TableCost((1, 1001), (0.01, 1.01))  # 10 ms, and 1 ms for each further row
CAPACITY = Capacity(
    block_len=16, num_blocks=512, num_free_blocks=512, max_num_sequences=8, max_pass_tokens=512, max_model_len=8192
)
NOW_S = 50.0


def prompt(num_tokens: int = 100, ttft_s: float | None = 0.5, **changes: Any) -> SequenceView:
    slo = None if ttft_s is None else SloProgress(NOW_S + ttft_s, None)
    return replace(SequenceView("new", num_tokens, 0, 0, False, None, None, 10, arrived_s=NOW_S, slo=slo), **changes)


def decoding(num: int) -> list[SequenceView]:
    return [SequenceView(f"d{i}", 20, 19, 0, True, None, None, 100, arrived_s=NOW_S - 1.0) for i in range(num)]


def ttft_s(
    request: SequenceView, sequences: list[SequenceView], load: Load | None = None, capacity: Capacity = CAPACITY
) -> float:
    predicted = predicted_ttft(request, sequences, load or Load(0, None), capacity, COST, NOW_S)
    return predicted.queue_s + predicted.prefill_s


def test_an_idle_target_takes_the_time_of_the_prompt() -> None:
    assert ttft_s(prompt(), []) == pytest.approx(0.1)


def test_what_is_cached_is_not_computed() -> None:
    assert ttft_s(prompt(cached_len=80), []) == pytest.approx(0.02)
    earlier = prompt(200, 0.4, request_id="earlier", cached_len=160)
    assert ttft_s(prompt(), [earlier]) == pytest.approx(0.14)


def test_prompts_that_are_due_before_and_the_decode_load_come_on_top() -> None:
    earlier = prompt(200, 0.4, request_id="earlier")
    later, free = prompt(200, 0.6, request_id="later"), prompt(200, None, request_id="free")
    assert ttft_s(prompt(), [earlier, later, free]) == pytest.approx(0.3)
    assert ttft_s(prompt(), decoding(4)) == pytest.approx(0.1 + 0.013)
    assert ttft_s(prompt(), decoding(4), Load(20, None)) == pytest.approx(0.1 + 0.029), "drafts are rows too"
    half_done = replace(earlier, running=True, computed_len=150)
    assert ttft_s(prompt(), [half_done]) == pytest.approx(0.15)


def test_a_stream_with_an_objective_leaves_prompts_less_of_each_pass() -> None:
    stream = replace(decoding(1)[0], slo=SloProgress(None, 0.03, NOW_S - 0.03 * LATE_TOKENS, 1 + LATE_TOKENS))
    assert ttft_s(prompt(95), [stream]) == pytest.approx(0.095 + 5 * 0.01)  # 20 ms of each pass


def test_a_prompt_fits_passes_of_flat_cost_beside_a_stream_that_is_behind() -> None:
    """Nothing is left of the pass for prompts, and they take no time of it."""
    flat = TableCost((1, 1001), (0.01, 0.01))
    stream = replace(decoding(1)[0], slo=SloProgress(None, 0.01, NOW_S - 0.5, 1 + LATE_TOKENS))
    predicted = predicted_ttft(prompt(96), [stream], Load(0, None), CAPACITY, flat, NOW_S)
    assert predicted.prefill_s == pytest.approx(96 / MIN_CHUNK_LEN * 0.01)


def test_what_decoding_attends_to_does_not_delay_a_prompt() -> None:
    cost = RowsAttend((1, 1001), (0.01, 1.01))
    long = [replace(one, committed_len=5000, computed_len=4999) for one in decoding(4)]
    predicted = [predicted_ttft(prompt(), each, Load(0, None), CAPACITY, cost, NOW_S) for each in (decoding(4), long)]
    assert predicted[0] == predicted[1]


def test_a_request_waits_for_places_and_blocks() -> None:
    full = decoding(8)
    assert ttft_s(prompt(), full, Load(8, 2.0)) == pytest.approx(2.0 + 0.1 + 0.017)
    assert ttft_s(prompt(), full, Load(8, None)) == pytest.approx(0.1 + 0.017), "nothing is known of ends yet"
    ahead = prompt(10, 0.1, request_id="ahead")
    assert ttft_s(prompt(), [*full, ahead], Load(8, 2.0)) == pytest.approx(4.0 + 0.1 + 0.017)
    no_blocks = replace(CAPACITY, num_free_blocks=3)
    assert ttft_s(prompt(), decoding(1), Load(1, 2.0), no_blocks) == pytest.approx(2.0 + 0.1 + 0.01)


def test_only_what_a_later_attempt_could_meet_is_refused() -> None:
    def refused(request: SequenceView, sequences: list[SequenceView]) -> bool:
        predicted = predicted_ttft(request, sequences, Load(0, None), CAPACITY, COST, NOW_S)
        return exceeds_objective(request, predicted, COST)

    queue = [prompt(300, 0.1, request_id="before")]
    assert refused(prompt(100, 0.3), queue)
    assert not refused(prompt(100, 0.5), queue)
    assert not refused(prompt(100, None), queue)
    assert not refused(prompt(100, 0.05), queue), "an idle target would miss it as well"


def test_departures_are_those_of_a_busy_target() -> None:
    departures = Departures()
    for i in range(10):
        departures.note(float(i), 2)
    assert departures.interval_s == pytest.approx(0.5)
    departures.idle()
    departures.note(1000.0, 1)
    assert departures.interval_s == pytest.approx(0.5)
    departures.note(1150.0, 1)
    assert departures.interval_s == pytest.approx(0.5, abs=0.1), "a pause of the machine"


def test_answers_count_by_class_and_objective() -> None:
    slo = Slo(0.5, 0.05, "tight")
    attainment = Attainment()
    for ttft, tpot in ((0.5, 0.05), (0.6, 0.04), (0.1, 0.06), (0.1, None)):
        attainment.note(SloCounts.of_answer(slo, ttft, tpot))
    attainment.note(SloCounts.of_answer(Slo(name="batch"), 9.0, 9.0))
    attainment.note(SloCounts("tight", num_refused=1))
    tight, batch = attainment.counts()
    assert tight == SloCounts("tight", 4, 2, 3, 1, 2, 1, 1)
    assert batch == SloCounts("batch", 1, 1)
    assert summed((tight, batch, tight))[0] == SloCounts("tight", 8, 4, 6, 2, 4, 2, 2)


def test_classes_that_peers_invent_take_no_memory_without_bound() -> None:
    attainment = Attainment()
    for i in range(2 * MAX_CLASSES):
        attainment.note(SloCounts(f"c{i}", 1))
    counts = attainment.counts()
    assert len(counts) == MAX_CLASSES + 1
    assert counts[-1] == SloCounts(OTHER, MAX_CLASSES)
