"""The packed pass against transformers: any packing of any spans gives the logits that one plain pass gives."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cpu.ops import CpuOps
from engine.forward import CausalModel, PackedSpan
from engine.kv_cache import num_blocks_for
from engine.models.config import DecoderConfig, load_config
from engine.ops import Ops, TorchOps
from tests.support.compiler import needs_compiler
from tests.support.families import FAMILIES, write_family
from tests.support.packing import BLOCK_LEN, Sequence, compute_in_pieces, load_with, random_sequences

OPS: dict[str, Callable[[DecoderConfig, torch.dtype], Ops]] = {"torch": TorchOps, "cpu": CpuOps}


def load(folder: Path, ops: str, dtype: torch.dtype = torch.float32) -> CausalModel:
    return load_with(OPS[ops], folder, dtype)


@pytest.mark.parametrize("ops", ["torch", pytest.param("cpu", marks=needs_compiler)])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ragged_batches_give_the_logits_of_transformers(family: str, ops: str, tmp_path: Path) -> None:
    theirs = write_family(family, tmp_path)
    model = load(tmp_path, ops)
    sequences, num_blocks = random_sequences(model.config.vocab_size, [1, 7, 33, 64, 150], random.Random(1))
    compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(2))
    for sequence in sequences:
        with torch.no_grad():
            expected = theirs(torch.tensor([sequence.token_ids])).logits[0]
        torch.testing.assert_close(torch.cat(sequence.logits), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.model
@pytest.mark.parametrize("ops", ["torch", pytest.param("cpu", marks=needs_compiler)])
def test_the_real_model_gives_the_logits_of_transformers(ops: str, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    model = load(model_folder, ops)
    sequences, num_blocks = random_sequences(model.config.vocab_size, [3, 60, 120], random.Random(3))
    compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(4))
    for sequence in sequences:
        with torch.no_grad():
            expected = theirs(torch.tensor([sequence.token_ids])).logits[0]
        torch.testing.assert_close(torch.cat(sequence.logits), expected, rtol=1e-4, atol=1e-3)


@needs_compiler
def test_a_long_context_is_folded_from_its_chunks(tmp_path: Path) -> None:
    """Longer than the 512 keys that the CPU kernel takes at once, in prefill chunks, verify spans and single rows."""
    write_family("llama", tmp_path)
    fast, plain = load(tmp_path, "cpu"), load(tmp_path, "torch")
    rng = random.Random(5)
    token_ids = [rng.randrange(fast.config.vocab_size) for _ in range(1100)]
    blocks = rng.sample(range(80), 69)
    caches = fast.new_cache(80, BLOCK_LEN), plain.new_cache(80, BLOCK_LEN)
    sequences = Sequence(token_ids, blocks), Sequence(token_ids, blocks)
    for num_tokens in (300, 212, 1, 4, 500, 1, 8, 1, 64, 9):
        logits = []
        for model, cache, sequence in zip((fast, plain), caches, sequences, strict=True):
            logits.append(model.logits(model.forward([sequence.span(num_tokens)], cache)))
            sequence.computed_len += num_tokens
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=2e-4)
    assert sequences[0].computed_len == len(token_ids)


@needs_compiler
def test_bfloat16_is_as_exact_as_plain_torch(tmp_path: Path) -> None:
    """Both are compared with fp32: the kernels may not lose more than the reference does."""
    write_family("llama", tmp_path)
    errors = {}
    exact: torch.Tensor | None = None
    for ops, dtype in (("torch", torch.float32), ("torch", torch.bfloat16), ("cpu", torch.bfloat16)):
        model = load(tmp_path, ops, dtype)
        sequences, num_blocks = random_sequences(model.config.vocab_size, [90], random.Random(7))
        compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(8))
        logits = torch.cat(sequences[0].logits)
        if exact is None:
            exact = logits
        else:
            errors[ops] = (logits - exact).square().mean().sqrt().item()
    assert exact is not None
    assert errors["cpu"] < 1.2 * errors["torch"]
    assert errors["cpu"] < 0.05 * exact.square().mean().sqrt().item()


@needs_compiler
def test_what_was_rolled_back_leaves_no_trace(tmp_path: Path) -> None:
    """Rejected draft tokens stay in the cache until they are overwritten; nothing may read them."""
    write_family("qwen3", tmp_path)
    model = load(tmp_path, "cpu")
    plain, rolled = model.new_cache(8, BLOCK_LEN), model.new_cache(8, BLOCK_LEN)
    rng = random.Random(9)
    token_ids = [rng.randrange(model.config.vocab_size) for _ in range(40)]
    table = np.array([6, 1, 3], np.int32)
    model.forward([PackedSpan(0, token_ids[:30], table)], plain)
    model.forward([PackedSpan(0, [*token_ids[:30], 5, 9, 2, 8, 8, 7], table)], rolled)
    model.forward([PackedSpan(30, [*token_ids[30:32], 1, 1, 1], table)], rolled)
    model.forward([PackedSpan(30, token_ids[30:32], table)], plain)
    ours, expected = (
        model.logits(model.forward([PackedSpan(32, token_ids[32:], table)], cache)) for cache in (rolled, plain)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_hidden_states_of_chosen_layers_can_leave_a_pass(tmp_path: Path) -> None:
    theirs = write_family("llama", tmp_path)
    model = load(tmp_path, "cpu")
    cache = model.new_cache(2, BLOCK_LEN)
    token_ids = list(range(20))
    spans = [PackedSpan(0, token_ids, np.array([0, 1], np.int32))]
    hidden, kept, slots = model.forward_with_hidden_states(spans, cache, (-1, 1))
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids]), output_hidden_states=True)
    theirs_kept = torch.cat([expected.hidden_states[0][0], expected.hidden_states[2][0]], dim=-1)
    torch.testing.assert_close(kept, theirs_kept, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(hidden), expected.logits[0], rtol=1e-4, atol=2e-4)
    assert slots.tolist() == list(range(20))


def test_a_pass_needs_tokens(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    model = load(tmp_path, "torch")
    cache = model.new_cache(1, BLOCK_LEN)
    with pytest.raises(ValueError, match="at least one token"):
        model.forward([], cache)
    with pytest.raises(ValueError, match="at least one token"):
        model.forward([PackedSpan(0, [], np.zeros(1, np.int32))], cache)


def test_blocks_are_counted_from_bytes(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    config = load_config(tmp_path)
    block_bytes = 3 * 2 * 2 * 32 * BLOCK_LEN * 2  # layers, keys and values, heads, head_dim, tokens, bytes
    assert num_blocks_for(config, 5 * block_bytes - 1, torch.bfloat16, BLOCK_LEN) == 4
    with pytest.raises(ValueError, match=f"at least one block of {block_bytes} bytes"):
        num_blocks_for(config, block_bytes - 1, torch.bfloat16, BLOCK_LEN)
