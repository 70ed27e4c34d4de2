"""The CUDA kernels, interpreted on the CPU: what they compute, not how fast. Skipped where Triton is not installed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from xgrammar import apply_token_bitmask_inplace

import tests.support.interpreted_triton  # isort: skip  # noqa: F401
import triton.language as tl
from triton.runtime import interpreter

from cluster.sampling_params import SamplingParams
from drafters.hidden_states import block_stage as backbone
from drafters.hidden_states import stage as stages
from drafters.hidden_states.checkpoint import load_network
from drafters.other_vocabulary import OtherVocabulary
from drafters.reduced_vocab import ReducedHead
from drafters.small_model import Question, SmallModel
from engine import sampling as sampling_module
from engine.batch_layout import PackedSpan, lay_out
from engine.cpu import build
from engine.cpu.gumbel_argmax import CpuGumbelArgmax
from engine.cuda import sampling as cuda_sampling
from engine.cuda.graphs import GraphedModel
from engine.cuda.ops import CudaOps
from engine.cuda.sampling import CudaGumbelArgmax
from engine.kv_cache import KvCache
from engine.logits import allowed_by
from engine.models.config import DecoderConfig, inverse_frequencies
from engine.noise import noise_keys
from engine.ops import Ops, TorchOps
from engine.sampling import Chosen, Sampler, SampleSpan, SamplingState
from tests.support.compiler import needs_compiler
from tests.support.device_transfers import DeviceTransfers
from tests.support.dspark import target_rows, write_dspark
from tests.support.families import write_family
from tests.support.operator_parity import check_operators, config_of
from tests.support.packing import BLOCK_LEN, compute_in_pieces, load_with, random_sequences
from tests.support.recorded_graphs import use_recorded_graphs
from tests.support.sampling_cases import states

pytestmark = pytest.mark.slow

PLAIN = SamplingParams(max_tokens=64)
EVERYTHING = replace(
    PLAIN,
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.001,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    logit_bias=((3, 2.0), (9, -1.5)),
    allowed_token_ids=tuple(range(0, 200, 2)),
    bad_words=((8,), (2, 12)),
    stop_token_ids=(14,),
    min_tokens=9,
)


class AnyGrammar:
    """A grammar that allows some tokens at each row."""

    def __init__(self, allowed: Sequence[Sequence[int]], vocab_size: int) -> None:
        bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), bool)
        for row, token_ids in enumerate(allowed):
            bits[row, list(token_ids)] = True
        self._masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))

    def masks(self, drafts: Sequence[int], num_before: int, masked_ids: Sequence[int], num_masked: int) -> Tensor:
        return self._masks[num_before : len(drafts) + 1]

    def end_in_time(self, drafts: Sequence[int], num_before: int, chosen: list[int], num_left: int) -> list[int]:
        return chosen

    def first_refused(self, token_ids: Sequence[int]) -> None:
        return None


def fused(vocab_size: int, eos: tuple[int, ...] = ()) -> Sampler:
    return Sampler(vocab_size, eos, CudaGumbelArgmax(np.arange(vocab_size)))


def assert_alike(logits: Tensor, spans: list[SampleSpan], vocab_size: int, eos: tuple[int, ...] = ()) -> None:
    """Tokens and errors are the same, and so are logprobs; confidences to rounding."""
    before = logits.clone()
    expected = Sampler(vocab_size, eos).choose(logits, spans, want_confidences=True)
    found = fused(vocab_size, eos).choose(logits, spans, want_confidences=True)
    assert torch.equal(logits.nan_to_num(0.5), before.nan_to_num(0.5))
    for own, other in zip(found, expected, strict=True):
        assert replace(own, confidences=()) == replace(other, confidences=())
        assert own.confidences == pytest.approx(other.confidences, rel=1e-4, abs=1e-12)


@settings(max_examples=max(1, settings.default.max_examples // 2))
@given(data=st.data())
def test_choices_equal_the_reference(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 2, 63, 64, 65, 200, 300]))
    requests = data.draw(st.lists(states(vocab_size), min_size=1, max_size=3))
    spans = [SampleSpan(SamplingState(s, ids, n), drafts, rows) for s, ids, n, drafts, rows in requests]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(sum(span.num_rows for span in spans), vocab_size + 3, generator=generator)
    logits *= data.draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    if data.draw(st.booleans()):
        logits = logits.round(decimals=1)  # ties
    if data.draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    logits = logits.to(data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))
    logits[:, vocab_size:] = 99.0  # padding
    assert_alike(logits, spans, vocab_size, (vocab_size // 2,))


@pytest.mark.parametrize(
    "sampling", [PLAIN, EVERYTHING, replace(PLAIN, top_p=0.95, temperature=1.5), replace(PLAIN, temperature=0.0)]
)
def test_choices_over_a_vocabulary_of_five_thousand_equal_the_reference(sampling: SamplingParams) -> None:
    logits = 3 * torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    assert_alike(logits, [SampleSpan(SamplingState(replace(sampling, seed=5), [1, 2, 3], 2), (4, 6), 3)], 5000, (7,))


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, float(np.nextafter(0.5, 1.0)), float(np.nextafter(0.75, 0.0))])
def test_a_nucleus_that_ends_on_its_bound_is_the_same(top_p: float) -> None:
    """Four equally probable tokens in two pairs of ties, and more that have no weight at all."""
    logits = torch.full((1, 130), -100.0)
    logits[0, [5, 70, 71, 129]] = 2.0
    near = logits.clone()
    near[0, [5, 70]] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    for x in (logits, near):
        for seed in range(8):
            state = SamplingState(replace(PLAIN, top_p=top_p, seed=seed), [1], 1)
            assert_alike(x, [SampleSpan(state, (), 1)], 130)


@pytest.mark.parametrize("spread", [0.001, 40.0])
def test_filters_that_keep_most_of_a_vocabulary_or_little_are_the_same(spread: float) -> None:
    """Nearly uniform logits, and some of which few lie near the largest: fewer than top-k asks for."""
    logits = spread * torch.randn(1, 700, generator=torch.Generator().manual_seed(2))
    for sampling in (replace(PLAIN, top_k=350), replace(PLAIN, top_p=0.999), replace(PLAIN, top_k=300, top_p=0.999)):
        assert_alike(logits, [SampleSpan(SamplingState(replace(sampling, seed=3), [1], 1), (), 1)], 700)


@pytest.mark.parametrize(("filters", "drops"), [({"top_k": 1}, True), ({"top_k": 2}, True), ({"top_p": 0.99}, False)])
def test_filters_are_exact_far_below_the_likely_tokens(filters: dict[str, Any], drops: bool) -> None:
    """As many likely tokens as a filter keeps, or fewer; by a seed with which one of many others would win."""
    logits = torch.full((1, 3000), -12.01)
    logits[0, 1234], logits[0, 77] = 0.0, -12.005
    span_of = [SampleSpan(SamplingState(replace(PLAIN, seed=seed), [1], 1), (), 1) for seed in range(400)]
    chosen = Sampler(3000, ()).choose(logits.expand(400, -1), span_of)
    seed = next(i for i, one in enumerate(chosen) if one.token_ids[0] not in (1234, 77))
    span = SampleSpan(SamplingState(replace(PLAIN, seed=seed, **filters), [1], 1), (), 1)
    assert_alike(logits, [span], 3000)
    assert (fused(3000).choose(logits, [span])[0].token_ids[0] in (1234, 77)) == drops


def test_masks_of_grammars_allow_on_a_gpu_what_they_allow_on_a_cpu() -> None:
    masks = torch.randint(-(2**31), 2**31, (3, 5), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    logits = torch.zeros(3, 150)
    apply_token_bitmask_inplace(logits, masks, vocab_size=150)
    assert torch.equal(allowed_by(masks, 150), logits == 0)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_grammar_comes_before_bad_words_and_both_before_the_rest(temperature: float) -> None:
    vocab_size = 150
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(4))
    allowed = [[5, 31, 32, 63, 64, 149], [31], [31, 95]]  # the second row leaves a bad word only
    sampling = replace(PLAIN, temperature=temperature, bad_words=((31,), (149,)), logit_bias=((31, 9.0),), seed=1)
    grammar: Any = AnyGrammar(allowed, vocab_size)
    spans = [SampleSpan(SamplingState(sampling, [1], 1, grammar), (5, 31), 3)]
    assert_alike(logits, spans, vocab_size)
    (chosen,) = fused(vocab_size).choose(logits, spans)
    assert chosen.token_ids[1:] == (31, 95)
    only = replace(sampling, allowed_token_ids=(32, 64))
    assert_alike(logits, [SampleSpan(SamplingState(only, [1], 1, grammar), (5, 31), 3)], vocab_size)


def test_rows_without_a_choice_fail_alone() -> None:
    good = torch.randn(2, 10, generator=torch.Generator().manual_seed(5))
    with_nan = good.clone()
    with_nan[1, 3] = torch.nan
    empty, infinite = torch.full((2, 10), -torch.inf), torch.full((2, 10), torch.inf)
    logits = torch.cat([good, empty, torch.full((2, 10), torch.nan), infinite, good, with_nan])
    for sampling in (PLAIN, replace(PLAIN, temperature=0.0), replace(PLAIN, top_p=0.5), replace(PLAIN, top_logprobs=3)):
        spans = [SampleSpan(SamplingState(sampling, [0], 1), (1,), 2) for _ in range(6)]
        expected = Sampler(10, ()).choose(logits, spans)
        found = fused(10).choose(logits, spans)
        assert [(one.token_ids, one.error, one.is_refused) for one in found] == [
            (one.token_ids, one.error, one.is_refused) for one in expected
        ]


def test_a_choice_depends_on_nothing_else_in_the_batch() -> None:
    logits = 3 * torch.randn(6, 300, generator=torch.Generator().manual_seed(6))
    params = [PLAIN, EVERYTHING, replace(PLAIN, top_p=0.8)]
    spans = [SampleSpan(SamplingState(replace(params[i % 3], seed=i), [i], 1), (), 1) for i in range(6)]
    sampler = fused(300, (3,))
    together = sampler.choose(logits, spans, want_confidences=True)
    assert together == [sampler.choose(logits[i : i + 1], [span], True)[0] for i, span in enumerate(spans)]


@needs_compiler
@pytest.mark.parametrize("token_ids", [range(300), range(37, 290), sorted({*range(40), *range(100, 900, 7)})])
def test_the_choice_among_any_tokens_equals_the_kernel_of_the_cpu(token_ids: Sequence[int]) -> None:
    """Of a whole vocabulary, of a rank's part, and of a drafter's reduced head; with floors, and the lead of the winner."""
    ids, rng = np.array(token_ids), np.random.default_rng(7)
    logits = 2 * torch.randn(8, len(ids), generator=torch.Generator().manual_seed(7))
    logits[3] = 0.0
    logits[4] = logits[4].round()
    keys = noise_keys(rng.integers(0, 2**64, 8, np.uint64), rng.integers(0, 2**20, 8))
    temperatures = np.array([0, 1, 0.5, 1, 0, 2, 1e-9, 0.7], np.float32)
    floors = np.array([-np.inf, -np.inf, -3, -np.inf, -1, -0.5, 0, -np.inf], np.float32)
    results = []
    for kernel in (CudaGumbelArgmax(ids), CpuGumbelArgmax(build.load_library(torch.float32), torch.float32, ids)):
        margins = np.empty(8, np.float32)
        results.append([*kernel(logits, keys, temperatures, floors, margins), margins])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


META = torch.device("meta")


class Counting(DeviceTransfers):
    """The meta device stands for a GPU: kernels are counted, and the last copy, which alone may wait, reads zeros."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(META)
        self.num_reads = 0
        monkeypatch.setattr(cuda_sampling, "to_host", self._read)

    def launch(self, kernel: object, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        self.num_operations += 1

    def _read(self, tensor: Tensor) -> np.ndarray:
        self.num_reads += 1
        self.num_operations += 2  # pinned memory, and the copy
        return np.zeros(tensor.shape)


GREEDY = replace(PLAIN, temperature=0.0)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("samplings", [[GREEDY], [PLAIN], [EVERYTHING], [GREEDY, PLAIN, EVERYTHING]])
@pytest.mark.parametrize("vocab", ["whole", "reduced"])
def test_a_pass_takes_at_most_eight_operations_and_one_wait(
    batch: int, samplings: list[SamplingParams], vocab: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Counting(monkeypatch)
    ids = torch.arange(0, 1000, 1 if vocab == "whole" else 3)
    kernel = CudaGumbelArgmax(ids.numpy(), device.launch)
    sampler = Sampler(1000, (7,), kernel)
    head = ReducedHead(ids, 1000, sampler, kernel)
    spans = [
        SampleSpan(SamplingState(replace(samplings[i % len(samplings)], seed=i), [1, 2, 3], 2), (4, 6), 3)
        for i in range(batch)
    ]
    logits = torch.empty(3 * batch, len(ids), device=META)

    def choose() -> list[Chosen]:
        return sampler.choose(logits, spans) if vocab == "whole" else head.choose(logits, spans)

    choose()  # allocates
    with device:
        before = device.num_operations
        chosen = choose()
    assert device.num_operations - before <= 8
    assert device.copies == ["queued"]
    assert device.num_reads == 2  # of two calls
    assert [len(one.token_ids) for one in chosen] == [3] * batch


def test_logprobs_take_one_more_wait_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Counting(monkeypatch)
    monkeypatch.setattr(sampling_module, "to_host", device._read)
    sampler = Sampler(1000, (), CudaGumbelArgmax(np.arange(1000), device.launch))
    spans = [SampleSpan(SamplingState(replace(PLAIN, top_logprobs=i % 4), [1], 1), (), 1) for i in range(8)]
    with device:
        sampler.choose(torch.empty(8, 1000, device=META), spans)
    assert device.num_reads == 2


@pytest.mark.parametrize("sampling", [PLAIN, replace(PLAIN, top_p=0.7, presence_penalty=1.0, bad_words=((6,),))])
def test_a_reduced_head_is_sampled_as_the_whole_vocabulary(sampling: SamplingParams) -> None:
    known = torch.arange(2, 260, 4)
    logits = torch.randn(2, len(known), generator=torch.Generator().manual_seed(8))
    whole = torch.full((2, 260), -torch.inf)
    whole[:, known] = logits
    spans = [SampleSpan(SamplingState(replace(sampling, seed=2), (6, 8, 6), 2), (10,), 2)]
    sampler = Sampler(260, ())
    found = ReducedHead(known, 260, sampler, CudaGumbelArgmax(known.numpy())).choose(logits, spans)
    (expected,) = sampler.choose(whole, spans, want_confidences=True)
    assert found[0].token_ids == expected.token_ids
    assert found[0].confidences == pytest.approx(expected.confidences, rel=1e-4)


def test_a_pass_of_a_model_drafter_waits_once(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Counting(monkeypatch)

    def make_ops(config: DecoderConfig, dtype: torch.dtype, *_: object, **__: object) -> Ops:
        return CudaOps(config, dtype, launch=device.launch)

    model = load_with(make_ops, tiny_model_folder, device="meta")
    small = SmallModel(model, num_blocks=4, vocab_size=model.config.vocab_size, eos_token_ids=(1,))
    for name, sampling in (("a", PLAIN), ("b", replace(EVERYTHING, allowed_token_ids=(), top_logprobs=2))):
        small.open(name, range(3, 7), 4, sampling)
    questions = [Question("a", drafts=(11, 12)), Question("b", drafts=(9,))]
    small.choose(questions)  # allocates
    device.copies.clear()
    with device:
        chosen = small.choose(questions)
    assert device.num_reads == 2  # of two passes
    assert device.copies == ["queued"] * 2  # the layout, and the parameters of sampling
    assert [len(one.token_ids) for one in chosen] == [3, 2]


# ---- kernels of the forward pass


def test_packed_passes_give_the_logits_of_the_reference(tmp_path: Path) -> None:
    write_family("llama-odd-sizes", tmp_path)
    logits = []
    for make_ops in (CudaOps, TorchOps):
        model = load_with(make_ops, tmp_path)
        sequences, num_blocks = random_sequences(model.config.vocab_size, [1, 19], random.Random(1))
        compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(2))
        logits.append(torch.cat([torch.cat(sequence.logits) for sequence in sequences]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=2e-4)


@pytest.fixture(autouse=True)
def widened_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as uint16, and its ``tl.dot`` multiplies those numbers: here it widens them first."""
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        )
        return plain(builder, a, b, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "heads", "qk_norm"), [(64, (4, 4), False), (80, (6, 2), True), (96, (3, 1), False), (256, (2, 1), True)]
)
def test_each_operator_gives_what_plain_torch_gives(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], qk_norm: bool
) -> None:
    config = config_of(head_dim, *heads, qk_norm)
    check_operators(CudaOps(config, dtype), config, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_an_earlier_owner_left_in_a_block_is_not_read(dtype: torch.dtype) -> None:
    """Blocks are handed on as they are: a sequence whose values overflowed must not spoil the next one."""
    config = config_of(64, 4, 2, False)
    cache = KvCache.allocate(config, 2, dtype, torch.device("cpu"), BLOCK_LEN)
    ops = CudaOps(config, dtype)
    spans = [PackedSpan(0, (0,) * 3, np.array([1], np.int32))]
    layout = lay_out(spans, BLOCK_LEN, torch.tensor(inverse_frequencies(config)), torch.device("cpu"))
    qkv = torch.randn(3, config.q_size + 2 * config.kv_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    attended = []
    for stale in (0.0, torch.nan):
        keys, values = (torch.full_like(x[0], stale) for x in (cache.keys, cache.values))
        queries = ops.rotate_and_store(qkv, None, layout, keys, values)
        attended.append(ops.attention(queries, layout, keys, values))
    assert torch.equal(*attended)


@pytest.fixture
def num_recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return use_recorded_graphs(monkeypatch.setattr)


def test_replayed_passes_give_what_plain_ones_give(tiny_model_folder: Path, num_recorded: list[int]) -> None:
    """Small passes are replayed, each row its own span, with rows of padding that touch nothing; large ones are not."""
    layers = (-1, 0, 1)
    graphed, plain = load_with(CudaOps, tiny_model_folder, kind=GraphedModel), load_with(CudaOps, tiny_model_folder)
    caches = [graphed.new_cache(8, BLOCK_LEN), plain.new_cache(8, BLOCK_LEN)]
    long, short = np.array([4, 1, 0, 6, 3, 7], np.int32), np.array([2, 5], np.int32)
    base_len = 0
    for num_rows in (17, 2, 1, 5, 1):
        spans = [PackedSpan(base_len, list(range(num_rows)), long), PackedSpan(base_len // 2, (7,), short)]
        outputs = [
            model.forward_with_hidden_states(spans, cache, layers)
            for model, cache in zip((graphed, plain), caches, strict=True)
        ]
        for found, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        base_len += num_rows
    assert num_recorded == [4, 2, 8]
    for found, expected in zip((caches[0].keys, caches[0].values), (caches[1].keys, caches[1].values), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_is_warm_records_nothing_while_it_serves(tiny_model_folder: Path, num_recorded: list[int]) -> None:
    model = load_with(CudaOps, tiny_model_folder, kind=GraphedModel)
    small = SmallModel(model, num_blocks=4, vocab_size=model.config.vocab_size, eos_token_ids=(1,))
    assert num_recorded == [1, 2, 4, 8]
    small.open("a", range(3, 7), 4, SamplingParams(max_tokens=8, temperature=0.0))
    small.choose([Question("a", drafts=(11, 12))])
    assert num_recorded == [1, 2, 4, 8]


@pytest.mark.parametrize("more", [{"temperature": 0.0}, {"top_p": 0.7, "presence_penalty": 1.0}])
def test_a_drafter_of_another_vocabulary_chooses_among_columns_in_the_targets_order(
    more: dict[str, Any], tiny_model_folder: Path, num_recorded: list[int]
) -> None:
    """Two of three tokens, under other numbers, behind a replayed pass."""
    spelled = [bytes([i]) for i in range(256)]
    own = [text if i % 3 else b"" for i, text in enumerate(random.Random(2).sample(spelled, 256))]
    vocabulary, found = OtherVocabulary(own, spelled, {}, {}), []
    drafts = tuple(vocabulary.output_ids[:2].tolist())
    plain = load_with(TorchOps, tiny_model_folder)
    for model in (load_with(CudaOps, tiny_model_folder, kind=GraphedModel), plain):
        small = SmallModel(model, num_blocks=4, vocab_size=257, eos_token_ids=(256,), vocabulary=vocabulary)
        for seed in range(3):
            small.open(f"{seed}", drafts, 2, SamplingParams(8, seed=seed, **more))
        found.append(small.choose([Question(f"{seed}", drafts=drafts[:seed]) for seed in range(3)]))
    for seed, (one, expected) in enumerate(zip(*found, strict=True)):
        assert one.token_ids == expected.token_ids != ()
        if more.get("temperature") == 0.0:
            own_ids = vocabulary.own(drafts + drafts[:seed])
            hidden = plain.forward([PackedSpan(0, own_ids, np.arange(4, dtype=np.int32))], plain.new_cache(4))
            columns = plain.logits(hidden)[-1][vocabulary.columns]
            assert one.token_ids[-1] == vocabulary.output_ids[columns.argmax()]
        assert {*one.token_ids} <= {*vocabulary.output_ids.tolist()}
        assert one.confidences == pytest.approx(expected.confidences, rel=1e-3)


def test_a_pass_takes_one_copy_to_the_device_and_mixes_no_devices(tmp_path: Path, num_recorded: list[int]) -> None:
    """The meta device stands for a GPU: it computes nothing, but knows which tensors are not on it."""

    def make_ops(config: DecoderConfig, dtype: torch.dtype, *_: object, **__: object) -> Ops:
        return CudaOps(config, dtype, launch=lambda *args, **constants: None)

    write_family("llama-tied", tmp_path)
    model = load_with(make_ops, tmp_path, device="meta", kind=GraphedModel)
    cache = model.new_cache(8, BLOCK_LEN)
    table = np.arange(8, dtype=np.int32)
    for num_rows in (40, 3):
        model.forward_with_hidden_states([PackedSpan(0, (5,) * num_rows, table)], cache, (0, 2))  # records
        with DeviceTransfers(torch.device("meta")) as device:
            model.forward_with_hidden_states([PackedSpan(0, (5,) * num_rows, table)], cache, (0, 2))
        assert device.copies == ["queued"]


@pytest.mark.parametrize("changes", [{"shares_embedding": False}, {"anchor_input": True, "anchor_input_rank": 4}])
def test_the_parallel_stage_of_dspark_lies_on_the_device_whole(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    def make_ops(config: DecoderConfig, dtype: torch.dtype, *_: object, **__: object) -> Ops:
        return CudaOps(config, dtype, launch=lambda *args, **constants: None)

    for module in (stages, backbone):
        monkeypatch.setattr(module, "make_ops", make_ops)
    folder = write_dspark(tmp_path, tiny_model_folder, **changes)
    network = load_network(folder, target_rows(tiny_model_folder))
    at = torch.device("meta")
    stage = backbone.BlockStage(network, torch.float32, at)
    cache = KvCache.allocate(stage.config.shape, 4, *stage.placement)
    features = torch.empty(9, stage.config.feature_size, device=at)
    table = np.arange(4, dtype=np.int32)
    with DeviceTransfers(at) as device:
        stage.project([PackedSpan(0, (0,) * 9, table)], features, cache)
        hidden = stage.run([PackedSpan(9, (0,) * stage.config.block_size, table)], features[:1], cache)
    assert hidden.device == at
    assert device.copies == ["queued", "queued"]
