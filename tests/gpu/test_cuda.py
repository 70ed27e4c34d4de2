"""The CUDA path against the reference, on the device."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.types import Request, SamplingParams
from engine.factory import load_model, load_target
from engine.forward import PackedSpan
from engine.ops import TorchOps
from engine.target import SpanInput
from tests.support.families import FAMILIES, write_family
from tests.support.packing import BLOCK_LEN, compute_in_pieces, load_with, random_sequences

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
