"""Compute partitions on a CPU."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.errors import InvalidField, OutriderError
from engine.partition import CoreSet, core_sets, green_contexts, usable_cores
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


class FakeDriver:
    """A GPU of ``num`` multiprocessors in groups of 8, as cuda-python's driver module shows it."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, num: int = 132, failing: str = "") -> None:
        self.num = num
        self.failing = failing
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return (1,) if name == self.failing else (0, *self.answer(name, *arguments))

        return call

    def answer(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        def part(num: int) -> SimpleNamespace:
            return SimpleNamespace(sm=SimpleNamespace(smCount=num))

        if name == "cuDevSmResourceSplitByCount":
            num = -(-arguments[3] // 8) * 8
            return ([part(num)], 1, part(self.num - num)) if num <= self.num else ([], 0, part(self.num))
        return {
            "cuInit": (),
            "cuDeviceGet": ("device",),
            "cuDeviceGetDevResource": (part(self.num),),
            "cuDevResourceGenerateDesc": (("description", *(one.sm.smCount for one in arguments[0])),)
            if name == "cuDevResourceGenerateDesc"
            else (),
            "cuGreenCtxCreate": (("context", *arguments[:1]),),
            "cuGreenCtxStreamCreate": (1000 + len(self.calls),),
        }[name]


def test_green_contexts_divide_the_multiprocessors_as_the_driver_rounds_them() -> None:
    driver = FakeDriver()
    target, drafter = green_contexts(100, driver=driver)
    assert (target.num_multiprocessors, drafter.num_multiprocessors) == (104, 28)
    assert target.name == "multiprocessors-104-of-132"
    assert target.stream != drafter.stream
    assert [name for name, *_ in driver.calls] == [
        "cuInit",
        "cuDeviceGet",
        "cuDeviceGetDevResource",
        "cuDevSmResourceSplitByCount",
        *["cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"] * 2,
    ]
    created = [arguments for name, *arguments in driver.calls if name == "cuGreenCtxCreate"]
    assert [description for description, *_ in created] == [("description", 104), ("description", 28)]


@pytest.mark.parametrize(("num", "message"), [(132, "a multiprocessor each of 132"), (129, "leaves no whole group")])
def test_green_contexts_refuse_a_division_that_leaves_nothing(num: int, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        green_contexts(num, driver=FakeDriver())


def test_a_call_that_the_driver_refuses_is_named() -> None:
    with pytest.raises(OutriderError, match="cuGreenCtxCreate failed with CUDA status 1"):
        green_contexts(64, driver=FakeDriver(failing="cuGreenCtxCreate"))
