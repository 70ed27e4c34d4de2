"""The benchmark of overlap: servers that differ in nothing but the rule, and ratios of their turns."""

import math

import pytest

from benchmarks.overlap import DRAFTER, RULES, ratio, with_drafter
from benchmarks.serve import local_config


def test_servers_differ_in_the_rule_of_overlap_alone() -> None:
    configs = [with_drafter(local_config("smollm2-135m"), rule) for rule in RULES.values()]
    planners = [config.planner for config in configs]
    assert [planner.overlap for planner in planners] == list(RULES.values())
    assert len({planner.model_copy(update={"overlap": "gain"}).model_dump_json() for planner in planners}) == 1
    for config in configs:
        (drafter,) = config.drafters
        assert drafter.name == DRAFTER
        assert not drafter.is_colocated


def test_a_ratio_is_the_mean_of_those_of_the_rounds() -> None:
    found = ratio([10.0, 40.0], [10.0, 10.0])
    assert found.value == pytest.approx(2.0)
    assert found.error == pytest.approx(math.log(4.0) / 2)
