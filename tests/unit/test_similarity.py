"""What a chain scheduler learns of a pool: who agrees with whom, how long passes take, and how deep chains may be."""

import itertools
from dataclasses import replace
from math import exp

import pytest
import torch

from cluster.messages import LevelReport, Verified
from drafters.similarity import EAGER_ROUNDS, PERIOD, SampledRounds, overlaps
from router.assignment import MemberCosts, PoolMember
from router.cost_model import monotone
from router.papers.specrouter_estimates import (
    ChainLenLimits,
    PassTimeFactors,
    Similarities,
    prior_agreement,
    profiled_passes,
)


def test_two_that_were_never_seen_together_are_as_alike_as_the_worse_is_good() -> None:
    assert prior_agreement((0.5, 0.9), (0.8, 0.7)) == (0.5, 0.7)


def test_agreement_and_fill_are_means_with_eight_drafts_of_the_prior() -> None:
    known = Similarities(memory=100)
    assert (known.rates("a", "b", (0.5,)), known.fill("a", "b", 0.75)) == ((0.5,), 0.75)
    known.observe("b", Verified("a", (50, 45), (45, 9), num_asked=40, num_proposed=8))
    assert known.rates("b", "a", (0.5,)) == (0.5,), "the other way round is another pair"
    assert known.rates("a", "b", (0.5,)) == pytest.approx(((45 + 4) / 58, (9 + 4) / 53))
    assert known.fill("a", "b", 0.75) == pytest.approx((8 + 24) / (40 + 32)), "each of four tokens"
    known.observe("b", Verified("a", (), (), num_asked=8, num_proposed=8))
    assert known.fill("a", "b", 0.75) == pytest.approx((16 + 24) / (48 + 32)), "nothing fades without a draft"
    known.observe("b", Verified("a", (100,), (0,), num_asked=4, num_proposed=4))
    assert known.fill("a", "b", 0.75) == pytest.approx((16 / exp(1) + 4 + 24) / (48 / exp(1) + 4 + 32))


def test_what_distributions_have_in_common_is_one_minus_their_total_variation() -> None:
    """(5): 1/2 (|0.5 - 0.4| + |0.3 - 0.1| + |0.2 - 0.5|) = 0.3. A token beyond the other vocabulary is never in common."""
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.4, 0.1, 0.5, 0.0], [0.0, 0.25, 0.25, 0.5]])
    assert overlaps(p, q).tolist() == pytest.approx([0.7, 0.0])
    assert overlaps(q, p).tolist() == pytest.approx([0.7, 0.0])
    assert overlaps(q[:1], torch.tensor([[0.1, 0.1, 0.1, 0.7]])).tolist() == pytest.approx([0.3])


def test_another_request_of_every_early_round_is_compared_and_later_of_few() -> None:
    sampled = SampledRounds()
    assert [sampled.next(4) for _ in range(EAGER_ROUNDS)] == [1, 2, 3, 0] * (EAGER_ROUNDS // 4)
    later = [sampled.next(4) for _ in range(4 * PERIOD - EAGER_ROUNDS)]
    assert [index for index in later if index is not None] == [1, 2, 3]


def test_distributions_say_how_often_tokens_agree_until_many_are_counted() -> None:
    """(6): SimScore is 1 less the mean total variation. Agreement lies between s / (2 - s) and s: at 0.5 in the middle of
    1/3 and 1/2, at 0.8 of 2/3 and 4/5."""
    known = Similarities(memory=1e12)
    assert known.score("a", "b") is None
    known.observe("b", Verified("a", (), (), num_compared=4, overlap=1.6))
    known.observe("b", Verified("a", (), (), num_compared=4, overlap=2.4))
    assert known.score("a", "b") == pytest.approx(0.5)
    assert known.score("b", "a") is None
    assert known.rates("a", "b", (0.9, 0.9)) == pytest.approx((5 / 12,))
    known.observe("b", Verified("a", (84,), (84,)))  # all agree: tokens agree more than distributions say
    off = (84 + 128) / (84 * 5 / 12 + 128)
    assert known.rates("a", "b", (0.9,)) == pytest.approx(((84 + 16 * off * 5 / 12) / 100,))
    known.observe("c", Verified("a", (), (), num_compared=50, overlap=40.0))
    assert known.rates("a", "c", (0.1,)) == pytest.approx((off * (2 / 3 + 0.8) / 2,)), "of another pair, as far off"
    assert known.rates("a", "d", (0.1,)) == (0.1,), "its distributions are not known"
    known.observe("c", Verified("a", (64,), (0,)))
    off = (84 + 128) / (84 * 5 / 12 + 64 * (2 / 3 + 0.8) / 2 + 128)
    expected = 32 * off * (2 / 3 + 0.8) / 2 / 96
    assert known.rates("a", "c", (0.1,)) == pytest.approx((expected,)), "fifty tokens count as 32 drafts"


def test_a_pass_takes_a_token_s_share_of_a_profiled_draft_or_of_the_target_s_pass() -> None:
    target, profiled = monotone(((1, 0.02), (9, 0.04))), MemberCosts(((1, 0.008), (5, 0.016)))
    drafter = PoolMember("a", 8, 0.25, max_draft_len=4)
    for costs in (None, MemberCosts(())):
        assert profiled_passes(replace(drafter, costs=costs), target).at(9) == pytest.approx(0.01)
    assert profiled_passes(replace(drafter, costs=profiled), target).step_s_at == pytest.approx((0.002, 0.004))


def test_a_pair_is_known_once_verified_drafts_outweigh_the_guess() -> None:
    known = Similarities(memory=1e12)
    assert not known.is_known("a", "b")
    known.observe("b", Verified("a", (127,), (5,)))
    assert not known.is_known("a", "b")
    known.observe("b", Verified("a", (2,), (0,)))
    assert known.is_known("a", "b")
    assert not known.is_known("b", "a")


def test_passes_that_take_longer_than_the_profile_says_are_followed() -> None:
    paces = PassTimeFactors(weight=0.2)
    assert paces.factor("a", 2) == 1.0
    paces.observe(LevelReport("a", 10, 20, 0.2, 0), expected_s=0.01)
    assert paces.factor("a", 2) == pytest.approx(2.0)  # nothing was known before
    factors = []
    for _ in range(30):
        paces.observe(LevelReport("a", 10, 20, 0.1, 0), expected_s=0.01)
        factors.append(paces.factor("a", 2))
    assert all(later <= sooner for sooner, later in itertools.pairwise(factors))
    assert factors[-1] == pytest.approx(1.0, abs=0.01)
    paces.observe(LevelReport("a", 0, 0, 0.0, 0), expected_s=0.01)
    paces.observe(LevelReport("a", 10, 20, 0.0, 0), expected_s=0.01)  # nobody took the time
    assert paces.factor("a", 2) == factors[-1]
    paces.observe(LevelReport("a", 1, 2, 150.0, 0), expected_s=0.01)
    assert paces.factor("a", 2) < 1.5, "a pause of the machine"


def test_passes_are_corrected_by_their_rows_as_those_next_to_them() -> None:
    paces, profiled = PassTimeFactors(weight=0.2), monotone(((1, 0.01), (8, 0.01), (64, 0.04)))
    paces.observe(LevelReport("a", 10, 80, 0.1, 0), expected_s=0.01)
    assert paces.corrected("a", profiled) == profiled
    paces.observe(LevelReport("a", 10, 600, 0.2, 0), expected_s=0.04)
    assert paces.corrected("a", profiled).step_s_at == pytest.approx((0.01, 0.01, 0.02))
    assert paces.corrected("b", profiled) == profiled


def test_failures_shorten_chains_down_to_the_target_alone_and_later_they_recover() -> None:
    limits = ChainLenLimits(3, recovery_slots=3)
    found = []
    for _ in range(4):
        limits.note_failure("a", 3)
        found.append(limits.of("a"))
    assert found == [2, 1, 0, 0]
    assert limits.of("b") == 3
    limits.next_slot(["a"])
    assert limits.of("a") == 0
    recovered = []
    for _ in range(10):
        limits.next_slot()
        recovered.append(limits.of("a"))
    assert recovered == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
