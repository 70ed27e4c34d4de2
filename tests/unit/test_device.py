"""What targets and drafters exchange with a device, without one: copies, waits, warming up, capture and fallback."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch

from cluster.config import Config, HiddenStateKind, TargetConfig
from cluster.errors import InvalidField, OutriderError
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request
from drafters.hidden_states import block_stage, sequential
from drafters.hidden_states import stage as drafter_stage
from drafters.hidden_states.checkpoint import load_network
from drafters.hidden_states.drafter import load_drafter
from drafters.hidden_states.stage import KnownStates
from drafters.protocol import Demand
from drafters.small_model import Question, SmallModel
from engine import factory, loading
from engine.batch_layout import PackedSpan, lay_out, pack
from engine.cpu.packed import product_dtype
from engine.device import to_device
from engine.forward import CausalModel
from engine.kv_cache import KvCache
from engine.models.config import load_config
from engine.models.weights import LinearWeight, open_weights
from engine.native import NativeLimits, NativeTarget
from engine.ops import Linear, Logits, TorchOps
from engine.pass_timing import ROWS
from engine.sampling import Sampler, SamplingState
from engine.target import FeatureSpan
from router.plan import Capacity, Span
from tests.support.device_transfers import DeviceTransfers
from tests.support.dspark import target_rows, write_dspark, write_speculators
from tests.support.families import write_family

CPU, META = torch.device("cpu"), torch.device("meta")
SPANS = (PackedSpan(30, (7, 8, 9), np.array([4, 1, 0], np.int32)), PackedSpan(9, (3,), np.array([2, 5], np.int32)))
FREQUENCIES = torch.tensor([1.0, 0.5, 0.25])
TENSORS = ("token_ids", "positions", "slots", "starts", "base_lens", "tables", "cos", "sin")


def test_a_layout_is_one_copy_that_is_not_waited_for() -> None:
    with DeviceTransfers(META) as device:
        layout = lay_out(SPANS, 16, FREQUENCIES, META)
    assert device.copies == ["queued"]
    expected = lay_out(SPANS, 16, FREQUENCIES, CPU)
    for name in TENSORS:
        on_device, on_host = getattr(layout, name), getattr(expected, name)
        assert (on_device.device, on_device.shape, on_device.dtype) == (META, on_host.shape, on_host.dtype)


def test_a_packed_layout_holds_the_same_and_is_aligned() -> None:
    host = pack(SPANS, 16, FREQUENCIES, CPU)
    found, expected = host.layout(host.buffer.clone()), lay_out(SPANS, 16, FREQUENCIES, CPU)
    for name in TENSORS:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert (getattr(found, name).data_ptr() - found.token_ids.data_ptr()) % 16 == 0, name
    assert found.max_span_len == 3


def test_rows_of_padding_are_spans_that_are_written_nowhere() -> None:
    rows = [PackedSpan(9, (3,), np.array([2, 5], np.int32)), PackedSpan(32, (4,), np.array([4, 1, 3], np.int32))]
    host = pack(rows, 16, FREQUENCIES, CPU, num_padding=2, table_width=5)
    layout = host.layout(host.buffer)
    assert layout.token_ids.tolist() == [3, 4, 0, 0]
    assert layout.positions.tolist() == [9, 32, 0, 0]
    assert layout.slots.tolist() == [41, 48, -1, -1]
    assert layout.starts.tolist() == [0, 1, 2, 3, 4]
    assert layout.base_lens.tolist() == [9, 32, 0, 0]
    assert layout.tables.tolist() == [[2, 0, 0, 0, 0], [4, 1, 3, 0, 0], [0] * 5, [0] * 5]
    empty = pack((), 16, FREQUENCIES, CPU, num_padding=2, table_width=1)
    assert empty.layout(empty.buffer).starts.tolist() == [0, 1, 2]


def test_arrays_go_to_a_device_without_a_wait() -> None:
    with DeviceTransfers(META) as device:
        to_device(np.arange(5), META)
    assert device.copies == ["queued"]
    array = np.arange(3)
    assert to_device(array, CPU).data_ptr() == array.ctypes.data


class Waits(CausalModel):
    """Notes whether the device was waited for after the last pass, as a GPU has to be."""

    finished = True

    def forward_with_hidden_states(self, spans: Any, cache: KvCache, layers: Any) -> Any:
        self.finished = False
        return super().forward_with_hidden_states(spans, cache, layers)

    def synchronize(self) -> None:
        self.finished = True


@pytest.fixture
def waits(tiny_model_folder: Path) -> Waits:
    config = load_config(tiny_model_folder)
    with open_weights(tiny_model_folder, config, torch.float32) as weights:
        return Waits(config, weights, TorchOps(config, torch.float32), torch.float32)


@pytest.mark.parametrize("samples", [False, True])
def test_a_pass_is_over_when_execute_returns(waits: Waits, samples: bool) -> None:
    """Else profiles and the online cost model would learn how long a launch takes."""
    target = NativeTarget(waits, NativeLimits(16, 16, 4, 64, 128))
    request = Request("a", tuple(range(8)), SamplingParams(max_tokens=4), arrival_s=0.0)
    target.open(request, request.prompt_token_ids)
    target.execute([Span.bound("a", 0, request.prompt_token_ids, samples=samples)])
    assert waits.finished


def test_work_beside_a_pass_begins_when_it_is_launched(waits: Waits) -> None:
    target, finished = NativeTarget(waits, NativeLimits(16, 16, 4, 64, 128)), list[bool]()
    request = Request("a", tuple(range(8)), SamplingParams(max_tokens=4), arrival_s=0.0)
    target.open(request, request.prompt_token_ids)
    target.meanwhile = lambda: finished.append(waits.finished)
    target.execute([Span.bound("a", 0, request.prompt_token_ids)])
    assert finished == [False]
    assert not target.is_asynchronous, "a CPU computes on this thread"
    waits.device = torch.device("cuda")
    assert target.is_asynchronous


def test_a_pass_that_only_catches_up_is_over_when_it_returns(waits: Waits) -> None:
    small = SmallModel(waits, num_blocks=8, vocab_size=257, eos_token_ids=(256,), max_pass_rows=8)
    small.open("a", range(30), 30, SamplingParams(max_tokens=4))
    assert small.catch_up([Question("a")]) == [False]
    assert waits.finished
    assert small.choose_within([Question("a")], max_rows=4) == [None]
    assert waits.finished


class Keeps(TorchOps):
    """Keeps the weights that products were made of."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weights: list[torch.Tensor] = []

    def linear(self, weight: LinearWeight) -> Linear:
        self.weights.append(weight.weight)
        return super().linear(weight)

    def logits(self, weight: LinearWeight) -> Logits:
        self.weights.append(weight.weight)
        return super().logits(weight)


@pytest.mark.parametrize(("family", "is_one"), [("llama-tied", True), ("llama", False)])
def test_tied_embeddings_lie_in_memory_once(family: str, is_one: bool, tmp_path: Path) -> None:
    write_family(family, tmp_path)
    config = load_config(tmp_path)
    ops = Keeps(config, torch.bfloat16)
    with open_weights(tmp_path, config, torch.bfloat16) as weights:
        model = CausalModel(config, weights, ops, torch.bfloat16)
    assert (ops.weights[-1].data_ptr() == model.embedding.data_ptr()) == is_one


def test_the_bias_of_dsparks_sequential_head_lies_in_memory_once(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_network(write_dspark(tmp_path, tiny_model_folder), target_rows(tiny_model_folder))
    dtype = product_dtype(torch.bfloat16, CPU)
    ops = Keeps(network.config.shape, dtype)
    monkeypatch.setattr(sequential, "make_ops", lambda *_, **__: ops)
    sequential.SequentialStage(network, dtype, CPU, Sampler(257, (256,)))
    assert network.markov_head is not None
    assert ops.weights[-1].data_ptr() == network.markov_head.markov_w2.weight.data_ptr()


@pytest.mark.parametrize("num_blocks", [1, 16])
@pytest.mark.parametrize("sampling", [SamplingParams(8, 0.0), SamplingParams(8, 0.8, top_p=0.9, presence_penalty=1.0)])
def test_a_draft_of_dspark_takes_few_operations_and_waits(
    sampling: SamplingParams, num_blocks: int, tmp_path: Path, tiny_model_folder: Path
) -> None:
    pytest.importorskip("triton")
    from engine.cuda.ops import CudaOps

    folder = write_dspark(tmp_path, tiny_model_folder, enable_confidence_head=False)
    network, waits = load_network(folder, target_rows(tiny_model_folder)), []
    device = DeviceTransfers(META)

    def launch(*_: object, **__: object) -> None:
        device.num_operations += 1

    def read(tensor: torch.Tensor) -> np.ndarray:
        device.num_operations += 2  # pinned memory, and the copy
        waits.append(tensor)
        return np.zeros(tensor.shape)

    ops = CudaOps(network.config.shape, torch.float32, launch)
    with (
        mock.patch.object(sequential, "make_ops", return_value=ops),
        mock.patch("engine.cuda.sampling.to_host", read),
        mock.patch("drafters.hidden_states.device_round.to_host", read),
    ):
        stage = sequential.SequentialStage(
            network, torch.float32, META, Sampler(257, (256,), ops.gumbel_argmax(np.arange(257)))
        )

        def draft() -> None:
            state = SamplingState(sampling, [1, 2, 3], 2)
            blocks = [sequential.Block(3, state, (), 5, frozenset()) for _ in range(num_blocks)]
            stage.draft(KnownStates(torch.empty(num_blocks, 6, 32, device=META)), blocks)
            assert all(len(block.token_ids) == 5 for block in blocks)

        draft()  # allocates
        waits.clear()
        device.num_operations = 0
        with device:
            draft()
    assert device.num_operations <= 5 * 25  # for five tokens, with those of the views and copies of a pass
    assert len(waits) == (1 if sampling.top_p == 1.0 else 5), "edits and filters depend on the tokens before"
    assert set(device.copies) == {"queued"}


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("kind", get_args(HiddenStateKind))
def test_launches_of_a_draft_round_do_not_depend_on_its_batch(
    kind: HiddenStateKind, has_graphs: bool, tmp_path: Path, tiny_model_folder: Path
) -> None:
    """From the features to the tokens, with requests that need several blocks of the cache: as many operations and copies
    for two as for sixteen, none of them waited for but the last. With graphs the context is computed, and the rest is one
    replay, of a round of twelve as of one of sixteen; what is recorded copies and waits for nothing, and all of it is
    recorded before the first request, the largest round first."""
    pytest.importorskip("triton")
    from engine.cuda import graphs
    from engine.cuda.ops import CudaOps

    write_speculators(tmp_path, tiny_model_folder, kind, target_layer_ids=(0,))
    network, device = load_network(tmp_path, target_rows(tiny_model_folder)), DeviceTransfers(META)
    launches, waits = [0], []

    def launch(*_: object, **__: object) -> None:
        launches[0] += 1

    def read(tensor: torch.Tensor) -> np.ndarray:
        waits.append(tensor)
        return np.zeros(tensor.shape)

    class Rows:
        def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], torch.Tensor]:
            num = sum(span.stop - span.start for span in spans)
            return [True] * len(spans), torch.empty(num, network.config.feature_size, device=META)

    def make_ops(config: Any, *_: object, **__: object) -> CudaOps:
        return CudaOps(config, torch.float32, launch)

    def record(
        compute: Callable[[], tuple[torch.Tensor, ...]], *_: object
    ) -> tuple[SimpleNamespace, tuple[torch.Tensor, ...]]:
        if is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        num_copies = len(device.copies)
        outputs = compute()
        assert len(device.copies) == num_copies
        num_steps, num_drafts = outputs[0].shape[:2]
        recorded.append((num_drafts, num_steps))
        return SimpleNamespace(pool=lambda: None, replay=lambda: replays.append(1)), outputs

    counts, replays, recorded, is_full = {}, list[int](), list[tuple[int, int]](), []
    with ExitStack() as patches:
        if has_graphs:
            patches.enter_context(mock.patch.object(sequential, "make_graphs", graphs.CudaGraphs))
            patches.enter_context(mock.patch.object(graphs, "record", record))
        for module in (sequential, block_stage, drafter_stage):
            patches.enter_context(mock.patch.object(module, "make_ops", make_ops))
        patches.enter_context(mock.patch("drafters.hidden_states.device_round.to_host", read))
        info = ModelInfo("m", 257, 512, (), "")
        load = partial(load_drafter, tmp_path, target_rows(tiny_model_folder), "float32", info, META, Rows(), num_blocks=256)
        drafter = load()
        if has_graphs:
            steps = (*((64, 48, 24, 12) if kind == "eagle3" else ()), 6, 4, 2, 1)
            assert recorded == [(batch, num) for batch in graphs.PADDED_ROWS[::-1] for num in steps]
            assert not replays
        num_recorded = len(recorded)
        for batch, num in [(16, 5), (2, 5), (12, 5), (2, 5), (16, 5), (65, 5), (2, 9), (12, 11)]:
            draft_len = num if kind == "eagle3" else min(num, 6)  # the first round allocates what kernels share
            names = [f"{batch} {i}" for i in range(batch)]
            for name in names:
                drafter.open(name, [len(name), *range(80)], 1, SamplingParams(8, 0.7, seed=3, ignore_eos=True))
            device.copies.clear()
            device.num_on_device, launches[0] = 0, 0
            waits.clear()
            replays.clear()
            with device:
                drafts = drafter.propose([Demand(name, draft_len) for name in names])
            assert all(len(draft.token_ids) == draft_len for draft in drafts)
            counts[batch, num] = device.num_on_device, launches[0], len(device.copies), len(waits), len(replays)
            assert set(device.copies) == {"queued"}
            for name in names:
                drafter.release(name)
        assert len(recorded) == num_recorded, "a round records nothing"
        recorded.clear()
        drafter = load(max_draft_len=8)
        steps = (*((8,) if kind == "eagle3" else ()), 6, 4, 2, 1)
        assert recorded == [(batch, num) for batch in graphs.PADDED_ROWS[::-1] * has_graphs for num in steps]
        replays.clear()
        for longest, num_replays in ((8, 1), (9, int(kind != "eagle3"))):
            drafter.open("r", list(range(80)), 1, SamplingParams(10, 0.7, seed=3, ignore_eos=True))
            with device:
                assert drafter.propose([Demand("r", longest)])[0].token_ids
            assert len(replays) == num_replays * has_graphs, "a longer round is launched"
            replays.clear()
        is_full.append(True)
        with pytest.raises(OutriderError, match=r"lower kv_cache_gb.*out of memory") if has_graphs else nullcontext():
            load()
    assert counts[2, 5] == counts[16, 5]
    assert counts[16, 5][-2:] == (1, int(has_graphs))
    assert counts[65, 5][-2:] == (1, 0), "a round that is too large is launched"
    if has_graphs:
        assert counts[12, 5] == counts[16, 5]
        assert counts[2, 9] == counts[12, 11]
        assert counts[16, 5][1] < 0.6 * counts[65, 5][1], "P-EAGLE computes its masks with the context"


class Counted:
    """A target that always chooses the same token."""

    def __init__(self) -> None:
        self.passes: list[int] = []

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        return 0

    def num_cached(self, request: Request, token_ids: Sequence[int]) -> int:
        return 0

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        self.passes.append(sum(len(span.token_ids) for span in spans))
        return [replace(span, chosen=(0,)) for span in spans]

    def release(self, request_id: str) -> None:
        pass

    def capacity(self) -> Capacity:
        return Capacity(32, 64, 64, 8, 128, 1024)

    def check_integrity(self) -> None:
        pass


@pytest.mark.parametrize(("device", "warmed"), [("cuda", [rows for rows in ROWS if rows <= 128]), ("cpu", [1, 8])])
def test_with_a_stored_profile_a_target_still_computes_before_it_serves(
    device: str, warmed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Counted()
    monkeypatch.setattr(loading, "load_engine", lambda *_: (engine, ModelInfo("m", 10, 8, (), "")))
    monkeypatch.setattr(loading, "ProfiledCost", lambda *_: SimpleNamespace())
    loading.load_target(Config(target=TargetConfig(device=device)), profile=SimpleNamespace())  # type: ignore[arg-type]
    assert engine.passes[1::2] == warmed  # each after the pass that admits its requests


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_name(tiny_model_folder: Path) -> None:
    with pytest.raises(InvalidField, match="device: must be cpu or auto, since"):
        factory.load_model(tiny_model_folder, device="cuda")
    with pytest.raises(InvalidField, match="device: must be cpu or auto, since"):
        loading.identity_of(Config(target=TargetConfig(device="cuda")))


def test_without_triton_a_gpu_is_refused(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.cuda.ops", None)
    monkeypatch.setitem(sys.modules, "engine.cuda.sampling", None)
    with pytest.raises(InvalidField, match=r"device: needs a Triton .*Triton cannot be imported"):
        factory.make_ops(load_config(tiny_model_folder), torch.bfloat16, torch.device("cuda"))
    with pytest.raises(InvalidField, match=r"device: needs a Triton .*Triton cannot be imported"):
        factory.make_gumbel_argmax(100, torch.bfloat16, torch.device("cuda"))


def test_a_gpu_whose_kernels_cannot_be_compiled_is_refused(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = pytest.importorskip("engine.cuda.compile_check")
    tried = []

    def refuse(ops: object, config: object, dtype: torch.dtype, device: torch.device, block_len: int) -> None:
        tried.append((dtype, device.type, block_len))
        raise trial.KernelsUnavailable("PTXASError: sm_999 is not defined")

    monkeypatch.setattr(trial, "try_out", refuse)
    with pytest.raises(InvalidField, match="sm_999 is not defined"):
        factory.make_ops(load_config(tiny_model_folder), torch.bfloat16, torch.device("cuda"), block_len=64)
    assert tried == [(torch.bfloat16, "cuda", 64)]


def test_an_error_of_the_device_is_not_taken_for_a_kernel_that_cannot_be_compiled(tiny_model_folder: Path) -> None:
    trial = pytest.importorskip("engine.cuda.compile_check")
    from engine.cuda.ops import CudaOps

    config = load_config(tiny_model_folder)
    for error, raised in (
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (RuntimeError("Failed to find C compiler"), trial.KernelsUnavailable),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with pytest.raises(raised, match=str(error)):
            trial.try_out(CudaOps(config, torch.float32, fail), config, torch.float32, CPU, 32)


def test_a_capture_leaves_other_threads_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured in CUDA's global mode, an allocation by any other thread would break the capture, and fail itself."""
    from engine.cuda import graphs

    did, own, made = list[str](), list[Any](), list[Any]()

    class Stream:
        def __init__(self, _: torch.device) -> None:
            made.append(self)

        def wait_stream(self, _: object) -> None:
            pass

    default = Stream(torch.device("cpu"))

    @contextmanager
    def stream(used: Stream) -> Iterator[None]:
        own.append(used)
        yield

    @contextmanager
    def graph(_: object, *, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert graphs._CAPTURING.locked(), "a capture begins with a wait for the device"
        assert stream is own[0]
        assert stream is not default, "torch's default is one stream for all threads"
        did.append(capture_error_mode)
        yield

    of_device = dict.fromkeys(("current_stream", "default_stream"), lambda device: default)
    cuda = SimpleNamespace(Stream=Stream, stream=stream, graph=graph, CUDAGraph=SimpleNamespace, **of_device)
    monkeypatch.setattr(torch, "cuda", cuda)
    outputs = (torch.ones(1), torch.ones(1))

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        did.append("pass")
        return outputs

    for _ in range(2):  # on one stream: else neither memory that was freed nor that of cuBLAS is used again
        assert graphs.record(compute, torch.device("cuda", 7), None)[1] is outputs
    assert (did, made) == (["pass", "pass", "thread_local", "pass"] * 2, [default, own[0]])
    assert not graphs._CAPTURING.locked()


def test_every_size_of_a_graph_is_captured_by_warming_up() -> None:
    from engine.cuda.graphs import PADDED_ROWS

    assert set(PADDED_ROWS) <= set(ROWS)
