"""The CUDA kernels, interpreted on the CPU: what they compute, not how fast. Skipped where Triton is not installed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.support.interpreted_triton  # isort: skip  # noqa: F401
import triton.language as tl
from triton.runtime import interpreter

from cluster.sampling_params import SamplingParams
from drafters.hidden_states import block_stage as backbone
from drafters.hidden_states import stage as stages
from drafters.hidden_states.checkpoint import load_network
from drafters.other_vocabulary import OtherVocabulary
from drafters.small_model import Question, SmallModel
from engine.batch_layout import PackedSpan, lay_out
from engine.cuda.graphs import GraphedModel
from engine.cuda.ops import CudaOps
from engine.kv_cache import KvCache
from engine.models.config import DecoderConfig, inverse_frequencies
from engine.ops import Ops, TorchOps
from tests.support.device_transfers import DeviceTransfers
from tests.support.dspark import target_rows, write_dspark
from tests.support.families import write_family
from tests.support.operator_parity import check_operators, config_of
from tests.support.packing import BLOCK_LEN, compute_in_pieces, load_with, random_sequences
from tests.support.recorded_graphs import use_recorded_graphs

pytestmark = pytest.mark.slow


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
