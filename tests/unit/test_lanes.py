"""Lanes: which partition is taken, and that what one lane writes is read by another in order."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks.embedded import EmbeddedCluster, PoolEntry
from cluster.config import HiddenStateOptions
from drafters.hidden_states.host import Host, make_hidden_state_drafter
from engine import hidden_states
from engine.colocated import END_DEADLINE_S, PAUSE_S, ColocatedDrafters, InlineDrafters
from engine.lanes import Lanes
from engine.partition import Partition, Split, core_sets
from engine.sequences import Sequences
from profiler.online_cost import OnlineCost
from router.cost_model import CostModel, TableCost
from router.drafting.partition_choice import WHOLE, PartitionChoice
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.colocated import engine_of, outputs, plain_outputs, requests, write_target
from tests.support.dspark import write_dspark
from tests.support.waiting import no_more_threads

DSPARK = "dspark"
COST = TableCost((1, 32), (0.02, 0.03))


@dataclass(frozen=True)
class Times(TableCost):
    drafts_s: float = 0.0

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float:  # type: ignore[override]
        return self.drafts_s


def times(pass_s: float, drafts_s: float) -> Times:
    """Of a pass of one row, twice as long for 64, and of drafts."""
    return Times((1, 64), (pass_s, 2.0 * pass_s), drafts_s=drafts_s)


def chosen(batch: int, **costs: CostModel) -> list[str]:
    choice = PartitionChoice({name.removeprefix("whole"): cost for name, cost in costs.items()}, {DSPARK: 3})
    return [choice.choose(batch, lambda: 100) for _ in range(40)]


def test_parts_are_taken_where_a_round_in_halves_is_shorter_and_not_at_once() -> None:
    """On the whole device a pass of 16 rows and its drafts take 22.4; in parts two passes of half the requests 14.4."""
    whole, quick, slow = times(10.0, 10.0), times(6.5, 6.5), times(20.0, 1.0)
    found = chosen(4, whole=whole, half=quick, slow=slow)
    assert found == [WHOLE] * 15 + ["half"] * 25
    assert set(chosen(4, whole=whole, slow=slow)) == {WHOLE}
    assert set(chosen(1, whole=times(10.0, 10.0), half=times(9.9, 9.9))) == {WHOLE}, "one request: nothing to overlap"


def test_the_partition_returns_to_turns_when_requests_end() -> None:
    choice = PartitionChoice({WHOLE: times(10.0, 10.0), "half": times(11.0, 4.0)}, {DSPARK: 3})
    assert [choice.choose(8, lambda: 0) for _ in range(20)][-1] == "half"
    assert choice.choose(0, lambda: 0) == "half", "an idle target changes nothing"
    costs = PartitionChoice({WHOLE: times(10.0, 10.0), "half": times(30.0, 4.0)}, {DSPARK: 3}).costs
    choice.costs = costs
    assert [choice.choose(1, lambda: 0) for _ in range(20)][-1] == WHOLE


def test_costs_of_another_partition_replace_those_before() -> None:
    cost = OnlineCost(COST)
    for _ in range(50):
        cost.observe(1, 0, 0.04)
    assert cost.step_s(1, 0) == pytest.approx(0.04, rel=0.05)
    cost.rebase(TableCost((1, 32), (0.05, 0.06)))
    assert cost.step_s(1, 0) == pytest.approx(0.05)
    assert cost.ratio(1) == 1.0


class Recorder:
    """A device whose lanes are threads: what one of them launches is ordered after another's by events alone.

    ``unordered``: accesses to a slot of the hidden states that nothing orders after an earlier write, or read, of it."""

    def __init__(self) -> None:
        self.unordered: list[str] = []
        self.num_foreign = 0  # reads of what another lane has written
        self._lock = threading.Lock()
        self._clocks: dict[int, Counter[int]] = {}  # of each lane: how far of every lane it is ordered after
        self._finished: Counter[int] = Counter()
        self._writes: dict[int, tuple[int, int]] = {}  # slot -> lane, time
        self._reads: dict[int, dict[int, int]] = {}

    def mark(self, _: object) -> Counter[int]:
        with self._lock:
            return self._tick()[1].copy()

    def wait(self, event: Counter[int] | None) -> None:
        with self._lock:
            self._tick()[1].update(event - self._tick()[1] if event is not None else {})

    def enter(self) -> None:
        """As of a ``Lane``."""
        with self._lock:
            clock = self._tick()[1]
            self._finished |= clock
            clock |= self._finished

    def write(self, slots: list[int]) -> None:
        with self._lock:
            lane, clock = self._tick()
            for slot in slots:
                for other, time in (self._writes.get(slot, (lane, 0)), *self._reads.pop(slot, {}).items()):
                    self._check(clock, other, time, "write")
                self._writes[slot] = lane, clock[lane]

    def read(self, slots: list[int]) -> None:
        with self._lock:
            lane, clock = self._tick()
            for slot in slots:
                other, time = self._writes[slot]
                self.num_foreign += other != lane
                self._check(clock, other, time, "read")
                self._reads.setdefault(slot, {})[lane] = clock[lane]

    def _check(self, clock: Mapping[int, int], other: int, time: int, access: str) -> None:
        if clock[other] < time:
            self.unordered.append(access)

    def _tick(self) -> tuple[int, Counter[int]]:
        lane = threading.get_ident()
        clock = self._clocks.setdefault(lane, Counter())
        clock[lane] += 1
        return lane, clock


def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(hidden_states, "_mark", recorder.mark)
    monkeypatch.setattr(hidden_states, "_wait_for", recorder.wait)
    return recorder


class RecordedRows:
    """The rows of hidden states, whose accesses the recorder sees."""

    is_cuda = True

    def __init__(self, rows: torch.Tensor, recorder: Recorder) -> None:
        self._rows, self._recorder, self.device = rows, recorder, rows.device

    def index_copy_(self, dim: int, slots: torch.Tensor, features: torch.Tensor) -> None:
        self._recorder.write(slots.tolist())
        self._rows.index_copy_(dim, slots, features)

    def __getitem__(self, slots: torch.Tensor) -> torch.Tensor:
        self._recorder.read(slots.tolist())
        return self._rows[slots]


class Alternating:
    """Instead of a ``PartitionChoice``: another partition every few rounds."""

    costs: Mapping[str, CostModel] = {}

    def __init__(self, *names: str) -> None:
        self._names = itertools.cycle([name for name in names for _ in range(3)])

    def choose(self, batch: int, num_context: Callable[[], int]) -> str:
        return next(self._names)


def served(tmp_path: Path, partition: Partition, choice: Any, prepare: Callable[[Any], None]) -> None:
    """Six requests, with a drafter that reads hidden states, get the tokens that they get without."""
    target = write_target(tmp_path / "model")
    engine, model = engine_of(target, (0, 2))
    prepare(engine._features)
    folder = write_dspark(tmp_path / "drafter", target, anchor_input=True, anchor_input_rank=4)
    drafter = make_hidden_state_drafter(
        HiddenStateOptions(path=str(folder), dtype="float32", kv_cache_gb=0.01, min_survival=0.0),
        model,
        Host(engine, target),
    )
    pool = {DSPARK: PoolEntry(drafter, max_draft_len=6, companion=True)}
    planner = StepPlanner(PlannerSettings(verification="all", max_hold_s=60.0, max_chunk_len=24))
    precious = TableCost((1,), (6000.0,))
    with EmbeddedCluster(engine, model, precious, pool, planner, divided=(partition, choice)) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain_outputs(target)
        assert cluster.loop.telemetry.drafter(DSPARK).num_proposed > 100


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize("broken", [None, "_wait_for", "_mark"])
def test_lanes_read_hidden_states_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None) -> None:
    """The controls, without events, are seen to fail."""
    recorder = recorded(monkeypatch)
    if broken is not None:
        monkeypatch.setattr(hidden_states, broken, lambda _: None)

    def record(features: Any) -> None:
        features._rows = RecordedRows(features._rows, recorder)

    partition = Partition(recorder, [Split("a", recorder, recorder), Split("b", recorder, recorder)])
    served(tmp_path, partition, Alternating("a", WHOLE, "b"), record)
    assert recorder.num_foreign > 10
    assert bool(recorder.unordered) == (broken is not None)


def test_a_pass_waits_for_readers_on_every_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafters, each in a lane of its own: the one that read first is overtaken by no write either."""
    recorder = recorded(monkeypatch)
    cache = hidden_states.HiddenStateCache((2, 4), (0,), 1, 8, torch.float32, torch.device("cpu"))
    cache._rows = RecordedRows(torch.zeros(8, 4), recorder)  # type: ignore[assignment]
    slots = torch.arange(8)
    cache.write(slots, torch.ones(8, 4))
    with ThreadPoolExecutor(2) as lanes:
        both = threading.Barrier(2)
        reads = [lanes.submit(lambda: (both.wait(10.0), cache.read([(np.zeros(1, np.int32), 0, 8)]))) for _ in range(2)]
        wait(reads)
    cache.write(slots, torch.zeros(8, 4))
    assert recorder.num_foreign == 16
    assert recorder.unordered == []


class Hanging:
    """The loop of a drafter that ends when it is let go, not when it is told to."""

    name = DSPARK

    def __init__(self, *, fails: bool = False) -> None:
        self.begun, self.goes = threading.Event(), threading.Event()
        self._fails = fails

    def run(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        self.begun.set()
        self.goes.wait(60.0)
        if self._fails:
            raise RuntimeError("injected")

    def wake(self) -> None: ...


def test_a_drafter_added_while_a_lane_is_in_use_drafts_from_the_next_round_on() -> None:
    """Also one of the same name as one that was removed, once that has ended, and one that found no thread at first."""
    inline, lane = InlineDrafters(lambda: 0.0), Recorder()
    inline.draft_in(lane)
    former, loop = Hanging(), Hanging()
    with no_more_threads():
        inline.add(former, lambda: None)  # type: ignore[arg-type]
        assert not inline.step()
    inline.step()
    assert former.begun.wait(10.0)
    (thread, _) = inline._threads[DSPARK]
    inline.remove(DSPARK)
    inline.add(loop, lambda: None)  # type: ignore[arg-type]
    inline.step()
    assert not loop.begun.is_set()
    former.goes.set()
    thread.join(10.0)
    inline.step()
    assert loop.begun.wait(10.0)
    loop.goes.set()
    assert inline.end_threads(10.0)


def test_a_failing_thread_of_a_removed_drafter_leaves_its_successor() -> None:
    inline, lane, unlinked = InlineDrafters(lambda: 0.0), Recorder(), list[str]()
    inline.draft_in(lane)
    former, loop = Hanging(fails=True), Hanging()
    inline.add(former, lambda: unlinked.append("former"))  # type: ignore[arg-type]
    inline.step()
    assert former.begun.wait(10.0)
    (thread, _) = inline._threads[DSPARK]
    inline.remove(DSPARK)
    inline.add(loop, lambda: unlinked.append("loop"))  # type: ignore[arg-type]
    former.goes.set()
    thread.join(10.0)
    assert unlinked == ["former"]
    inline.step()
    assert loop.begun.wait(10.0)
    loop.goes.set()
    assert inline.end_threads(10.0)


def test_a_drafter_that_hangs_delays_a_change_and_no_round() -> None:
    now_s = [0.0]
    loop, unlinked = Hanging(), list[str]()
    inline = InlineDrafters(lambda: now_s[0])
    inline.add(loop, lambda: unlinked.append(DSPARK))  # type: ignore[arg-type]
    lane = Recorder()
    partition = Partition(lane, [Split("a", lane, lane)])
    names = iter(["a"])
    choice = SimpleNamespace(choose=lambda *_: next(names, WHOLE), costs={})
    lanes = Lanes(partition, choice, inline, ColocatedDrafters((), COST), COST)  # type: ignore[arg-type]
    running = cast(Sequences, SimpleNamespace(num_running=1))
    assert lanes.follow(running) == "a"
    assert loop.begun.wait(10.0)
    assert [lanes.follow(running), lanes.follow(running)] == ["a", "a"]
    for now_s[0] in (150.0, *(150.0 + PAUSE_S * i for i in range(1, round(END_DEADLINE_S / PAUSE_S)))):
        assert lanes.follow(running) == "a", "a pause of the machine does not count"
    assert not unlinked
    now_s[0] += PAUSE_S
    assert lanes.follow(running) == WHOLE
    assert unlinked == [DSPARK]
    loop.goes.set()


@pytest.mark.slow
@pytest.mark.usefixtures("known_costs")
def test_core_sets_change_no_token(tmp_path: Path) -> None:
    partition = core_sets()
    if not partition.splits:
        pytest.skip("one core cannot be divided")
    served(tmp_path, partition, Alternating(WHOLE, *(split.name for split in partition.splits)), lambda _: None)
