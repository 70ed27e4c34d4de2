"""Compute partitions: core sets on this machine, and Green Contexts by cuda-python's bindings over a driver of our own."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine.compiling import find_compiler
from engine.cpu_setup import in_own_thread
from engine.partition import CoreSet, core_sets, usable_cores
from tests.support.compiler import needs_compiler

FAKE_DRIVER = Path(__file__).parents[1] / "support" / "libcuda.c"
SPLIT_CALLS = ("cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate")

# Divides the device once for each case, and prints the partition, or the error, and the driver's calls.
ASK = """
import json, os, sys
from pathlib import Path
from cluster.errors import OutriderError
from engine.partition import green_contexts
found, log = [], Path(os.environ["FAKE_LOG"])
for sms, failing in json.loads(sys.argv[1]):
    os.environ["FAKE_SMS"], os.environ["FAKE_FAILS"] = str(sms), failing
    log.write_text("")
    try:
        partition = green_contexts(3)
        lanes = [[s.name, *((l.num_multiprocessors, l.stream) for l in (s.target, s.drafter))] for s in partition.splits]
        made = len(log.read_text().splitlines())
        partition.close()
    except OutriderError as error:
        lanes, made = str(error), 0
    calls = [line.split() for line in log.read_text().splitlines()]
    found.append([lanes, [[name, *map(int, numbers)] for name, *numbers in calls], made])
print(json.dumps(found))
"""


def green(tmp_path: Path, *cases: tuple[int, str]) -> list[tuple[object, list[list[object]], int]]:
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed: outrider[cuda]")
    compiler = find_compiler()
    assert compiler is not None
    library = tmp_path / "libcuda.so.1"
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", str(library), str(FAKE_DRIVER), "-ldl"], check=True)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "FAKE_LOG": str(tmp_path / "log"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    asked = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(cases)], env=environment, capture_output=True, text=True, check=True
    )
    return [tuple(one) for one in json.loads(asked.stdout)]


def test_a_thread_and_its_team_compute_on_the_cores_of_their_lane() -> None:
    usable = usable_cores().cores
    lanes = [CoreSet(usable, 2), CoreSet(usable[:1], 2), CoreSet(usable[-1:], 2)]  # a team that exists moves, too

    def confined() -> list[tuple[set[int], int]]:
        others, found = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}, []
        for lane in lanes:
            lane.enter()
            torch.ones(256, 256) @ torch.ones(256, 256)
            team = set(os.listdir("/proc/self/task")) - others
            found.append((set().union(*(os.sched_getaffinity(int(thread)) for thread in team)), torch.get_num_threads()))
        return found

    before = os.sched_getaffinity(0), torch.get_num_threads()
    assert in_own_thread(confined) == [(set(lane.cores), 2) for lane in lanes]
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before, "other threads are not confined"


def test_core_sets_are_disjoint_and_prepared_for_several_shares() -> None:
    found = core_sets(3, (0, 1, 4, 5, 6, 7, 8, 9))
    assert [split.name for split in found.splits] == ["cores-4-of-8", "cores-6-of-8", "cores-7-of-8"]
    assert found.splits[1].target == CoreSet((0, 1, 4, 5, 6, 7), 3)
    assert found.splits[1].drafter == CoreSet((8, 9), 2)
    assert [split.name for split in core_sets(cores=(0, 1)).splits] == ["cores-1-of-2"]
    assert not core_sets(cores=(5,)).splits, "both need a core"


@needs_compiler
def test_green_contexts_divide_a_gpu_as_the_driver_rounds_and_end_in_order(tmp_path: Path) -> None:
    (hopper, calls, made), (small, _, _), (tiny, _, _) = green(tmp_path, (132, ""), (24, ""), (8, ""))
    assert isinstance(hopper, list)
    names, targets, drafters = zip(*hopper, strict=True)
    assert names == ("multiprocessors-72-of-132", "multiprocessors-104-of-132", "multiprocessors-120-of-132")
    assert [num for num, _ in targets] == [72, 104, 120]
    assert [num for num, _ in drafters] == [60, 28, 12]
    assert [call[0] for call in calls[:4]] == [
        "cuInit",
        "cuDeviceGet",
        "cuDeviceGetDevResource",
        "cuDevSmResourceSplitByCount",
    ]
    assert calls[1][1] == 3, "the device that was asked for"
    splits = [call for call in calls if call[0] == "cuDevSmResourceSplitByCount"]
    assert splits == [
        ["cuDevSmResourceSplitByCount", least, num, 132 - num] for least, num in ((66, 72), (99, 104), (116, 120))
    ]
    created = [call for call in calls[:made] if call[0] in SPLIT_CALLS]
    streams = []
    for description, context, stream in zip(created[::3], created[1::3], created[2::3], strict=True):
        assert [description[0], context[0], stream[0]] == list(SPLIT_CALLS)
        assert context[2] == description[1], "a context is made of the part described last"
        assert stream[2] == context[1], "a stream is made in its context"
        streams.append((stream[1], context[1]))
    assert sorted(stream for stream, _ in streams) == sorted(stream for _, stream in (*targets, *drafters))
    ended = [call[:2] for call in calls[made:]]
    expected = [[["cuStreamDestroy", stream], ["cuGreenCtxDestroy", context]] for stream, context in reversed(streams)]
    assert ended == [one for pair in expected for one in pair]
    assert [name for name, *_ in small] == ["multiprocessors-16-of-24"], (
        "equal parts and those that leave nothing are left out"
    )
    assert tiny == []


@needs_compiler
def test_a_call_that_the_driver_refuses_is_named_and_what_was_made_ends(tmp_path: Path) -> None:
    failing = ("cuInit", "cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", *SPLIT_CALLS)
    for name, (error, calls, _) in zip(failing, green(tmp_path, *((132, name) for name in failing)), strict=True):
        assert error == f"{name} failed: CUDA_ERROR_NOT_SUPPORTED; Green Contexts need a driver of CUDA 12.4 or newer"
        num = {call: sum(one[0] == call for one in calls) for call in (*failing, "cuGreenCtxDestroy", "cuStreamDestroy")}
        num[name] -= 1
        assert num["cuGreenCtxCreate"] == num["cuGreenCtxDestroy"]
        assert num["cuGreenCtxStreamCreate"] == num["cuStreamDestroy"]
