"""How a target comes to know the calibrated survival of drafts, and what it refuses."""

import pytest

from cluster.message_checks import proposal_fault
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Proposal, Request
from engine.sequences import Sequences
from router.estimates.drafter_stats import MIN_RECORDS, DrafterStats, Judgement


def test_a_target_tells_survival_once_it_knows_the_drafter() -> None:
    sequences = Sequences(ModelInfo("m", 100, 200, (99,), ""))
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=50), arrival_s=0.0)
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
