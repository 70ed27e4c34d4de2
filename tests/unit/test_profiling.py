"""Measuring a profile, for real and on a tiny model: everything is measured, nothing stays behind, serving finds it."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.embedded import EmbeddedCluster
from cluster.config import (
    CascadeOptions,
    ClusterConfig,
    Config,
    DrafterConfig,
    HiddenStateOptions,
    ModelConfig,
    ModelOptions,
    NgramOptions,
    Resources,
    StateConfig,
    SuffixOptions,
    TargetConfig,
)
from cluster.errors import InvalidField
from cluster.resolve import Inventory, Node, resolve
from cluster.state import open_store
from cluster.types import RoutingTable
from deploy.profile_command import show, surfaces
from deploy.profiling import ProfileEffort, measure_profile
from drafters.draft_timing import DrafterProbe
from drafters.ngram import NgramDrafter
from drafters.protocol import Capabilities, Demand, Draft
from engine.factory import load_target as load_native
from engine.loading import load_target, stored_profile
from engine.native import NativeTarget
from engine.pass_timing import measure_cost
from engine.target_probe import TargetProbe
from profiler.interleaved import TimingBudget
from profiler.latency import FORMS
from profiler.online_cost import OnlineCost
from profiler.profile import pool_costs, save_profile
from router.assignment import NothingLearned, PoolMember, RequestView
from router.drafter.router import Router, SlotReport
from router.plan import Span
from tests.support.dspark import write_dspark

pytestmark = pytest.mark.usefixtures("known_costs")

LEAST = ProfileEffort(TimingBudget(min_visits=2, budget_s=0.0), max_rows=64, max_batch=4)


class Ticks:
    """A stopwatch that shows the number of the measurement."""

    def __init__(self) -> None:
        self.num = 0

    def start(self) -> None:
        self.num += 1

    def stop(self) -> float:
        return float(self.num)


class Watched:
    """A target that tells which passes it was asked for while the stopwatch ran."""

    def __init__(self, target: NativeTarget, ticks: Ticks) -> None:
        self._target, self._ticks = target, ticks
        self.open, self.release, self.capacity = target.open, target.release, target.capacity
        self.check_integrity = target.check_integrity
        self.passes: list[tuple[int, list[Span]]] = []

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        self.passes.append((self._ticks.num, list(spans)))
        return self._target.execute(spans)


@pytest.fixture
def target(tiny_model_folder: Path) -> NativeTarget:
    return load_native(tiny_model_folder, dtype="float32", kv_cache_bytes=2**20, max_num_sequences=8, max_pass_tokens=64)


def test_a_pass_has_the_rows_and_the_context_that_were_asked_for(target: NativeTarget) -> None:
    ticks = Ticks()
    watched = Watched(target, ticks)
    probe = TargetProbe(watched, ticks)
    grid = probe.pass_grid()
    assert {(1, 0), (64, 0), (64, 512)} <= set(grid)
    assert (1, 512) not in grid  # one sequence cannot hold it
    for rows, context in [*grid, *grid]:
        assert probe.step(rows, context) == ticks.num
        number, spans = watched.passes[-1]
        assert number == ticks.num
        assert all(span.samples for span in spans)
        assert sum(len(span.token_ids) for span in spans) == rows
        held = sum(span.base_len - 1 for span in spans)  # the token that admits a request
        assert context - 32 * len(spans) < held <= context  # whole blocks
    num_free = target.capacity().num_free_blocks
    assert num_free == target.capacity().num_blocks
    target.check_integrity()


def test_contexts_are_computed_once(target: NativeTarget) -> None:
    ticks = Ticks()
    watched = Watched(target, ticks)
    probe = TargetProbe(watched, ticks)
    probe.step(64, 512)
    num_passes = len(watched.passes)
    probe.step(64, 512)
    assert num_passes > 2
    assert len(watched.passes) == num_passes + 2  # one of them admits


def test_a_chunk_is_computed_every_time_by_every_probe(target: NativeTarget) -> None:
    for _ in range(2):
        ticks = Ticks()
        watched = Watched(target, ticks)
        probe = TargetProbe(watched, ticks)
        assert (16, 0) in probe.prefill_grid()
        for rows, context in [(64, 0), (64, 0), (32, 128)]:
            probe.prefill(rows, context)
            (span,) = watched.passes[-1][1]
            assert (len(span.token_ids), span.base_len, span.samples) == (rows, context, False)
    target.check_integrity()


class Listening(NgramDrafter):
    """Remembers what it was asked."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.asked: list[list[int]] = []
        self.drafted: list[list[int]] = []

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = super().propose(demands)
        self.asked.append([demand.num_tokens for demand in demands])
        self.drafted.append([len(draft.token_ids) for draft in drafts])
        return drafts


def test_a_draft_is_asked_of_a_batch_that_is_in_step() -> None:
    drafter = Listening()
    probe = DrafterProbe(drafter, 1000, Ticks())
    assert probe.draft_grid(4, 5) == list(itertools.product((1, 2, 4), (1, 2, 4, 5)))
    for _ in range(150):  # longer than a text is
        probe.draft(3, 5)
        assert drafter.asked[-1] == [5, 5, 5]
        assert drafter.drafted[-1] == [5, 5, 5]  # a lookup finds its text repeated
    probe.close()
    drafter.check_integrity()


def test_catching_up_is_timed_behind_so_many_new_tokens() -> None:
    told: list[int] = []

    class Told(Listening):
        def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
            told.append(len(token_ids))
            super().extend(request_id, token_ids)

    drafter = Told()
    probe = DrafterProbe(drafter, 1000, Ticks(), max_context_len=400)
    assert [num for num, _ in probe.catch_up_grid()] == [1, 4, 16, 64]
    for num, _ in probe.catch_up_grid():
        probe.catch_up(num)
        assert told[-1] == num
        assert drafter.asked[-1] == [1]


@pytest.fixture(scope="module")
def config(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("profiling")
    blocks = HiddenStateOptions(path=str(write_dspark(folder / "blocks", tiny_model_folder)), dtype="float32")
    small = ModelOptions(model=str(tiny_model_folder), num_layers=1, dtype="float32")
    wanted = Config(
        model=ModelConfig(name=str(tiny_model_folder)),
        target=TargetConfig(device="cpu", dtype="float32", kv_cache_gb=0.05, resources=Resources(threads=1)),
        drafters=(
            DrafterConfig(name="small", options=small, max_draft_len=4),
            DrafterConfig(name="lookup", options=SuffixOptions(), max_draft_len=4),
            DrafterConfig(name="all", options=CascadeOptions(members=(NgramOptions(), blocks)), max_draft_len=4),
        ),
        cluster=ClusterConfig(state=StateConfig(folder=folder / "state")),
    )
    return resolve(wanted, Inventory((Node("here", 4.0),)))


@pytest.mark.slow
def test_what_was_measured_is_what_serving_reads(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    assert stored_profile(config) is None
    profile = measure_profile(config, LEAST)
    assert {drafter.label for drafter in profile.drafters.values()} == {"small", "lookup", "all.0-ngram", "all.1-dspark"}
    assert all(surface.fit.form in FORMS for surface in surfaces(profile).values())
    show(profile, Console(width=200))
    assert "all.1-dspark" in capsys.readouterr().out

    store = open_store(config.cluster.state, config.cluster.namespace)
    save_profile(store, profile)
    store.close()
    assert stored_profile(config) == profile
    _, _, cost = load_target(config, profile=profile)
    assert isinstance(cost, OnlineCost)
    assert cost.step_s(1, 0) == pytest.approx(profile.step.fit.at(1, 0))
    assert set(pool_costs(config, cost)) == {"small", "lookup", "all"}
    assert cost.catch_up_s("small", 16) is not None


@pytest.mark.slow
def test_serving_corrects_the_profile(config: Config) -> None:
    from cluster.sampling_params import SamplingParams
    from cluster.types import Request

    profile = measure_profile(config.model_copy(update={"drafters": ()}), LEAST)
    engine, model, cost = load_target(config, profile=profile)
    with EmbeddedCluster(engine, model, cost, {}) as cluster:
        request = Request("a", (1, 2, 3), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), arrival_s=0.0)
        (completion,) = cluster.complete([request])
    assert len(completion.token_ids) == 24
    assert any(cost.ratio(rows) != 1.0 for rows in (1, 2, 4, 8))


def test_a_target_too_small_to_be_measured_is_refused(config: Config) -> None:
    limits = {"max_pass_tokens": 2, "max_num_sequences": 2}
    small = config.model_copy(update={"target": config.target.model_copy(update=limits), "drafters": ()})
    with pytest.raises(InvalidField, match="too few points to measure"):
        measure_profile(small, LEAST)


def test_the_router_takes_measured_costs_and_keeps_the_priors_of_others() -> None:
    class Seeing(NothingLearned):
        """A policy that remembers its pool."""

        def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> dict[str, tuple[str, ...]]:
            self.costs = {member.name: member.cost for member in pool}
            return {request.request_id: () for request in requests}

    policy = Seeing()
    pool = [PoolMember("known", 4, 0.1), PoolMember("known/1", 4, 0.1), PoolMember("other", 4, 0.2)]
    table = Router(policy, pool).slot([SlotReport((), (), 0, ("known", "other"), draft_costs={"known": 0.03})])
    assert isinstance(table, RoutingTable)
    assert policy.costs == {"known": 0.03, "known/1": 0.03, "other": 0.2}


def test_a_small_cache_holds_what_is_measured(tiny_model_folder: Path) -> None:
    options = {"dtype": "float32", "max_num_sequences": 64, "max_pass_tokens": 256, "max_model_len": 64}
    target = load_native(tiny_model_folder, kv_cache_bytes=12 * 2**13, **options)
    assert target.capacity().num_blocks < 64
    assert measure_cost(target).rows[-1] >= 64
    target.check_integrity()
