"""The choice of a compute partition."""

import pytest

from router.partitions import WHOLE, PartitionChoice, PartTimes, round_s

TIMES = {WHOLE: PartTimes(0.010, 0.010), "half": PartTimes(0.012, 0.011), "quarter": PartTimes(0.011, 0.030)}


def test_parts_pay_by_the_share_of_rounds_that_they_overlap() -> None:
    assert round_s(TIMES["half"], 1.0) == pytest.approx(0.012)
    assert round_s(TIMES["half"], 0.5) == pytest.approx(0.0175)
    choice = PartitionChoice(patience=1)
    assert choice.choose(TIMES, 0.0) == WHOLE, "drafts that nobody overlaps are best on the whole device"
    assert choice.choose(TIMES, 0.9) == "half"
    assert choice.choose(TIMES, 0.0) == WHOLE


def test_a_partition_is_kept_through_noise_and_changed_when_another_stays_better() -> None:
    choice = PartitionChoice(margin=0.05, patience=4)
    for share in (0.9, 0.9, 0.9, 0.0) * 5:
        assert choice.choose(TIMES, share) == WHOLE, "three in a row are too few"
    found = [choice.choose(TIMES, 0.9) for _ in range(4)]
    assert found == [WHOLE, WHOLE, WHOLE, "half"]
    near = {WHOLE: PartTimes(0.010, 0.002), "half": PartTimes(0.0115, 0.003)}
    assert {choice.choose(near, 1.0) for _ in range(20)} == {"half"}


def test_a_partition_that_is_not_offered_any_more_is_left_at_once() -> None:
    choice = PartitionChoice(patience=1)
    choice.choose(TIMES, 1.0)
    assert choice.current == "half"
    assert choice.choose({WHOLE: TIMES[WHOLE]}, 1.0) == WHOLE
