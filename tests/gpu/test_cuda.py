"""The CUDA path against the reference, on the device."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.sampling_params import SamplingParams
from cluster.types import Request
from drafters.dspark.backbone import Backbone
from drafters.dspark.checkpoint import load_network
from engine.batch_layout import pack
from engine.factory import load_model, load_target, make_ops
from engine.forward import PackedSpan
from engine.ops import TorchOps
from engine.target import SpanInput
from tests.support.dspark import target_rows, write_dspark
from tests.support.families import FAMILIES, write_family
from tests.support.packing import BLOCK_LEN, compute_in_pieces, load_with, random_sequences
from tests.support.triton_aot import DTYPES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_passes_give_the_logits_of_the_reference(family: str, tmp_path: Path) -> None:
    """Small passes go through graphs, large ones do not; both are in this mixture."""
    write_family(family, tmp_path)
    logits = []
    for model in (load_model(tmp_path, "float32", "cuda"), load_with(TorchOps, tmp_path)):
        sequences, num_blocks = random_sequences(model.config.vocab_size, [1, 7, 33, 64, 150], random.Random(1))
        compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(2))
        logits.append(torch.cat([torch.cat(sequence.logits).cpu() for sequence in sequences]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def test_every_padded_size_replays_what_a_plain_pass_computes(tmp_path: Path) -> None:
    from engine.cuda.ops import CudaOps

    write_family("llama", tmp_path)
    graphed = load_model(tmp_path, "float32", "cuda")
    plain = load_with(CudaOps, tmp_path, device="cuda")
    caches = graphed.new_cache(8, BLOCK_LEN), plain.new_cache(8, BLOCK_LEN)
    table = np.arange(8, dtype=np.int32)
    base_len = 0
    for num_rows in (1, 2, 3, 5, 9, 17, 32, 40, 4):
        span = PackedSpan(base_len, list(range(num_rows)), table)
        hidden = [model.forward([span], cache) for model, cache in zip((graphed, plain), caches, strict=True)]
        torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-4, atol=1e-4)
        base_len += num_rows


CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_len", [16, 32, 64])
def test_kernels_compile_and_launch_here(dtype: str, head_dim: int, block_len: int) -> None:
    from engine.cuda.ops import CudaOps

    config = Case(0, dtype, head_dim, (8, 2), block_len, True, 512).config
    assert isinstance(make_ops(config, DTYPES[dtype], CUDA, block_len=block_len), CudaOps), "it fell back to plain torch"


def test_bfloat16_is_as_exact_as_plain_torch(tmp_path: Path) -> None:
    """Both against fp32: neither loses more than the other by much."""
    write_family("qwen3", tmp_path)
    logits = []
    for model in (
        load_with(TorchOps, tmp_path),
        load_with(TorchOps, tmp_path, torch.bfloat16, "cuda"),
        load_model(tmp_path, "bfloat16", "cuda"),
    ):
        sequences, num_blocks = random_sequences(model.config.vocab_size, [1, 33, 150], random.Random(1))
        compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(2))
        logits.append(torch.cat([torch.cat(sequence.logits).cpu() for sequence in sequences]))
    exact, plain, ours = logits
    assert (ours - exact).square().mean() <= 1.5 * (plain - exact).square().mean()


def test_stale_values_behind_a_sequence_do_not_spread(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    model = load_model(tmp_path, "bfloat16", "cuda")
    hidden = []
    for stale in (0.0, torch.nan):
        cache = model.new_cache(4, BLOCK_LEN)
        cache.keys.fill_(stale)
        cache.values.fill_(stale)
        span = PackedSpan(0, list(range(5)), np.array([2], np.int32))
        hidden.append(model.forward([span], cache).clone())
    assert torch.equal(*hidden)


def test_a_pass_is_over_when_execute_returns(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    target = load_target(tmp_path, dtype="bfloat16", device="cuda", kv_cache_bytes=2**24, max_model_len=512)
    request = Request("a", tuple(range(100)), SamplingParams(max_tokens=1), arrival_s=0.0)
    target.open(request, request.prompt_token_ids)
    target.execute([SpanInput("a", 0, request.prompt_token_ids, samples=False)])
    assert torch.cuda.current_stream().query()


def test_other_threads_use_the_device_while_graphs_are_captured(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    models = [load_model(tmp_path, "bfloat16", "cuda") for _ in range(2)]
    errors: list[Exception] = []
    done = threading.Event()

    def allocate() -> None:
        size = 2**22
        try:
            while not done.is_set():
                size += 2**21  # never what a freed block has: the driver is asked each time
                torch.ones(size, device="cuda").sum().item()
        except RuntimeError as error:
            errors.append(error)

    def capture(index: int) -> None:
        try:
            models[index].warm_up(models[index].new_cache(8, BLOCK_LEN))
        except RuntimeError as error:
            errors.append(error)

    allocating = threading.Thread(target=allocate)
    capturing = [threading.Thread(target=capture, args=(i,)) for i in range(2)]
    for thread in (allocating, *capturing):
        thread.start()
    for thread in capturing:
        thread.join()
    done.set()
    allocating.join()
    assert not errors


def test_layouts_are_copied_from_pinned_memory() -> None:
    assert pack([PackedSpan(0, (1,), np.zeros(1, np.int32))], BLOCK_LEN, torch.ones(4), CUDA).buffer.is_pinned()


def test_tied_embeddings_lie_on_the_device_once(tmp_path: Path) -> None:
    write_family("llama-tied", tmp_path)
    model = load_model(tmp_path, "bfloat16", "cuda")
    addresses = {cell.cell_contents.weight.data_ptr() for cell in model._head.__closure__ or ()}
    assert model.embedding.data_ptr() in addresses


@pytest.mark.parametrize("changes", [{"shares_embedding": False}, {"anchor_input": True, "anchor_input_rank": 4}])
def test_dspark_drafts_on_the_device_what_it_drafts_on_a_cpu(
    tmp_path: Path, tiny_model_folder: Path, changes: dict[str, object]
) -> None:
    folder = write_dspark(tmp_path, tiny_model_folder, **changes)
    table = np.arange(4, dtype=np.int32)
    hidden = []
    for device in ("cpu", "cuda"):
        stage = Backbone(load_network(folder, target_rows(tiny_model_folder)), torch.float32, torch.device(device))
        cache = stage.new_cache(4)
        features = torch.randn(9, stage.config.feature_size, generator=torch.Generator().manual_seed(0)).to(device)
        stage.project([PackedSpan(0, (0,) * 9, table)], features, cache)
        block = (3, *(stage.config.mask_token_id,) * (stage.config.block_size - 1))
        hidden.append(stage.run([PackedSpan(9, block, table)], features[-1:], cache).cpu())
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-3, atol=1e-3)


@pytest.mark.model
def test_a_target_on_the_device_says_what_one_on_the_cpu_says(model_folder: Path) -> None:
    prompt = tuple(random.Random(3).randrange(3, 40000) for _ in range(50))
    outputs = []
    for device in ("cuda", "cpu"):
        target = load_target(model_folder, dtype="float32", device=device, max_model_len=128)
        request = Request("a", prompt, SamplingParams(max_tokens=20, temperature=0.0), arrival_s=0.0)
        tokens, base_len = list(prompt), target.open(request, prompt)
        while len(tokens) < len(prompt) + 20:
            outcome = target.execute([SpanInput("a", base_len, tuple(tokens[base_len:]))])[0]
            base_len = len(tokens)
            tokens += outcome.token_ids
        outputs.append(tokens)
        target.check_integrity()
    assert outputs[0] == outputs[1]
