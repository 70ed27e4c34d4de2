"""Core sets of the benchmarks: a target and a drafter on disjoint cores."""

import os

import pytest
import torch

from benchmarks.core_sets import CoreSet, core_sets, usable_cores
from cluster.errors import InvalidField
from engine.threads import in_own_thread


def test_a_thread_computes_on_the_cores_of_its_partition() -> None:
    core = usable_cores().cores[0]

    def confined() -> tuple[set[int], int]:
        CoreSet((core,)).enter()
        torch.ones(64, 64) @ torch.ones(64, 64)
        return os.sched_getaffinity(0), torch.get_num_threads()

    before = os.sched_getaffinity(0), torch.get_num_threads()
    assert in_own_thread(confined) == ({core}, 1)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before, "other threads are not confined"


def test_core_sets_are_disjoint() -> None:
    target, drafter = core_sets(3, (0, 1, 4, 5, 6))
    assert (target.cores, drafter.cores) == ((0, 1, 4), (5, 6))
    assert target.name == "cores-0,1,4"


@pytest.mark.parametrize("num", [0, 2, 3])
def test_both_need_a_core(num: int) -> None:
    with pytest.raises(InvalidField, match="must leave the target and the drafter a core each of 2"):
        core_sets(num, (0, 1))
