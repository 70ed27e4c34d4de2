"""When a sequence ends, and which proposals it takes."""

from typing import Any

import numpy as np
import pytest

from cluster.message_checks import proposal_fault
from cluster.types import Commit, FinishReason, ModelInfo, Prefill, Proposal
from engine.sequences import LiveSequence, Sequences
from router.estimates.drafter_stats import MIN_RECORDS, DrafterStats, Judgement
from router.estimates.survival import SurvivalRows
from router.plan import Span
from tests.support.requests import a_request

MODEL = ModelInfo("m", vocab_size=100, max_model_len=20, eos_token_ids=(9,), tokenizer_fingerprint="f")


def start(**parameters: Any) -> tuple[Sequences, LiveSequence]:
    sequences = Sequences(MODEL)
    sequence = sequences.add(a_request(**{"max_tokens": 10, **parameters}))
    sequence.admit(2, 0.0)
    sequence.draft.switch(("d",))
    return sequences, sequence


def planned(sequences: Sequences, num_compute: int, num_drafts: int = 0) -> Span:
    span = Span("r", num_compute, num_drafts)
    sequences.bind([span])
    return span


def commit(sequences: Sequences, span: Span) -> Commit:
    return (sequences.commit(span, 1.0) or pytest.fail("nothing is committed")).committed()


def propose(base_len: int, *token_ids: int, drafter: str = "d") -> Proposal:
    return Proposal("r", base_len, token_ids, (0.5,) * len(token_ids), drafter)


def test_prefill_is_measured_from_the_first_admission() -> None:
    """A preemption before the first token adds to the prefill, and what it finds in the cache then is not the caller's."""
    sequences = Sequences(MODEL)
    sequence = sequences.add(a_request(max_tokens=10), now_s=5.0)
    sequence.admit(1, 5.25)
    assert (sequence.computed_len, sequence.running) == (1, True)
    sequence.computed_len, sequence.running = 0, False
    sequence.admit(2, 6.0)
    assert (sequence.computed_len, sequence.running) == (2, True)
    assert sequence.prefill(7.0) == Prefill(num_cached_tokens=1, queue_s=0.25, prefill_s=1.75)


def test_a_pass_commits_what_was_accepted_and_the_bonus_token() -> None:
    sequences, sequence = start()
    sequence.draft.offer(propose(3, 5, 6, 7))
    span = planned(sequences, 1, 3)
    assert (span.base_len, span.token_ids, span.num_drafts, span.samples) == (2, (3, 5, 6, 7), 3, True)
    span.chosen, span.num_accepted = (5, 6, 8), 2
    made = commit(sequences, span)
    assert (made.base_len, made.token_ids, made.num_proposed, made.num_accepted) == (3, (5, 6, 8), 3, 2)
    assert (sequence.computed_len, len(sequence.token_ids), sequence.draft.proposal) == (5, 6, None)


def test_a_chunk_that_does_not_reach_the_end_commits_nothing() -> None:
    sequences, sequence = start()
    sequence.computed_len = 0
    sequence.draft.offer(propose(3, 5))
    span = planned(sequences, 2)
    assert (span.token_ids, span.samples, span.num_drafts) == ((1, 2), False, 0)
    assert sequences.commit(span, 1.0) is None
    assert sequence.computed_len == 2
    assert sequence.draft.proposal is not None


@pytest.mark.parametrize(
    ("parameters", "token_ids", "committed", "finish"),
    [
        ({}, (5, 9, 6), (5, 9), FinishReason.STOP),
        ({"ignore_eos": True}, (5, 9, 6), (5, 9, 6), None),
        ({"stop_token_ids": (6,)}, (5, 6, 9), (5, 6), FinishReason.STOP),
        ({"ignore_eos": True, "stop_token_ids": (9,)}, (5, 9, 6), (5, 9), FinishReason.STOP),
        ({"max_tokens": 2}, (5, 6, 7), (5, 6), FinishReason.LENGTH),
        ({"max_tokens": 2}, (5, 9, 7), (5, 9), FinishReason.STOP),
        ({"max_tokens": 1}, (9,), (9,), FinishReason.STOP),
        ({"max_tokens": 19}, tuple(range(10, 30)), tuple(range(10, 27)), FinishReason.LENGTH),  # the context is full
    ],
)
def test_what_lies_beyond_the_end_is_cut_off(
    parameters: dict[str, object], token_ids: tuple[int, ...], committed: tuple[int, ...], finish: FinishReason | None
) -> None:
    sequences, sequence = start(**parameters)
    sequence.draft.offer(propose(3, *token_ids[:-1]))
    span = planned(sequences, 1, len(token_ids) - 1)
    span.chosen, span.num_accepted = token_ids, len(token_ids) - 1
    made = commit(sequences, span)
    assert (made.token_ids, made.finish, sequence.finish) == (committed, finish, finish)
    assert made.num_accepted == min(len(token_ids) - 1, len(committed))


def test_a_failed_span_ends_with_its_reason() -> None:
    sequences, _ = start()
    span = planned(sequences, 1)
    span.error = "no number among the logits"
    made = commit(sequences, span)
    assert (made.finish, made.error, made.token_ids) == (FinishReason.ERROR, "no number among the logits", ())


# ---- how a target comes to know the calibrated survival of drafts, and what it refuses


def test_a_target_tells_survival_once_it_knows_the_drafter() -> None:
    sequences = Sequences(ModelInfo("m", 100, 200, (99,), ""))
    request = a_request(max_tokens=50)
    draft = sequences.add(request).draft
    draft.switch(("d",))
    stats = DrafterStats()

    def told() -> tuple[float, ...]:
        assert draft.offer(Proposal("r", 3, (7, 8), (0.9, 0.9), "d"))
        draft.set_survival(() if (known := stats.known_calibration) is None else known.of_few((0.9, 0.9)))
        return sequences.views()[0].survival

    assert told() == ()
    for _ in range(4 * MIN_RECORDS):
        stats.judged(Judgement("d", (0.9,), 0), num_verified=1)
    boasted = told()
    assert len(boasted) == 2
    assert boasted[0] < 0.1, "it says 0.9 and is never right"
    draft.judge((1,))
    assert sequences.views()[0].survival == ()


@pytest.mark.parametrize("confidence", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_confidence_that_is_no_probability_is_refused_on_receipt(confidence: float) -> None:
    assert proposal_fault(Proposal("r", 3, (7,), (0.5,), "d"), vocab_size=100) is None
    assert proposal_fault(Proposal("r", 3, (7,), (confidence,), "d"), vocab_size=100) is not None


def decoding(num_tokens: list[int]) -> tuple[Sequences, list[LiveSequence]]:
    """A request for each, with so many draft tokens at hand; of those, rows of what was predicted together."""
    sequences, rates = Sequences(MODEL), np.linspace(0.9, 0.3, max(num_tokens))
    rows = SurvivalRows(np.tile(np.cumprod(rates), (len(num_tokens), 1)))
    for i, num in enumerate(num_tokens):
        one = sequences.add(a_request(f"r{i}", (1, 2, 3), max_tokens=3 + 4 * (i % 2)))
        one.admit(2, 0.0)
        one.draft.switch(("d",))
        if num:
            one.draft.offer(Proposal(f"r{i}", 3, (5,) * num, (0.5,) * num, "d"))
            one.draft.set_survival_row(rows, i)
    return sequences, list(sequences)


@pytest.mark.parametrize("longest", [4, 9])
def test_drafts_at_hand_are_those_of_the_views(longest: int) -> None:
    """Whatever was predicted apart or is left of a longer draft, however long it is, and wherever a request ends."""
    sequences, live = decoding([4, 0, 1, 3, 4, 4])
    live[3].draft.set_survival((0.7, 0.6, 0.5))
    live[4].token_ids.append(5)
    live[4].computed_len += 1
    live[4].draft.judge((5,))
    live[5].draft.offer(Proposal("r5", 3, (5,) * longest, (0.5,) * longest, "d"))
    live[5].draft.set_survival_row(SurvivalRows(np.full((2, longest), 0.25)), 1)
    found = sequences.drafts_at_hand(64)
    assert found is not None
    assert [len(view.survival) for view in sequences.views()] == [4, 0, 1, 3, 3, longest]
    for view, request_id, num, row in zip(sequences.views(), found.request_ids, found.lens, found.survival, strict=True):
        assert (request_id, num) == (view.request_id, min(view.num_drafted, view.max_new_tokens - 1))
        assert tuple(row[:num]) == view.survival[:num]
        assert set(row[num:]) <= {-1.0}
    shortened = sequences.drafts_at_hand(2)
    assert shortened is not None
    assert max(shortened.lens) == 2


@pytest.mark.parametrize("change", ["awaits", "prompt", "preempted", "unknown"])
def test_drafts_are_not_at_hand_where_a_request_does_more_than_decode(change: str) -> None:
    sequences, live = decoding([2, 2])
    assert sequences.drafts_at_hand(64) is not None
    if change == "awaits":
        live[1].draft.expect(0.0, is_queried=True)
    elif change == "prompt":
        live[1].computed_len = 1
    elif change == "preempted":
        live[1].preempt()
    else:
        live[1].draft.set_survival(())
    assert sequences.drafts_at_hand(64) is None
    live[1].awaits_grammar, live[1].running = True, False
    found = sequences.drafts_at_hand(64)
    assert found is not None
    assert found.request_ids == ["r0"], "who waits for a grammar is not planned"
