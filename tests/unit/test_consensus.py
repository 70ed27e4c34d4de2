"""Corrections by agreement, learned from verified tokens."""

import random

import pytest

from drafters.consensus import Consensus

CONFIDENCE = 0.5


def served(consensus: Consensus, num_rounds: int, right_if_same: float, right_if_other: float) -> None:
    """Two references, both half sure of one token; of the first it is known how often it is right."""
    rng = random.Random(0)
    for _ in range(num_rounds):
        is_same = rng.random() < 0.5
        references = ((7,), (7,) if is_same else (8,))
        compared = consensus.compare(0, (7,), (CONFIDENCE,), references)
        is_right = rng.random() < (right_if_same if is_same else right_if_other)
        consensus.record(compared, 1, int(is_right))
        consensus.learn_due()


def test_before_learning_survival_is_not_corrected() -> None:
    consensus = Consensus(3, 2)
    compared = consensus.compare(2, (1, 2, 3), (0.8, 0.4, 0.1), ((1, 2), (9,)))
    assert compared.survival == pytest.approx((0.8, 0.4, 0.1), abs=0.01)
    assert compared.conditional == pytest.approx((0.8, 0.5, 0.25))
    assert consensus.compare(0, (), (), ((), (9,))).survival == ()


def test_a_token_that_another_drafted_too_becomes_likelier_where_that_proved_true() -> None:
    consensus = Consensus(2, 2)
    served(consensus, 1500, right_if_same=0.8, right_if_other=0.2)
    (same,) = consensus.compare(0, (7,), (CONFIDENCE,), ((7,), (7,))).survival
    (other,) = consensus.compare(0, (7,), (CONFIDENCE,), ((7,), (8,))).survival
    assert same == pytest.approx(0.8, abs=0.07)
    assert other == pytest.approx(0.2, abs=0.07)


def test_where_agreement_means_nothing_nothing_changes() -> None:
    consensus = Consensus(2, 2)
    served(consensus, 1500, right_if_same=CONFIDENCE, right_if_other=CONFIDENCE)
    for other in (7, 8):
        (survival,) = consensus.compare(0, (7,), (CONFIDENCE,), ((7,), (other,))).survival
        assert survival == pytest.approx(CONFIDENCE, abs=0.07)


def test_each_token_is_compared_as_far_as_the_drafts_agreed_before_it() -> None:
    consensus = Consensus(3, 2)

    def cases(drafted: tuple[int, ...], *references: tuple[int, ...]) -> tuple[int, ...]:
        return consensus.compare(2, drafted, (0.5,) * len(drafted), references).cases

    alone = cases((1, 2, 3), (), ())
    same = cases((1, 2, 3), (1, 2, 3), ())
    parted = cases((1, 2, 3), (1, 9, 3), ())
    short = cases((1, 2, 3), (1,), ())
    assert alone[1] == alone[2] != alone[0], "a first token is not like later ones"
    assert len({alone[1], same[1], parted[1]}) == 3
    assert parted[0] == same[0] == short[0]
    assert parted[2] == short[2] == alone[2], "behind another token, or its end, a reference says nothing"


def test_a_witness_is_not_its_own() -> None:
    consensus = Consensus(2, 2)
    assert consensus.compare(0, (5,), (0.5,), ((5,), ())).cases == consensus.compare(0, (5,), (0.5,), ((), ())).cases


def test_only_so_many_are_witnesses() -> None:
    consensus = Consensus(9, 9)
    many = tuple((token_id,) for token_id in range(9))
    assert (
        consensus.compare(8, (8,), (0.5,), many).cases
        == consensus.compare(8, (8,), (0.5,), many[: consensus.num_references]).cases
    )


def test_tokens_that_were_not_verified_teach_nothing() -> None:
    taught, untaught = Consensus(2, 2), Consensus(2, 2)
    for _ in range(400):
        references = ((1, 2), (1, 2))
        taught.record(taught.compare(0, (1, 2), (0.5, 0.25), references), 1, 1)
        untaught.record(untaught.compare(0, (1, 2), (0.5, 0.25), references), 0, 0)
        taught.learn_due()
        untaught.learn_due()
    first, second = taught.compare(0, (1, 2), (0.5, 0.25), ((1, 2), (1, 2))).survival
    assert first > 0.8
    assert second / first == pytest.approx(0.5, abs=0.01)
    assert untaught.compare(0, (1,), (0.5,), ((1,), (1,))).survival == pytest.approx((0.5,), abs=0.01)
