"""Early exit on a GPU: what its kernels compute, interpreted; and in which order, and how often, a pass waits for them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import tests.support.interpreted_triton  # isort: skip  # noqa: F401
from engine import early_exit
from engine.batch_layout import PackedSpan
from engine.cuda import exit_scores
from engine.cuda.exit_scores import DeviceScores, InTurn, SideStream
from engine.cuda.graphs import GraphedModel
from engine.cuda.ops import CudaOps
from engine.cuda.sampling import CudaGumbelArgmax, Launch, launch
from engine.exit_lens import LAG, ReducedScores, lens_product, spread_vocabularies
from engine.exit_rows import WatchedRows, watched_rows
from engine.forward import CausalModel
from engine.models.config import DecoderConfig
from engine.models.weights import LinearWeight
from engine.native import NativeTarget
from engine.ops import Ops
from engine.sampling import SamplingState
from router.plan import Span
from tests.support.device_transfers import DeviceTransfers
from tests.support.packing import load_with
from tests.support.planned_exits import PlannedExits
from tests.support.recorded_graphs import use_recorded_graphs
from tests.support.tiny_model import write_tiny_model
from tests.unit.test_native import LIMITS, SAMPLINGS, Caller, plain, request

pytestmark = pytest.mark.slow

META = torch.device("meta")


class Logged(InTurn):
    """``log``: what was launched, where the side stream begins and ends, and waits."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.given: tuple[torch.Tensor, ...] = ()

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        self.log.append(kernel.__name__)
        launch(kernel, grid, *args, **constants)

    @contextmanager
    def after(self, *given: torch.Tensor) -> Iterator["Logged"]:
        self.log.append("beside")
        self.given = given
        yield self
        self.log.append("launched")

    def wait(self) -> float:
        self.log.append("waited")
        return 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("beside"), num_layers=6)


def loaded(folder: Path, launched: Launch = launch, **options: Any) -> CausalModel:
    def make_ops(config: DecoderConfig, dtype: torch.dtype, *_: object, **__: object) -> Ops:
        return CudaOps(config, dtype, launch=launched)

    return load_with(make_ops, folder, **options)


def scores_of(model: CausalModel, token_ids: np.ndarray, beside: Logged, launched: Launch) -> DeviceScores:
    return DeviceScores(model, model.embedding, token_ids, CudaGumbelArgmax(token_ids, launched), beside)


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("has_lens", [True, False])
def test_margins_beside_a_pass_are_those_within_it(folder: Path, has_delta: bool, has_lens: bool) -> None:
    """Greedy and with noise, over a part of the vocabulary that lacks some drafts; nothing of the pass is modified."""
    model, plainly = loaded(folder), load_with(CudaOps, folder)
    rng, size = np.random.default_rng(1), model.config.hidden_size
    token_ids = np.arange(1, 250, 3)
    at = np.array([0, 1, 4, 6, 7])
    rows = WatchedRows(
        at, np.array([0, 0, 1, 2, 2]), np.array([0, 1, 0, 0, 1]), np.array([4, 5, 200, 255, 100]), rng.integers(0, 2**60, 5),
        np.array([0.0, 0.0, 0.7, 1.3, 0.7], np.float32),
    )  # fmt: skip
    residual, delta = (torch.from_numpy(rng.normal(size=(9, size)).astype(np.float32)) for _ in range(2))
    given = residual.clone(), delta.clone()
    weight = LinearWeight(torch.from_numpy(rng.normal(size=(size, size))).float())
    lens = lens_product(model, weight) if has_lens else None
    beside = Logged()
    device = scores_of(model, token_ids, beside, beside.launch)
    found = device.begin(residual, delta if has_delta else None, lens, rows).wait()
    expected = ReducedScores(plainly, plainly.embedding, token_ids).begin(residual, delta if has_delta else None, lens, rows)
    np.testing.assert_allclose(found.values, expected.wait().values, rtol=2e-4, atol=2e-4)
    assert found.seconds == 1e-3
    assert torch.equal(residual, given[0])
    assert torch.equal(delta, given[1])
    sizes = [(5, size), (2, 5), CudaGumbelArgmax(token_ids).records(rows.keys, rows.temperatures).shape]
    assert [tuple(one.shape) for one in beside.given] == sizes, "hidden states, places and records: all that is read there"
    assert beside.log == [
        *("watched_norm_kernel", "beside", "peaks_kernel", "choose_kernel", "draft_logit_kernel", "launched", "waited")
    ]


def planned(model: CausalModel, beside: Logged) -> PlannedExits:
    return PlannedExits(model, scores_of(model, np.arange(model.config.vocab_size), beside, beside.launch))


@pytest.fixture
def half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_exit, "DEPTHS", (0.5, 0.6, 1.0))


@pytest.mark.usefixtures("half_way")
def test_rows_leave_some_layers_after_they_were_looked_at_and_change_no_token(folder: Path) -> None:
    """Also in learning passes, whose margins are read after the pass. One check is under way at a time."""
    beside = Logged()
    model = loaded(folder)
    wanted = [request(name, replace(SAMPLINGS[kind], max_tokens=8), 9) for name, kind in (("a", "greedy"), ("b", "sampled"))]
    expected = [plain(load_with(CudaOps, folder), each)[:8] for each in wanted]
    exits, target = planned(model, beside), NativeTarget(model, LIMITS)
    assert [check.depth for check in exits.checks] == [3, 6], "after four layers the one after three would not be over"
    callers = [Caller(target, each) for each in wanted]
    for caller in callers:
        caller.run(caller.span())
    target.exit_early(exits)
    while any(len(caller.output) < 8 for caller in callers):
        spans = []
        for caller, tokens in zip(callers, expected, strict=True):
            right = tokens[len(caller.output) : len(caller.output) + 3]
            spans.append(caller.span((*right[:1], *((token + 1) % 250 for token in right[1:]))))
        for caller, span, outcome in zip(callers, spans, target.execute(spans), strict=True):
            assert outcome.error is None
            caller.take(span, outcome)
    assert [caller.output[:8] for caller in callers] == expected
    assert {watch.depths for watch in exits.watches} == {(3, 3 + LAG), (), (3, 6)}
    assert exits.num_left > 0
    assert exits._samples
    assert beside.log.count("waited") == beside.log.count("beside") > 0


class Counted(Logged):
    """Launches nothing."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        self.log.append(kernel.__name__)


@pytest.mark.usefixtures("half_way")
@pytest.mark.parametrize("leaves", [True, False])
def test_a_pass_waits_once_for_each_check_and_a_timed_one_never(
    folder: Path, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for a GPU. Copies to it are queued: the layout, watched rows, their noise, and what stays."""
    use_recorded_graphs(monkeypatch.setattr)
    beside = Counted()

    def on_host(scored: torch.Tensor) -> torch.Tensor:
        beside.log.append("copied")
        best = torch.zeros(scored.shape, dtype=torch.float64)
        best[:, :2] = 9.0 * leaves
        return best

    monkeypatch.setattr(exit_scores, "begin_to_host", on_host)
    model = loaded(folder, beside.launch, device="meta", kind=GraphedModel)
    scores = scores_of(model, np.arange(model.config.vocab_size), beside, beside.launch)
    scores.warm_up()
    exits, cache = PlannedExits(model, scores), model.new_cache(8, 16)
    states = {"a": SamplingState(replace(SAMPLINGS["greedy"], max_tokens=9), [1, 2, 3], 1)}
    spans = [Span.bound("a", 2, (3, 4, 5, 6), num_drafts=3)]
    packed, log = [PackedSpan(2, (3, 4, 5, 6), np.arange(8, dtype=np.int32))], []
    for _ in range(2):
        watch = exits.watch(spans, states)
        assert watch is not None
        model.forward_watched(packed, cache, (), watch) if not watch.depths else None  # records
        beside.log.clear()
        with DeviceTransfers(META) as device:
            model.forward_watched(packed, cache, (), watch)
        assert set(device.copies) == {"queued"}
        log.append((watch.depths, len(device.copies), beside.log.count("waited"), [*beside.log]))
    (timed,) = (one for one in log if not one[0])
    (watched,) = (one for one in log if one[0])
    assert timed[1:3] == (1, 0)
    assert watched[:3] == ((3, 5), 3 + 2 * leaves, 1)
    first, last = watched[3].index("beside"), watched[3].index("waited")
    assert watched[3][first - 1] == "watched_norm_kernel"
    assert watched[3][last - 1] == "gate_kernel"
    assert watched[3][first:last].count("attention_kernel") == LAG, "layers that the device computes meanwhile"
    assert watched_rows(spans, states).at.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("half_way")
@mock.patch.object(exit_scores, "begin_to_host", lambda scored: torch.zeros(scored.shape, dtype=torch.float64))
def test_warm_up_gives_the_kernels_the_dtypes_of_a_pass(folder: Path) -> None:
    kinds = []

    def noted(kernel: Any, grid: object, *args: Any, **constants: Any) -> None:
        if kernel.__name__ == "watched_norm_kernel":
            kinds.append((args[0].dtype, args[1].dtype, constants["HAS_DELTA"]))

    model = loaded(folder, noted, device="meta", dtype=torch.bfloat16)
    scores = scores_of(model, np.arange(model.config.vocab_size), Counted(), noted)
    scores.warm_up()
    warm, exits = sorted(kinds, key=str), PlannedExits(model, scores)
    kinds.clear()
    exits._num_since = early_exit.IDLE_PERIOD  # a learning pass is due
    states = {"a": SamplingState(replace(SAMPLINGS["greedy"], max_tokens=9), [1, 2, 3], 1)}
    watch = exits.watch([Span.bound("a", 2, (3, 4, 5, 6), num_drafts=3)], states)
    assert watch is not None
    packed = [PackedSpan(2, (3, 4, 5, 6), np.arange(8, dtype=np.int32))]
    model.forward_watched(packed, model.new_cache(8, 16), (), watch)
    assert sorted(kinds, key=str) == warm
    assert len(warm) == 2


@pytest.mark.parametrize("vocab_len", [130, 2000, 32_000, 49_159, 151_936])
def test_warm_up_compiles_the_kernels_of_every_reduced_vocabulary(vocab_len: int) -> None:
    """Whichever tokens turn out to be the most frequent."""

    def variants(token_ids: np.ndarray) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []

        def noted(kernel: Any, grid: object, *args: Any, **constants: Any) -> None:
            ints = [(arg == 1, arg % 16 == 0) for arg in args if isinstance(arg, int)]
            found.append((kernel.__name__, *ints, *constants.items()))

        choose = CudaGumbelArgmax(token_ids, noted)
        choose.warm_up(torch.float32, META)
        return found

    warm = {kind for ids in spread_vocabularies(vocab_len, 1024) for kind in variants(ids)}
    rng = np.random.default_rng(1)
    for num_near in (*range(1024, vocab_len, 64), vocab_len)[-1100:]:
        frequent = np.sort(rng.choice(num_near, min(1024, num_near), replace=False))
        assert warm.issuperset(variants(frequent)), num_near


def test_the_stream_of_checks_goes_on_behind_the_pass_and_is_timed_by_itself() -> None:
    """It waits for what the pass was given so far, never the other way round; the host waits for its end alone."""
    calls = mock.Mock()
    calls.Event.side_effect = [calls.begin, calls.end]
    calls.end.elapsed_time = calls.begin.elapsed_time = mock.Mock(return_value=1500.0)
    calls.stream.return_value = nullcontext()
    fakes = {name: getattr(calls, name) for name in ("Stream", "Event", "stream", "current_stream")}
    with mock.patch.multiple("torch.cuda", **fakes):
        side = SideStream(META)
        with side.after(calls.given, calls.also_given) as launched:
            calls.launched()
        assert launched.wait() == 1.5
    own = calls.Stream.return_value
    own.wait_stream.assert_called_once_with(calls.current_stream.return_value)
    calls.given.record_stream.assert_called_once_with(own)
    calls.also_given.record_stream.assert_called_once_with(own)
    calls.stream.assert_called_once_with(own)
    calls.begin.elapsed_time.assert_called_once_with(calls.end)
    wanted = [
        "Stream().wait_stream",
        "given.record_stream",
        "stream",
        "begin.record",
        "launched",
        "end.record",
        "end.synchronize",
    ]
    assert [name for name, *_ in calls.mock_calls if name in wanted] == wanted
