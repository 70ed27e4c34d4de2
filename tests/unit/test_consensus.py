"""What it means that drafters agree, learned from what came true."""

import random

import pytest

from drafters.consensus import Consensus

TOLD = 0.5


def served(consensus: Consensus, num_rounds: int, right_if_same: float, right_if_other: float) -> None:
    """Two witnesses, both half sure of one token; of the first it is known how often it is right."""
    rng = random.Random(0)
    for _ in range(num_rounds):
        is_same = rng.random() < 0.5
        witnesses = ((7,), (7,) if is_same else (8,))
        testimony = consensus.weigh(0, (7,), (TOLD,), witnesses)
        is_right = rng.random() < (right_if_same if is_same else right_if_other)
        consensus.record(testimony, 1, int(is_right))
        consensus.take_up()


def test_before_anything_is_known_a_draft_survives_as_it_is_told() -> None:
    consensus = Consensus(3, 2)
    testimony = consensus.weigh(2, (1, 2, 3), (0.8, 0.4, 0.1), ((1, 2), (9,)))
    assert testimony.survival == pytest.approx((0.8, 0.4, 0.1), abs=0.01)
    assert testimony.told == pytest.approx((0.8, 0.5, 0.25))
    assert consensus.weigh(0, (), (), ((), (9,))).survival == ()


def test_a_token_that_another_drafted_too_becomes_likelier_where_that_proved_true() -> None:
    consensus = Consensus(2, 2)
    served(consensus, 1500, right_if_same=0.8, right_if_other=0.2)
    (same,) = consensus.weigh(0, (7,), (TOLD,), ((7,), (7,))).survival
    (other,) = consensus.weigh(0, (7,), (TOLD,), ((7,), (8,))).survival
    assert same == pytest.approx(0.8, abs=0.07)
    assert other == pytest.approx(0.2, abs=0.07)


def test_where_agreement_means_nothing_nothing_changes() -> None:
    consensus = Consensus(2, 2)
    served(consensus, 1500, right_if_same=TOLD, right_if_other=TOLD)
    for other in (7, 8):
        (survival,) = consensus.weigh(0, (7,), (TOLD,), ((7,), (other,))).survival
        assert survival == pytest.approx(TOLD, abs=0.07)


def test_each_token_is_compared_as_far_as_the_drafts_agreed_before_it() -> None:
    consensus = Consensus(3, 2)

    def cases(drafted: tuple[int, ...], *witnesses: tuple[int, ...]) -> tuple[int, ...]:
        return consensus.weigh(2, drafted, (0.5,) * len(drafted), witnesses).cases

    alone = cases((1, 2, 3), (), ())
    same = cases((1, 2, 3), (1, 2, 3), ())
    parted = cases((1, 2, 3), (1, 9, 3), ())
    short = cases((1, 2, 3), (1,), ())
    assert alone[1] == alone[2] != alone[0], "a first token is not like later ones"
    assert len({alone[1], same[1], parted[1]}) == 3
    assert parted[0] == same[0] == short[0]
    assert parted[2] == short[2] == alone[2], "behind another token, or its end, a witness says nothing"


def test_a_witness_is_not_its_own() -> None:
    consensus = Consensus(2, 2)
    assert consensus.weigh(0, (5,), (0.5,), ((5,), ())).cases == consensus.weigh(0, (5,), (0.5,), ((), ())).cases


def test_only_so_many_are_witnesses() -> None:
    consensus = Consensus(9, 9)
    many = tuple((token_id,) for token_id in range(9))
    assert (
        consensus.weigh(8, (8,), (0.5,), many).cases
        == consensus.weigh(8, (8,), (0.5,), many[: consensus.num_witnesses]).cases
    )


def test_tokens_that_were_not_verified_teach_nothing() -> None:
    taught, untaught = Consensus(2, 2), Consensus(2, 2)
    for _ in range(400):
        witnesses = ((1, 2), (1, 2))
        taught.record(taught.weigh(0, (1, 2), (0.5, 0.25), witnesses), 1, 1)
        untaught.record(untaught.weigh(0, (1, 2), (0.5, 0.25), witnesses), 0, 0)
        taught.take_up()
        untaught.take_up()
    first, second = taught.weigh(0, (1, 2), (0.5, 0.25), ((1, 2), (1, 2))).survival
    assert first > 0.8
    assert second / first == pytest.approx(0.5, abs=0.01)
    assert untaught.weigh(0, (1,), (0.5,), ((1,), (1,))).survival == pytest.approx((0.5,), abs=0.01)
