"""The CUDA path against references, on the device. A check takes the place and an empty folder, and raises."""

import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import cycle, product, takewhile
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from cluster.config import HiddenStateKind
from cluster.sampling_params import SamplingParams
from cluster.transport.tensors import Frame, Part, TensorEnd
from cluster.transport.tensors.groups import Meeting
from drafters.hidden_states.block_stage import BlockStage
from drafters.hidden_states.checkpoint import load_network
from drafters.hidden_states.drafter import HiddenStateDrafter
from drafters.protocol import Demand, Draft
from drafters.small_model import Question, SmallModel
from engine import early_exit, factory
from engine.batch_layout import PackedSpan, pack
from engine.cuda.ops import CudaOps
from engine.device import to_device, to_host
from engine.exit_lens import ReducedScores, exit_scores
from engine.exit_rows import WatchedRows
from engine.forward import CausalModel
from engine.hidden_states import HiddenStateCache
from engine.kv_cache import KvCache
from engine.native import NativeLimits, NativeTarget
from engine.noise import gumbel, noise_keys
from engine.ops import TorchOps
from engine.partition import Lane, green_contexts
from engine.sampling import Sampler, SampleSpan, SamplingState
from engine.tensor_parallel.group import NcclRanks
from router.plan import Span
from tests.gpu.place import Place
from tests.gpu.skipped import Skipped
from tests.support.dspark import make_dspark, target_rows, write_dspark, write_speculators
from tests.support.families import FAMILIES, write_family
from tests.support.operator_parity import check_operators, config_of
from tests.support.packing import BLOCK_LEN, compute_in_pieces, load_with, random_sequences
from tests.support.planned_exits import PlannedExits
from tests.support.requests import a_request
from tests.support.target_driver import play
from tests.support.tiny_model import write_tiny_model
from tests.support.triton_aot import DTYPES, Case

Check = Callable[[Place, Path], None]
PLAIN = SamplingParams(max_tokens=64)
EDITED = replace(PLAIN, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1, logit_bias=((3, 2.0),))
SAMPLINGS = (
    PLAIN,
    replace(PLAIN, temperature=0.0),
    replace(PLAIN, top_p=0.9),
    replace(PLAIN, top_p=0.999, temperature=2.0),
    replace(PLAIN, top_k=20, top_p=0.8, min_p=0.02),
    replace(EDITED, min_tokens=3, bad_words=((9,), (5, 11))),
    replace(EDITED, temperature=0.0, allowed_token_ids=tuple(range(0, 250, 3))),
)


def loaded(place: Place, folder: Path, dtype: str = "float32") -> CausalModel:
    with place.loading() as device:
        return factory.load_model(folder, dtype, device)


def kernels_launch(place: Place, folder: Path) -> None:
    """Of every dtype, head size and block length."""
    for dtype, head_dim, block_len in product(DTYPES, (64, 80, 96, 128, 256), (16, 32, 64) if place.is_gpu else ()):
        config = Case(0, dtype, head_dim, (8, 2), block_len, True, 512).config
        ops = factory.make_ops(config, DTYPES[dtype], place.device, block_len=block_len)
        assert isinstance(ops, CudaOps), (dtype, head_dim, block_len)
    if not place.is_gpu:
        raise Skipped("the interpreter compiles nothing")


def operators_equal_plain_torch(place: Place, folder: Path) -> None:
    shapes = ((64, 4, 4, False), (80, 6, 2, True), (96, 3, 1, False), (128, 32, 4, True), (256, 2, 1, True))
    for shape, dtype in product(shapes if place.is_gpu else shapes[:2], place.dtypes):
        config = config_of(*shape)
        check_operators(CudaOps(config, dtype), config, dtype, place.device)


def computed(model: CausalModel, lens: Sequence[int]) -> torch.Tensor:
    """Logits of random sequences, computed in random pieces: small passes go through graphs, large ones do not."""
    sequences, num_blocks = random_sequences(model.config.vocab_size, list(lens), random.Random(1))
    compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(2))
    return torch.cat([torch.cat(sequence.logits).cpu() for sequence in sequences])


def packed_passes_equal_the_reference(family: str, place: Place, folder: Path) -> None:
    if not place.is_gpu and family not in ("llama-odd-sizes", "qwen3"):
        raise Skipped("two families are enough for the interpreter")
    write_family(family, folder)
    lens = (1, 7, 33, 64, 150) if place.is_gpu else (1, 5)
    ours, exact = computed(loaded(place, folder), lens), computed(load_with(TorchOps, folder), lens)
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-3)


def bfloat16_is_as_exact_as_plain_torch(place: Place, folder: Path) -> None:
    """Both against fp32: neither loses more than the other by much."""
    if not place.is_gpu:
        raise Skipped("the interpreter has no bfloat16")
    write_family("qwen3", folder)
    models = (
        load_with(TorchOps, folder),
        load_with(TorchOps, folder, torch.bfloat16, "cuda"),
        loaded(place, folder, "bfloat16"),
    )
    exact, plainly, ours = (computed(model, (1, 33, 150)) for model in models)
    assert (ours - exact).square().mean() <= 1.5 * (plainly - exact).square().mean()


def graphs_replay_what_a_plain_pass_computes(place: Place, folder: Path) -> None:
    """Every padded size, with hidden states, over a context that grows."""
    write_family("llama", folder)
    graphed, plain = loaded(place, folder), load_with(CudaOps, folder, device=place.name)
    assert graphed.padded_rows
    caches = graphed.new_cache(16, BLOCK_LEN), plain.new_cache(16, BLOCK_LEN)
    table = np.arange(16, dtype=np.int32)
    base_len = 0
    for num_rows in (1, 2, 3, 5, 9, 17, 32, 40, 70, 4) if place.is_gpu else (1, 3, 9, 2):
        span = PackedSpan(base_len, list(range(num_rows)), table)
        both = zip((graphed, plain), caches, strict=True)
        states = [model.forward_with_hidden_states([span], cache, (0, 2)) for model, cache in both]
        for found, expected in zip(*states, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        base_len += num_rows


def stale_values_do_not_spread(place: Place, folder: Path) -> None:
    """Blocks are handed on as they are, and a sequence before may have overflowed."""
    write_family("llama", folder)
    model = loaded(place, folder, "bfloat16" if place.is_gpu else "float32")
    hidden = []
    for stale in (0.0, torch.nan):
        cache = model.new_cache(4, BLOCK_LEN)
        cache.keys.fill_(stale)
        cache.values.fill_(stale)
        hidden.append(model.forward([PackedSpan(0, list(range(5)), np.array([2], np.int32))], cache).clone())
    assert torch.equal(*hidden)


def tied_embeddings_lie_on_the_device_once(place: Place, folder: Path) -> None:
    write_family("llama-tied", folder)
    model = loaded(place, folder)
    held = [cell.cell_contents for cell in model._head.__closure__ or ()]
    tensors = [one if torch.is_tensor(one) else getattr(one, "weight", None) for one in held]
    assert model.embedding.data_ptr() in [one.data_ptr() for one in tensors if torch.is_tensor(one)]


def copies_are_complete_before_they_are_read(place: Place, folder: Path) -> None:
    """Of pinned buffers whose memory is taken again at once, behind work that keeps the device busy."""
    span = PackedSpan(0, (1,), np.zeros(1, np.int32))
    assert pack([span], BLOCK_LEN, torch.ones(4), place.device).buffer.is_pinned() == place.is_gpu
    rng = np.random.default_rng(0)
    busy = torch.randn(1024, 1024, device=place.device)
    for size in (3, 1000, 2**18) * (50 if place.is_gpu else 1):
        sent = rng.integers(0, 2**40, size)
        busy = torch.tanh(busy @ busy)
        there = to_device(sent.copy(), place.device)
        to_device(np.zeros_like(sent), place.device)
        assert np.array_equal(to_host(there + 1), sent + 1)


def threads_use_the_device_while_graphs_are_captured(place: Place, folder: Path) -> None:
    write_family("llama", folder)
    models = [loaded(place, folder) for _ in range(2 if place.is_gpu else 1)]
    done = threading.Event()
    least, more = (2**22, 2**19) if place.is_gpu else (1, 1)

    def allocate() -> None:
        """Each time more than any freed block has, so that the driver is asked; of 18 GiB, since torch frees no blocks while
        it captures."""
        for number in takewhile(lambda _: not done.is_set(), cycle(range(128))):
            torch.ones(least + number * more, device=place.device).sum().item()

    with ThreadPoolExecutor() as threads:
        allocated = threads.submit(allocate)
        captured = [threads.submit(model.warm_up, model.new_cache(8, BLOCK_LEN)) for model in models]
        wait(captured)
        done.set()
    for one in (allocated, *captured):
        one.result()


def noise_is_that_of_the_cpu(place: Place, folder: Path) -> None:
    rng = np.random.default_rng(0)
    keys = torch.from_numpy(noise_keys(rng.integers(0, 2**64, 64, np.uint64), rng.integers(0, 2**20, 64)))[:, None]
    token_ids = torch.arange(150_000 if place.is_gpu else 500)
    assert torch.equal(gumbel(keys.to(place.device), token_ids.to(place.device)).cpu(), gumbel(keys, token_ids))


def sampling_chooses_what_the_cpu_chooses(place: Place, folder: Path) -> None:
    vocab_size, num_seeds = (50_001, 50) if place.is_gpu else (300, 1)
    for dtype, sampling in product(place.dtypes, SAMPLINGS):
        logits = (3 * torch.randn(4 * num_seeds, vocab_size, generator=torch.Generator().manual_seed(0))).to(dtype)
        states = [SamplingState(replace(sampling, seed=i), [1, 2, 3], 2) for i in range(num_seeds)]
        spans = [SampleSpan(state, (4, 5, 6), 4) for state in states]
        expected = Sampler(vocab_size, (7,)).choose(logits, spans, want_confidences=True)
        for kernel in (place.sampling_kernel(vocab_size, dtype), None):
            found = Sampler(vocab_size, (7,), kernel).choose(logits.to(place.device), spans, want_confidences=True)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected], (dtype, sampling)
            for own, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(own.confidences, other.confidences, rtol=1e-4, atol=1e-12)


def sampling_waits_once_and_on_purpose(place: Place, folder: Path) -> None:
    vocab_size = 50_001 if place.is_gpu else 300
    sampler = Sampler(vocab_size, (7,), place.sampling_kernel(vocab_size, torch.float32))
    spans = [SampleSpan(SamplingState(replace(sampling, seed=1), [1, 2, 3], 2), (), 1) for sampling in SAMPLINGS]
    logits = torch.randn(len(spans), vocab_size, device=place.device)
    expected = sampler.choose(logits, spans)  # compiles and allocates
    with place.refusing_waits():
        assert sampler.choose(logits, spans) == expected


def target_of(model: CausalModel) -> NativeTarget:
    return NativeTarget(model, NativeLimits(32, BLOCK_LEN, 8, 256, 256))


def played(engine: NativeTarget, num: int, max_tokens: int) -> list[tuple[int, ...]]:
    """Answers to prompts of several chunks, with random drafts, requests held and preempted."""
    rng = random.Random(1)
    prompts = {str(i): [rng.randrange(1, 250) for _ in range(9 + 23 * i)] for i in range(num)}
    sampling = {
        name: replace(SAMPLINGS[i % len(SAMPLINGS)], max_tokens=max_tokens, seed=i, ignore_eos=True)
        for i, name in enumerate(prompts)
    }
    found = play(
        engine,
        prompts,
        sampling,
        drafts=lambda name, length: [rng.randrange(250) for _ in range(rng.randrange(6))],
        holds=lambda name, number: rng.random() < 0.2,
        preempts=lambda name, number: rng.random() < 0.05,
    )
    return [found.outputs[name] for name in prompts]


def a_target_says_what_one_on_a_cpu_says(place: Place, folder: Path) -> None:
    """In fp32, greedy and sampled, whatever is drafted, held or preempted."""
    write_tiny_model(folder / "model", hidden_size=64)
    size = (7, 24) if place.is_gpu else (2, 2)
    model = loaded(place, folder / "model")
    assert isinstance(model.ops, CudaOps)
    assert played(target_of(model), *size) == played(target_of(factory.load_model(folder / "model", "float32")), *size)


def a_pass_is_over_when_execute_returns(place: Place, folder: Path) -> None:
    target = target_of(loaded(place, write_tiny_model(folder / "model")))
    request = a_request("a", range(30), max_tokens=1)
    target.open(request, request.prompt_token_ids)
    target.execute([Span.bound("a", 0, request.prompt_token_ids, samples=False)])
    assert not place.is_gpu or torch.cuda.current_stream().query()


def a_model_drafts_what_it_drafts_on_a_cpu(place: Place, folder: Path) -> None:
    write_tiny_model(folder / "model")
    chosen = []
    for model in (loaded(place, folder / "model"), factory.load_model(folder / "model", "float32")):
        small = SmallModel(model, num_blocks=16, vocab_size=model.config.vocab_size, eos_token_ids=(1,))
        found = []
        for i, sampling in enumerate(SAMPLINGS if place.is_gpu else SAMPLINGS[2:4]):
            small.open(str(i), range(3, 20 + i), 4, replace(sampling, seed=i))
            found += [one.token_ids for one in small.choose([Question(str(i), (9, 8), (7, 6, 5))])]
        chosen.append(found)
    assert chosen[0] == chosen[1]


def dspark_drafts_what_it_drafts_on_a_cpu(changes: dict[str, Any], place: Place, folder: Path) -> None:
    """Its parallel stage, and the drafts of the whole."""
    target = write_tiny_model(folder / "model")
    write_dspark(folder / "drafter", target, **changes)
    table = np.arange(4, dtype=np.int32)

    def compute(device: torch.device) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        stage = BlockStage(load_network(folder / "drafter", target_rows(target)), torch.float32, device)
        cache = KvCache.allocate(stage.config.shape, 4, *stage.placement)
        features = torch.randn(9, stage.config.feature_size, generator=torch.Generator().manual_seed(0)).to(device)
        stage.project([PackedSpan(0, (0,) * 9, table)], features, cache)
        block = (3, *(stage.config.mask_token_id,) * (stage.config.block_size - 1))
        hidden = stage.run([PackedSpan(9, block, table)], features[-1:], cache).cpu()
        drafter = make_dspark(folder / "drafter", target, device=device)
        for i, temperature in enumerate((0.0, 0.8)):
            drafter.open(str(i), list(range(5, 20)), 9, replace(PLAIN, temperature=temperature, seed=3))
        return hidden, [tuple(draft.token_ids) for draft in drafter.propose([Demand("0", 5), Demand("1", 5)])]

    hidden, drafts = compute(torch.device("cpu"))
    with place.loading():
        found = compute(place.device)
    torch.testing.assert_close(found[0], hidden, rtol=1e-3, atol=1e-3)
    assert found[1] == drafts
    assert all(drafts)


def kind_drafts_what_it_drafts_on_a_cpu(kind: HiddenStateKind, place: Place, folder: Path) -> None:
    """With tokens given ahead, and drafts of different lengths in one round; then rounds of as many drafts or fewer over
    contexts that have grown, whose graphs are replayed."""
    target = write_tiny_model(folder / "model", num_layers=3)
    write_speculators(folder / "drafter", target, kind, draft_token_ids=tuple(range(0, 256, 2)))

    def compute(device: torch.device) -> tuple[HiddenStateDrafter, list[Draft]]:
        drafter = make_dspark(folder / "drafter", target, device=device)
        if place.is_gpu:
            drafter.drafter.warm_up()
        for i, temperature in enumerate((0.0, 0.8, 0.8)):
            drafter.open(str(i), list(range(5, 20 + 20 * i)), 9, replace(PLAIN, temperature=temperature, seed=i))
        first = [Demand("0", 5), Demand("1", 2), Demand("2", 3, ahead=(4, 6))]
        drafts = drafter.propose(first if place.is_gpu else [first[1], Demand("2", 1, ahead=(4,))])
        for number, names in enumerate(("012", "1", "20", "012") if place.is_gpu else ("21",)):
            for name in names:
                drafter.extend(name, [number + 30, 7])
            drafts += drafter.propose([Demand(name, 6 - int(name) if place.is_gpu else 2) for name in names])
        drafter.check_integrity()
        return drafter.drafter, drafts

    _, expected = compute(torch.device("cpu"))
    with place.loading():
        drafter, found = compute(place.device)
    assert [draft.token_ids for draft in found] == [draft.token_ids for draft in expected]
    for draft, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(draft.confidences), torch.tensor(other.confidences), rtol=1e-3, atol=1e-3)
    assert [len(draft.token_ids) for draft in found[:3]] == ([5, 2, 3] if place.is_gpu else [2, 1, 2])
    graphs = drafter._sequential._on_device.graphs
    assert {key[0] for key, _ in graphs._captured} == (set(graphs.sizes) if place.is_gpu else {2})


def ranks_over_nccl_say_what_one_target_says(num_ranks: int, place: Place, folder: Path) -> None:
    """With one rank, all calls of NCCL that several ranks make."""
    if not place.is_gpu or torch.cuda.device_count() < num_ranks:
        raise Skipped(f"needs {num_ranks} GPUs")
    if num_ranks > 1 and not (find_spec("xgrammar") and find_spec("google.protobuf")):
        raise Skipped("needs xgrammar and protobuf")
    write_tiny_model(folder / "model", hidden_size=144, num_attention_heads=9, num_key_value_heads=3)
    whole = played(target_of(factory.load_model(folder / "model", "float32", "cuda")), 6, 24)
    if num_ranks == 1:
        ranks = NcclRanks(dist.HashStore(), 0, 1, "127.0.0.1", 60.0, torch.device("cuda", 0))
        assert played(target_of(factory.load_model(folder / "model", "float32", "cuda", ranks=ranks)), 6, 24) == whole
        return
    from engine.tensor_parallel.local import load_over_local_ranks

    options = {"dtype": "float32", "device": "cuda", "kv_cache_bytes": 2**24, "max_model_len": 256}
    with closing(load_over_local_ranks(num_ranks, folder / "model", options)) as engine:
        assert played(engine, 6, 24) == whole


_DYING_RECEIVER = """
import os, sys, threading, torch
from cluster.transport.tensors import TensorEnd
from cluster.transport.tensors.groups import call
end = TensorEnd(lambda frame: os._exit(9), print)
link = call(sys.argv[1], "drafter", torch.device(sys.argv[2]), end)
threading.Event().wait(60.0)
"""


def a_sender_of_hidden_states_outlives_its_receiver(place: Place, folder: Path) -> None:
    """Several times in one process: over NCCL between two GPUs, else over gloo and over shared memory."""
    over_nccl = place.is_gpu and torch.cuda.device_count() > 1
    own, other = ("cuda:0", "cuda:1") if over_nccl else ("cpu", "cpu")
    rows = torch.ones(512, 1024, device=own)
    for shares_memory in (False, False, True, True):
        reasons: queue.Queue[str] = queue.Queue()
        meeting = Meeting("127.0.0.1", shares_memory=shares_memory)
        receiver = subprocess.Popen([sys.executable, "-c", _DYING_RECEIVER, meeting.address, other])
        with mock.patch("cluster.transport.tensors.groups._MEET", timedelta(seconds=60.0)):  # it imports torch first
            sender = meeting.answer("drafter", torch.device(own), TensorEnd(lambda _: None, reasons.put))
        while sender.send(Frame((Part("r", 0, 512, 512),), (), rows)) and reasons.empty():
            rows.sum().item()
        assert reasons.get(timeout=60.0) != "it was closed"
        assert receiver.wait(60.0) == 9
    assert float(rows.sum()) == rows.numel()


def _named(check: Any, *case: Any) -> tuple[str, Check]:
    return " ".join([check.__name__.replace("_", " "), *map(str, case)]), partial(check, *case)


def parts_of_a_device_compute_at_once(place: Place, folder: Path) -> None:
    """Products in a Green Context equal those on the whole device, take longer, run beside those in the other one, and are
    complete where the other one reads them."""
    if not place.is_gpu or find_spec("cuda") is None:
        raise Skipped("needs a GPU and the package cuda-python")
    torch.ones(1, device=place.device)
    partition = green_contexts()
    half = partition.splits[0]
    matrix = torch.randn(8192, 8192, device=place.device)

    def computed(lane: Lane, num: int, start: threading.Barrier) -> tuple[torch.Tensor, float]:
        lane.enter()
        product = matrix @ matrix  # warms up
        torch.cuda.current_stream().synchronize()
        start.wait(30.0)
        began_s = time.monotonic()
        for _ in range(num):
            product = matrix @ matrix
        lane.enter()  # waits
        return product, time.monotonic() - began_s

    def at_once(*lanes: Lane) -> list[tuple[torch.Tensor, float]]:
        start = threading.Barrier(len(lanes))
        with ThreadPoolExecutor(len(lanes)) as threads:
            return list(threads.map(lambda lane: computed(lane, 20, start), lanes))

    ((whole, whole_s),), ((part, alone_s),) = at_once(partition.whole), at_once(half.target)
    (first, first_s), (second, second_s) = at_once(half.target, half.drafter)
    for found in (part, first, second):
        torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-1)
    states = HiddenStateCache((1, len(matrix)), (0,), 1, 1, torch.float32, place.device)

    def written(lane: Lane) -> None:
        lane.enter()
        states.write(torch.zeros(1, dtype=torch.int64, device=place.device), (matrix @ matrix)[:1])

    def read(lane: Lane) -> torch.Tensor:
        lane.enter()
        return states.read([(np.zeros(1, np.int32), 0, 1)]).cpu()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(written, half.target).result()
        torch.testing.assert_close(other.submit(read, half.drafter).result(), whole[:1].cpu(), rtol=1e-3, atol=1e-1)
    assert alone_s > 1.3 * whole_s, "half of the multiprocessors are as fast as all: the lane was not entered"
    assert max(first_s, second_s) < 1.5 * max(alone_s, whole_s), "the lanes compute by turns"


def rows_leave_beside_a_pass(place: Place, folder: Path) -> None:
    """Margins are those of a CPU, also while the device is busy; and rows that leave change no token."""
    write_tiny_model(folder / "model", num_layers=6, hidden_size=64)
    plainly = factory.load_model(folder / "model", "float32")
    with mock.patch.object(early_exit, "DEPTHS", (0.5, 1.0)):
        model = loaded(place, folder / "model")
        rng, ids = np.random.default_rng(1), np.arange(0, 250, 3)
        drafts, temperatures = np.array([4, 5, 200]), np.array([0.0, 0.7, 1.3], np.float32)
        rows = WatchedRows(np.array([0, 1, 5]), drafts, drafts, drafts, rng.integers(0, 2**60, 3), temperatures)
        states = [torch.from_numpy(rng.normal(size=(9, 64)).astype(np.float32)) for _ in range(2)]
        expected = ReducedScores(plainly, plainly.embedding, ids).begin(states[0], states[1], None, rows).wait()
        scores, there = exit_scores(model, model.embedding, ids), [one.to(place.device) for one in states]
        busy = torch.randn(1024, 1024, device=place.device)
        for _ in range(20 if place.is_gpu else 1):
            busy = torch.tanh(busy @ busy)
            pending = scores.begin(there[0].clone(), there[1].clone(), None, rows)
            small = [torch.full((num,), -1, device=place.device) for num in range(1, 65)]  # in memory that is free
            busy = torch.tanh(busy @ busy)
            np.testing.assert_allclose(pending.wait().values, expected.values, rtol=1e-3, atol=1e-3)
            del small
        exits = PlannedExits(model, exit_scores(model, model.embedding, np.arange(model.config.vocab_size)))
    size = (7, 24) if place.is_gpu else (2, 3)
    target = target_of(model)
    target.exit_early(exits)
    assert played(target, *size) == played(target_of(plainly), *size)
    assert exits.num_left or not place.is_gpu


CHECKS = [
    _named(kernels_launch),
    _named(operators_equal_plain_torch),
    *(_named(packed_passes_equal_the_reference, family) for family in sorted(FAMILIES)),
    _named(bfloat16_is_as_exact_as_plain_torch),
    _named(graphs_replay_what_a_plain_pass_computes),
    _named(stale_values_do_not_spread),
    _named(tied_embeddings_lie_on_the_device_once),
    _named(copies_are_complete_before_they_are_read),
    _named(threads_use_the_device_while_graphs_are_captured),
    _named(noise_is_that_of_the_cpu),
    _named(sampling_chooses_what_the_cpu_chooses),
    _named(sampling_waits_once_and_on_purpose),
    _named(a_target_says_what_one_on_a_cpu_says),
    _named(a_pass_is_over_when_execute_returns),
    _named(a_model_drafts_what_it_drafts_on_a_cpu),
    _named(dspark_drafts_what_it_drafts_on_a_cpu, {"shares_embedding": False}),
    _named(dspark_drafts_what_it_drafts_on_a_cpu, {"anchor_input": True, "anchor_input_rank": 4}),
    _named(parts_of_a_device_compute_at_once),
    _named(rows_leave_beside_a_pass),
    _named(a_sender_of_hidden_states_outlives_its_receiver),
    *(_named(kind_drafts_what_it_drafts_on_a_cpu, kind) for kind in get_args(HiddenStateKind)),
    _named(ranks_over_nccl_say_what_one_target_says, 1),
    _named(ranks_over_nccl_say_what_one_target_says, 2),
]
