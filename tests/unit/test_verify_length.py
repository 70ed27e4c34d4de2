"""Verification by calibrated survival: the best lengths, and how a target comes to know survival."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.message_checks import proposal_fault
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Proposal, Request
from engine.sequences import Sequences
from router.cost_model import TableCost
from router.estimates.drafter_stats import MIN_RECORDS, DrafterStats, Judgement
from router.plan import Capacity, DrafterView, SequenceView
from router.verify_length import VerifyContext, goodput
from router.verify_length.goodput import Goodput

CAPACITY = Capacity(
    block_len=4, num_blocks=100, num_free_blocks=100, max_num_sequences=16, max_pass_tokens=64, max_model_len=200
)
DRAFTERS = {"d": DrafterView(reply_s=0.0, accepted_per_round=1.0, acceptance=0.6)}


def view(name: str, survival: tuple[float, ...], num_drafted: int | None = None) -> SequenceView:
    return SequenceView(
        request_id=name,
        committed_len=20,
        computed_len=19,
        num_drafted=len(survival) if num_drafted is None else num_drafted,
        running=True,
        drafter="d",
        awaiting_since_s=None,
        max_new_tokens=50,
        survival=survival,
    )


def verify_goodput(batch: list[SequenceView], capacity: Capacity, cost: TableCost) -> dict[str, int]:
    return Goodput().rows(batch, VerifyContext(DRAFTERS, capacity, cost, now_s=0.0)).verify_lens


def random_survival(rng: random.Random, length: int) -> tuple[float, ...]:
    return tuple(itertools.accumulate((rng.random() for _ in range(length)), lambda a, b: a * b))


def random_cost(rng: random.Random) -> TableCost:
    """Monotone, with flat stretches and jumps."""
    steps = [rng.choice((0.0, 0.0, 0.001, 0.01)) for _ in range(12)]
    return TableCost(tuple(range(1, 13)), tuple(itertools.accumulate(steps, initial=0.02))[:12])


@pytest.mark.parametrize("seed", range(40))
def test_no_other_lengths_give_more_tokens_per_second(seed: int) -> None:
    rng = random.Random(seed)
    batch = [view(str(i), random_survival(rng, rng.randint(0, 4))) for i in range(3)]
    cost, capacity = random_cost(rng), replace(CAPACITY, max_pass_tokens=rng.choice((4, 7, 64)))

    def tokens_per_s(lengths: tuple[int, ...]) -> float:
        expected = len(batch) + sum(sum(s.survival[:length]) for s, length in zip(batch, lengths, strict=True))
        return expected / cost.step_s(len(batch) + sum(lengths), 60)

    chosen = verify_goodput(batch, capacity, cost)
    every = itertools.product(*(range(len(s.survival) + 1) for s in batch))
    allowed = [lengths for lengths in every if len(batch) + sum(lengths) <= capacity.max_pass_tokens]
    assert tokens_per_s(tuple(chosen[s.request_id] for s in batch)) == pytest.approx(max(map(tokens_per_s, allowed)))


@given(
    st.lists(st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.5001, 0.9, 0.97]), max_size=6), min_size=1, max_size=6),
    st.integers(0, 30),
)
def test_a_few_drafts_are_put_in_order_as_many_are(drawn: list[list[float]], room: int) -> None:
    batch = [view(str(i), tuple(sorted(one, reverse=True))) for i, one in enumerate(drawn)]
    cost = random_cost(random.Random(len(drawn) + room))
    capacity = replace(CAPACITY, max_pass_tokens=len(batch) + room)
    few = verify_goodput(batch, capacity, cost)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(goodput, "FEW", -1)
        assert verify_goodput(batch, capacity, cost) == few


def test_what_is_likely_to_survive_is_preferred_to_what_is_not() -> None:
    knee = TableCost((1, 8, 9, 64), (0.02, 0.02, 0.04, 0.4))
    batch = [view("sure", (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)), view("vague", (0.3, 0.1, 0.05, 0.02, 0.01, 0.005))]
    assert verify_goodput(batch, CAPACITY, knee) == {"sure": 6, "vague": 0}


def test_without_calibration_the_drafters_mean_counts() -> None:
    knee = TableCost((1, 8, 9, 64), (0.02, 0.02, 0.04, 0.4))
    batch = [view("known", (0.1, 0.01, 0.001)), view("unknown", (), num_drafted=8)]
    assert verify_goodput(batch, CAPACITY, knee) == {"known": 1, "unknown": 5}
    assert verify_goodput([], CAPACITY, knee) == {}


def test_a_target_tells_survival_once_it_knows_the_drafter() -> None:
    sequences = Sequences(ModelInfo("m", 100, 200, (99,), ""))
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=50), arrival_s=0.0)
    draft = sequences.add(request).draft
    draft.switch(("d",))
    stats = DrafterStats()

    def told() -> tuple[float, ...]:
        assert draft.offer(Proposal("r", 3, (7, 8), (0.9, 0.9), "d"))
        draft.set_survival(stats.predict_survival([(0.9, 0.9)])[0])
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
