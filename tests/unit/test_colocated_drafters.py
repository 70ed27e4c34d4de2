"""Any drafter in the target's process: when it is queried, on which thread it drafts, and what its failure costs."""

import itertools
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from actors import colocated_drafters
from benchmarks.embedded import EmbeddedCluster, PoolEntry
from cluster.config import CascadeOptions, DrafterConfig, ModelOptions, NgramOptions
from cluster.errors import InvalidField, OutriderError
from cluster.sampling_params import SamplingParams
from cluster.types import Commit
from drafters.hidden_states.host import Host
from drafters.protocol import Capabilities, Demand, Draft
from drafters.registry import make_drafter
from engine.colocated import ColocatedDrafters
from engine.forward import CausalModel
from engine.partition import Partition, Split, usable_cores
from router.cost_model import TableCost
from router.drafting.partition_choice import PartitionChoice
from router.plan import Span
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.colocated import COST, engine_of, outputs, plain_outputs, requests, write_target
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("known_costs")

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return plain_outputs(target)


class _Wrong:
    """Drafts what the target never says."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.num_asked = 0
        self.lengths: dict[str, int] = {}

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.lengths[request_id] = len(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.lengths[request_id] += len(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.num_asked += 1
        return [Draft(demand.request_id, (0,) * demand.num_tokens, (0.5,) * demand.num_tokens) for demand in demands]

    def release(self, request_id: str) -> None:
        self.lengths.pop(request_id, None)

    def check_integrity(self) -> None: ...


@pytest.mark.slow
def test_one_whose_gain_is_below_its_time_is_hardly_queried_and_catches_up_later(
    target: Path, plain: list[list[int]]
) -> None:
    engine, model = engine_of(target, (0, 2))
    drafter = _Wrong()
    with EmbeddedCluster(engine, model, COST, {"wrong": PoolEntry(drafter, companion=True)}) as cluster:
        for _ in range(3):
            assert outputs(cluster.complete(requests(6))) == plain
        num_rounds = cluster.loop.telemetry.num_passes
        eventually(lambda: not drafter.lengths)  # what has ended is forgotten
    assert 0 < drafter.num_asked < num_rounds / 2


@pytest.mark.slow
def test_one_that_nobody_was_with_is_queried_at_once_for_its_first_request(target: Path, plain: list[list[int]]) -> None:
    """Rounds of requests without it do not count as its trials."""
    engine, model = engine_of(target, (0, 2))
    drafter = _Wrong()
    with EmbeddedCluster(engine, model, COST, {"wrong": PoolEntry(drafter, companion=True)}) as cluster:
        for _ in range(2):
            cluster.complete([replace(request, chain=()) for request in requests(6)])
        assert not drafter.num_asked
        num_rounds = cluster.loop.telemetry.num_passes
        assert outputs(cluster.complete(requests(6, 12))) == [tokens[:12] for tokens in plain]
        num_rounds = cluster.loop.telemetry.num_passes - num_rounds
    assert drafter.num_asked >= num_rounds / 2


@pytest.mark.slow
def test_whether_prompts_wait_is_known_before_drafts_are_asked_for(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 200 tokens comes while two requests decode, and is computed in chunks of 24: in about seven passes as
    many of its tokens are left as were computed, or more."""
    engine, model = engine_of(target, (0, 2))
    told: list[bool] = []
    charged: list[bool] = []
    decodes, comes = threading.Event(), threading.Event()
    choose, note_pass = ColocatedDrafters.choose, ColocatedDrafters.note_pass

    def choosing(self: ColocatedDrafters, *args: Any, prompts_wait: bool, **others: Any) -> None:
        told.append(prompts_wait)
        choose(self, *args, prompts_wait=prompts_wait, **others)
        decodes.set()
        assert comes.wait(DEADLINE_S)

    def noting(self: ColocatedDrafters, *args: Any) -> None:
        charged.append(args[-1] > 0)
        note_pass(self, *args)

    monkeypatch.setattr(ColocatedDrafters, "choose", choosing)
    monkeypatch.setattr(ColocatedDrafters, "note_pass", noting)
    planner = StepPlanner(PlannerSettings(max_chunk_len=24))
    with EmbeddedCluster(engine, model, COST, {"wrong": PoolEntry(_Wrong(), companion=True)}, planner) as cluster:
        streams = threading.Thread(target=cluster.complete, args=(requests(2, max_tokens=220),))
        streams.start()
        assert decodes.wait(DEADLINE_S)
        long = threading.Thread(
            target=cluster.complete, args=([replace(requests(1)[0], id="long", prompt_token_ids=tuple(range(200)))],)
        )
        long.start()
        comes.set()
        for thread in (long, streams):
            thread.join(DEADLINE_S)
    assert told == charged
    assert sum(told) in (7, 8)  # 8 was seen on a busy machine


@pytest.mark.parametrize("between", ["nothing", "a chunk", "others"])
def test_the_target_waits_for_drafts_also_if_a_pass_of_others_comes_before(between: str) -> None:
    """Drafts take 6 ms and save 5: a quarter of a pass, with no cost for rows. ``between``: a pass begins meanwhile, of a
    prompt's chunk or of requests without the drafter, which are sampled."""
    drafters, now_s, num_asked = ColocatedDrafters(("d",), TableCost((1, 64), (0.02, 0.02))), 0.0, 0
    is_queried = False
    for _ in range(2000):
        was_queried = is_queried
        drafters.choose(4, 0, {"d"}, prompts_wait=False, num_missed=lambda _: 0)
        if was_queried:
            drafters.note_pass([Commit("r", 3, (5, 6), 1, 1, "d")], 4, 0, 0)
        is_queried = drafters.is_queried("d")
        num_asked += is_queried
        if between != "nothing" and is_queried:
            drafters.note_plan({"d"}, True, now_s)
        if between == "others" and is_queried:
            drafters.choose(4, 0, set(), prompts_wait=False, num_missed=lambda _: 0)
        if is_queried:
            drafters.note_plan({"d"}, False, now_s)
            now_s += 0.006
        drafters.note_plan((), True, now_s)
        now_s += 0.02
    assert 0 < num_asked < 500


class _DuringPasses(_Wrong):
    """Drafts only while a pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.pass_runs, self.has_drafted = threading.Event(), threading.Event()

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        if self.pass_runs.wait(DEADLINE_S):
            self.has_drafted.set()
        return super().propose(demands)


def test_a_companion_in_a_lane_drafts_while_a_pass_runs(
    target: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = engine_of(target, ())
    drafter, execute, num_passes = _DuringPasses(), engine.execute, itertools.count()

    def executed(spans: Sequence[Span]) -> Sequence[Span]:
        drafter.pass_runs.set()
        if next(num_passes) == 3:  # drafts have been asked for since the first
            assert drafter.has_drafted.wait(DEADLINE_S)
        outcomes = execute(spans)
        drafter.pass_runs.clear()
        return outcomes

    monkeypatch.setattr(engine, "execute", executed)
    planner = StepPlanner(PlannerSettings(max_hold_s=0.0))
    pool, cores = {"slow": PoolEntry(drafter, companion=True)}, usable_cores()
    divided = Partition(cores, [Split("halves", cores, cores)]), PartitionChoice({"halves": None}, {})
    with EmbeddedCluster(engine, model, COST, pool, planner, divided=divided) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain


class _Failing:
    """Drafts once, then fails."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.num_asked = 0

    def open(self, *_: object) -> None: ...

    def extend(self, *_: object) -> None: ...

    def release(self, *_: object) -> None: ...

    def check_integrity(self) -> None: ...

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.num_asked += 1
        if self.num_asked > 3:
            raise FloatingPointError("the drafter is broken")
        return [Draft(demand.request_id, (1,), (0.5,)) for demand in demands]


def test_a_companion_that_fails_is_left_out_and_the_target_serves_on(
    target: Path, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine, model = engine_of(target, ())
    failing = _Failing()
    with EmbeddedCluster(engine, model, COST, {"broken": PoolEntry(failing, companion=True)}) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
        assert failing.num_asked == 4
        eventually(lambda: cluster.loop.status().followed == ())
    assert "drafter broken failed" in caplog.text


class _NotesThreads(_Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.threads.add(threading.current_thread().name)
        return super().propose(demands)


def test_a_companion_without_a_lane_drafts_on_the_target_s_thread(target: Path, plain: list[list[int]]) -> None:
    """On cores that both use, a thread of its own would slow both."""
    engine, model = engine_of(target, ())
    drafter = _NotesThreads()
    with EmbeddedCluster(engine, model, COST, {"one": PoolEntry(drafter, companion=True)}) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
    assert len(drafter.threads) == 1
    assert "target" in drafter.threads.pop()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_lane_is_warmed_up_before_the_loop_runs(device: str) -> None:
    """Each on a thread of its own, in the lane until all that was launched is computed."""
    did: list[tuple[str, int]] = []

    class Named:
        def __init__(self, name: str) -> None:
            self._name = name

        def enter(self, *_: object) -> None:
            did.append((self._name, threading.get_ident()))

    splits = [Split(name, Named(f"target of {name}"), Named(name)) for name in ("half", "most")]
    colocated = [SimpleNamespace(warm_ups=[Named("eagle3").enter, Named("dspark").enter]), SimpleNamespace(warm_ups=[])]
    loop = SimpleNamespace(divide=lambda *_: did.append(("divided", threading.get_ident())))
    engine: Any = SimpleNamespace(capacity=lambda: SimpleNamespace(prepared_rows=()))
    config: Any = SimpleNamespace(target=SimpleNamespace(partition="on", device=device), drafters=())
    with (
        mock.patch.object(colocated_drafters, "prepare_partition", return_value=Partition(usable_cores(), splits)),
        mock.patch.object(colocated_drafters, "stored_profile", return_value=None),
        mock.patch.object(colocated_drafters, "warm_up", Named("passes").enter),
    ):
        colocated_drafters.divide(config, loop, engine, None, colocated)  # type: ignore[arg-type]
    expected = list[str]()
    for name in ("half", "most"):
        expected += [name, "eagle3", "dspark", name]
        expected += [f"target of {name}", "passes", f"target of {name}"] * (device == "cuda")
    assert [name for name, _ in did] == [*expected, "divided"]
    assert {thread for _, thread in did[:-1]}.isdisjoint({threading.get_ident()})


@pytest.mark.parametrize("failure", [OutriderError("no CUDA graph"), RuntimeError("out of memory")])
@pytest.mark.parametrize("partition", ["auto", "on"])
def test_a_lane_that_cannot_be_warmed_up_leaves_the_device_undivided(
    partition: str, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []
    lanes = Partition(usable_cores(), [Split("half", usable_cores(), usable_cores())], lambda: closed.append("closed"))
    colocated = [SimpleNamespace(warm_ups=[mock.Mock(side_effect=failure)])]
    config: Any = SimpleNamespace(target=SimpleNamespace(partition=partition, device="cpu"), drafters=())
    loop: Any = mock.Mock()
    fails = partition == "on"
    with (
        mock.patch.object(colocated_drafters, "prepare_partition", return_value=lanes),
        mock.patch.object(colocated_drafters, "stored_profile"),
        pytest.raises(InvalidField, match=f"target.partition.*{failure}") if fails else nullcontext(),
    ):
        colocated_drafters.divide(config, loop, mock.Mock(), mock.Mock(), colocated)  # type: ignore[arg-type]
    assert closed == ["closed"]
    assert not loop.divide.called
    assert (str(failure) in caplog.text) != fails


def test_members_with_a_model_are_warmed_up_in_lanes(target: Path) -> None:
    engine, model = engine_of(target, ())
    host, options = Host(engine, target), ModelOptions(model=str(target))
    drafter = DrafterConfig(name="d", device="cpu", options=CascadeOptions(members=(NgramOptions(), options)))
    with mock.patch.object(CausalModel, "warm_up") as warm_up:
        make_drafter(drafter, model, host)
        assert warm_up.call_count == 1
        (again,) = host.warm_ups
        again()
        assert warm_up.call_args_list[0] == warm_up.call_args_list[1]
