"""What passes cost is measured once, and kept for the next start."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import JsonValue

from cluster.config import ClusterConfig, Config, ModelConfig, StateConfig, TargetConfig
from engine import loading
from engine.loading import CostMemory, code_version, identity_of, load_target
from engine.pass_timing import BUDGET_S, CHECK_S, is_too_steep, measure_cost
from profiler.online_cost import OnlineCost
from router.cost_model import TableCost, padded
from router.plan import Capacity, Span
from tests.support.memory_store import MemoryStateStore
from tests.support.toys import ToyTarget

pytestmark = pytest.mark.usefixtures("known_costs")

TABLE = TableCost((1, 8, 32), (0.01, 0.02, 0.05), 1e-6)
STEEP = TableCost((1, 2, 8, 32), (0.001, 0.1, 0.1, 0.1))
CONFIG = Config(target=TargetConfig(device="cpu", dtype="bfloat16"))


def test_a_kept_table_is_recalled_for_the_same_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStateStore()
    CostMemory(store, identity_of(CONFIG), "CpuOps").keep(TABLE)
    assert CostMemory(store, identity_of(CONFIG), "CpuOps").recall() == TABLE
    other = Config(target=TargetConfig(device="cpu", dtype="float32"))
    assert CostMemory(store, identity_of(other), "CpuOps").recall() is None
    monkeypatch.setattr("engine.loading.code_version", lambda: "another")
    assert CostMemory(store, identity_of(CONFIG), "CpuOps").recall() is None


def test_operators_without_kernels_have_other_costs() -> None:
    store = MemoryStateStore()
    CostMemory(store, identity_of(CONFIG), "TorchOps").keep(TABLE)
    assert CostMemory(store, identity_of(CONFIG), "CpuOps").recall() is None


def test_another_cpu_level_has_other_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStateStore()
    CostMemory(store, identity_of(CONFIG), "CpuOps").keep(TABLE)
    monkeypatch.setenv("OUTRIDER_CPU", "generic")
    assert CostMemory(store, identity_of(CONFIG), "CpuOps").recall() is None


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {"points": [], "per_context_s": 0},
        {"points": [[1, -1.0]], "per_context_s": 0.0},
        {"points": [[8, 0.1], [1, 0.1]], "per_context_s": 0.0},
        {"points": [[0, 0.1]], "per_context_s": 0.0},
        {"points": [[1, 0.1]], "per_context_s": -1.0},
    ],
)
def test_what_is_no_table_is_measured_anew(stored: JsonValue, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStateStore()
    memory = CostMemory(store, identity_of(CONFIG), "CpuOps")
    memory.keep(TABLE)
    (key,) = store.keys()
    store.put(key, stored)
    assert memory.recall() is None
    assert "measured again" in caplog.text


def config_of(model: Path, state: Path) -> Config:
    return Config(
        model=ModelConfig(name=str(model)),
        target=TargetConfig(device="cpu", dtype="float32", kv_cache_gb=0.01),
        cluster=ClusterConfig(state=StateConfig(folder=state)),
    )


def test_a_restart_only_checks(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tiny_model_folder, tmp_path)
    first = load_target(config, remembers=True)[2]
    monkeypatch.setattr(loading, "measure_cost", lambda engine: pytest.fail("it was measured before"))
    checked = []
    monkeypatch.setattr(loading, "is_too_steep", lambda cost, engine: bool(checked.append(cost)))
    again = load_target(config, remembers=True)[2]
    assert again.base == first.base
    assert checked == [first.base]


def test_costs_that_a_check_contradicts_are_measured_again(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, measured = config_of(tiny_model_folder, tmp_path), [TABLE, STEEP]
    monkeypatch.setattr(loading, "measure_cost", lambda engine: measured.pop())
    monkeypatch.setattr(loading, "is_too_steep", lambda cost, engine: cost == STEEP)
    assert load_target(config, remembers=True)[2].base == STEEP
    assert load_target(config, remembers=True)[2].base == TABLE
    assert "measured again" in caplog.text
    assert load_target(config, remembers=True)[2].base == TABLE  # it was stored


def test_a_state_folder_that_cannot_be_used_stops_no_target(
    tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_model_folder, Path("/proc/outrider"))  # nobody can write there
    assert loading.stored_profile(config) is None
    assert load_target(config, remembers=True)[2].step_s(1, 0) > 0
    assert "cannot be stored" in caplog.text


def test_the_code_version_is_a_digest_of_the_sources() -> None:
    assert code_version() == code_version()
    assert len(code_version()) == 16


class SlowTarget(ToyTarget):
    """Its passes take a second a row, on a clock of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now_s = 0.0
        self.longest = 0

    def execute(self, spans):  # type: ignore[no-untyped-def]
        num_rows = sum(len(span.token_ids) for span in spans)
        self.now_s += num_rows
        self.longest = max(self.longest, num_rows)
        return super().execute(spans)

    def capacity(self) -> Capacity:
        return replace(super().capacity(), max_model_len=512)


class VirtualWatch:
    """By the clock of a target."""

    def __init__(self, target: "SlowTarget | DisturbedTarget") -> None:
        self._target, self._start_s = target, 0.0

    def start(self) -> None:
        self._start_s = self._target.now_s

    def stop(self) -> float:
        return self._target.now_s - self._start_s


def test_a_slow_target_is_measured_for_a_bounded_time() -> None:
    target = SlowTarget(num_blocks=256, max_pass_tokens=512)
    cost = measure_cost(target, clock=lambda: target.now_s, stopwatch=VirtualWatch(target))
    assert cost.rows == (1, 2, 4)
    assert cost.step_s(512, 0) == pytest.approx(512.0)  # what was not measured follows the last points
    assert target.now_s < 5 * BUDGET_S
    assert target.longest == 4


class GraphedTarget(SlowTarget):
    """Replays passes of up to 4 rows from graphs; a larger one takes a hundred times as long."""

    def execute(self, spans):  # type: ignore[no-untyped-def]
        num_rows = sum(len(span.token_ids) for span in spans)
        outcomes = super().execute(spans)
        self.now_s += (0.0001 if num_rows <= 4 else 0.01) - num_rows
        return outcomes

    def capacity(self) -> Capacity:
        return replace(super().capacity(), prepared_rows=(1, 2, 4))


def test_the_cliff_behind_the_largest_graph_is_measured() -> None:
    target = GraphedTarget(num_blocks=256, max_pass_tokens=64)
    cost = measure_cost(target, clock=lambda: target.now_s, stopwatch=VirtualWatch(target))
    assert [cost.step_s(rows, 0) for rows in (1, 4, 5, 6)] == pytest.approx([0.0001, 0.0001, 0.01, 0.01])


class SteppedTarget(SlowTarget):
    """Passes of up to 16 rows are padded to the next of five graphs."""

    SIZES = (1, 2, 4, 8, 16)

    @classmethod
    def true_s(cls, num_rows: int) -> float:
        return next((0.01 + 0.001 * size for size in cls.SIZES if size >= num_rows), 0.05 + 0.001 * num_rows)

    def execute(self, spans):  # type: ignore[no-untyped-def]
        num_rows = sum(len(span.token_ids) for span in spans)
        outcomes = super().execute(spans)
        self.now_s += self.true_s(num_rows) - num_rows
        return outcomes

    def capacity(self) -> Capacity:
        return replace(super().capacity(), prepared_rows=self.SIZES)


def test_a_pass_costs_what_its_graph_costs() -> None:
    """Nor do passes between two sizes correct the model: between its points a measured table would be too low."""
    target, rows = SteppedTarget(num_blocks=256, max_pass_tokens=64), range(1, 33)
    measured = measure_cost(target, clock=lambda: target.now_s, stopwatch=VirtualWatch(target))
    cost = padded(measured, target.capacity().prepared_rows)
    true_s = [target.true_s(num) for num in rows]
    assert [cost.step_s(num, 0) for num in rows] == pytest.approx(true_s)
    assert [cost.table(1000).at(num) for num in rows] == pytest.approx([cost.step_s(num, 1000) for num in rows])
    assert cost.table(0).at_each(np.array(rows)) == pytest.approx(true_s)
    online = OnlineCost(cost)
    for num in (3, 5, 9, 13) * 20:
        online.observe(num, 0, target.true_s(num))
    assert [online.step_s(num, 0) for num in rows] == pytest.approx(true_s)


class DisturbedTarget(ToyTarget):
    """A pass takes 20 ms and half a millisecond a row, and ``more_s`` more from ``from_s`` until ``until_s``."""

    from_s, until_s, more_s = 0.1, 3.0, 0.04

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now_s = 0.0

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        num_rows = sum(len(span.token_ids) for span in spans)
        disturbed = self.more_s if self.from_s <= self.now_s < self.until_s else 0.0
        self.now_s += true_s(num_rows) + disturbed
        return super().execute(spans)


def true_s(rows: int) -> float:
    return 0.02 + 0.0005 * rows


@pytest.mark.parametrize("more_s", [0.04, 0.4])
def test_seconds_in_which_all_is_slow_do_not_raise_the_times_of_some_sizes(more_s: float) -> None:
    target = DisturbedTarget(num_blocks=256, max_pass_tokens=64)
    target.more_s = more_s
    cost = measure_cost(target, clock=lambda: target.now_s, stopwatch=VirtualWatch(target))
    assert target.now_s > target.until_s
    for rows in cost.rows:
        assert cost.step_s(rows, 0) == pytest.approx(true_s(rows))


class UnevenTarget(DisturbedTarget):
    """Passes of 2 to ``last`` rows always take ``times`` as long."""

    last, times = 8, 2

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        began_s, outcomes = self.now_s, super().execute(spans)
        if 2 <= sum(len(span.token_ids) for span in spans) <= self.last:
            self.now_s += (self.times - 1) * (self.now_s - began_s)
        return outcomes

    def capacity(self) -> Capacity:
        return replace(super().capacity(), max_model_len=512)


def test_a_size_takes_at_most_as_long_as_a_larger_one_or_as_smaller_ones_in_turn() -> None:
    target = UnevenTarget(num_blocks=256, max_pass_tokens=64)
    target.from_s = target.until_s
    cost = measure_cost(target, clock=lambda: target.now_s, stopwatch=VirtualWatch(target))
    assert [cost.at(rows) for rows in (1, 2, 4, 8, 16)] == pytest.approx([true_s(1), *[true_s(16)] * 4])
    target.last, target.times, began_s = 64, 5, target.now_s
    cost = measure_cost(target, clock=lambda: target.now_s, stopwatch=VirtualWatch(target))
    assert [cost.at(rows) for rows in (1, 2, 4, 8)] == pytest.approx(
        [true_s(1), 2 * true_s(1), 4 * true_s(1), 5 * true_s(8)]
    )
    assert target.now_s - began_s < 2.5 * BUDGET_S  # contexts included


@pytest.mark.parametrize(
    ("known", "is_steep"),
    [
        (TableCost((1, 2, 4, 8, 16, 32), (0.018, 0.059, 0.059, 0.059, 0.06, 0.08)), True),  # drafts would never pay
        (TableCost((1, 2, 4, 8, 16, 32), (0.0205, 0.021, 0.022, 0.06, 0.06, 0.08)), True),  # those of 7 tokens would not
        (TableCost((1, 2, 4, 8, 16, 32), tuple(true_s(rows) for rows in (1, 2, 4, 8, 16, 32))), False),
        (TableCost((1, 2, 4, 8, 16, 32), tuple(3 * true_s(rows) for rows in (1, 2, 4, 8, 16, 32))), False),
        (TableCost((1, 32), (0.02, 0.02)), False),
    ],
)
def test_a_start_finds_what_other_programs_made_steep(known: TableCost, is_steep: bool) -> None:
    target = DisturbedTarget(num_blocks=256, max_pass_tokens=64)
    target.from_s = target.until_s
    watch = VirtualWatch(target)
    assert is_too_steep(known, target, clock=lambda: target.now_s, stopwatch=watch) == is_steep


def test_a_check_that_is_disturbed_itself_keeps_what_is_stored() -> None:
    target = DisturbedTarget(num_blocks=256, max_pass_tokens=64)
    target.from_s, target.until_s = 0.0, 0.15  # a pass of one row and the one before it
    known = TableCost((1, 2, 4, 8, 16, 32), tuple(true_s(rows) for rows in (1, 2, 4, 8, 16, 32)))
    assert not is_too_steep(known, target, clock=lambda: target.now_s, stopwatch=VirtualWatch(target))
    assert target.now_s > target.until_s


@pytest.mark.parametrize("two_s", [2.0, 4.0])
def test_a_check_of_a_slow_target_is_short(two_s: float) -> None:
    target = SlowTarget(num_blocks=256, max_pass_tokens=512)
    known = TableCost((1, 2, 4), (1.0, two_s, 4.0))
    steep = is_too_steep(known, target, clock=lambda: target.now_s, stopwatch=VirtualWatch(target))
    assert steep == (two_s > 3.0)
    assert target.now_s < 6 * CHECK_S


# ---- from the configuration to a target


def test_a_folder_is_served_under_its_name_up_to_its_own_length(tiny_model_folder: Path) -> None:
    config = Config(
        model=ModelConfig(name=f"{tiny_model_folder}/", max_model_len=4096),
        target=TargetConfig(device="cpu", dtype="float32", kv_cache_gb=0.01),
    )
    target, info, cost = load_target(config)
    assert info.name == tiny_model_folder.name
    assert info.max_model_len == 512
    assert target.capacity().max_model_len == 512
    assert cost.step_s(64, 0) >= cost.step_s(1, 0) > 0
