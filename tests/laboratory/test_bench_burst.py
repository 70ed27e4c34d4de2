"""What the benchmark of a burst sends, and what it concludes from the answers and sizes."""

from dataclasses import replace

import pytest

from benchmarks.burst import BEGIN_S, CALM_S, TIMES, Burst, Size, _result, fixed_config, scaling_config, schedule
from benchmarks.faults import pinned
from benchmarks.load import LoadRequest, TimedAnswer
from cluster.config import Config, DrafterConfig, NgramOptions, show
from cluster.strict_yaml import parse

ASK = LoadRequest("a", (1, 2, 3), 4)
WHOLE = TimedAnswer(0.0, [0.5, 1.0], "the answer", 4, status=200)
REFUSED = TimedAnswer(0.0, error="429 too late", status=429, retry_after="2")
LOST = TimedAnswer(0.0, [0.5], "the", error="the stream broke off", is_lost=True, status=200)
SMALL, LARGE = Size(0.0, 1, 0), Size(15.0, 2, 3)


def measured(*answers: TimedAnswer, sizes: tuple[Size, ...] = (SMALL, LARGE, replace(SMALL, at_s=90.0))) -> Burst:
    return Burst([ASK] * len(answers), answers, 10.0, 70.0, sizes, 0.2, ())


def figures(burst: Burst) -> dict[str, float]:
    return dict(_result(burst, {"a": WHOLE}).figures)


def test_a_burst_has_ten_times_the_rate() -> None:
    times = [at_s for at_s, _ in schedule([ASK], 5.0, 200.0)]
    calm = sum(at_s < BEGIN_S for at_s in times) / CALM_S
    assert sum(at_s >= BEGIN_S for at_s in times) / 200.0 == pytest.approx(TIMES * 5.0, rel=0.1)
    assert calm == pytest.approx(5.0)
    assert times == sorted(times)


def test_refusals_are_not_losses() -> None:
    found = figures(measured(WHOLE, REFUSED, LOST, replace(REFUSED, retry_after=None)))
    assert (found["num_lost"], found["num_rejected"], found["num_rejected_without_retry_after"]) == (1, 2, 1)
    assert figures(measured(replace(LOST, status=503, error="503 no target")))["num_lost"] == 1


def test_only_whole_answers_must_be_the_same() -> None:
    assert figures(measured(WHOLE, REFUSED, LOST))["num_wrong_tokens"] == 0
    assert figures(measured(WHOLE, replace(WHOLE, text="another")))["num_wrong_tokens"] == 4
    assert figures(measured(replace(WHOLE, num_tokens=3)))["num_wrong_tokens"] == 4


def test_sizes_are_told_from_the_bursts_begin() -> None:
    found = figures(measured(WHOLE))
    assert (found["max_targets"], found["max_drafters"]) == (2, 3)
    assert (found["final_targets"], found["final_drafters"]) == (1, 0)
    assert (found["targets_grew_s"], found["drafters_grew_s"], found["small_again_s"]) == (5.0, 5.0, 20.0)


def test_a_size_that_never_comes_is_not_measured() -> None:
    found = figures(measured(WHOLE, sizes=(SMALL, replace(LARGE, num_drafters=0))))
    assert not {"drafters_grew_s", "small_again_s"} & found.keys()
    assert (found["final_targets"], found["max_drafters"]) == (2, 0)


def test_both_servers_have_files_that_can_be_read() -> None:
    base = pinned(Config(drafters=(DrafterConfig(name="ngram", options=NgramOptions()),)))
    scaled = parse(show(scaling_config(base)), Config, "scaled.yaml")
    assert (scaled.target.least, scaled.target.most, scaled.drafters[0].least, scaled.drafters[0].most) == (1, 2, 0, 3)
    fixed = parse(show(fixed_config(scaling_config(base))), Config, "fixed.yaml")
    assert (fixed.target.most, fixed.drafters, fixed.scaling.policy) == (1, (), "none")
