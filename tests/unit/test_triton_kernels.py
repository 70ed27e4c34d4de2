"""The CUDA kernels, interpreted on the CPU: what they compute, not how fast. Skipped where Triton is not installed."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.forward import PackedSpan
from engine.ops import TorchOps
from tests.support.families import write_family
from tests.support.packing import BLOCK_LEN, compute_in_pieces, load_with, random_sequences

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on the device itself", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        pytest.skip("Triton was imported before it was told to interpret: set TRITON_INTERPRET=1", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which without a GPU nothing else needs
pytest.importorskip("triton")

from engine.cuda.graphs import blank_layout, fill, rows_as_spans
from engine.cuda.ops import CudaOps


@pytest.mark.parametrize("family", ["llama-odd-sizes", "llama-wide-heads", "qwen3"])
def test_packed_passes_give_the_logits_of_the_reference(family: str, tmp_path: Path) -> None:
    write_family(family, tmp_path)
    logits = []
    for make_ops in (CudaOps, TorchOps):
        model = load_with(make_ops, tmp_path)
        sequences, num_blocks = random_sequences(model.config.vocab_size, [1, 19, 30], random.Random(1))
        compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(2))
        logits.append(torch.cat([torch.cat(sequence.logits) for sequence in sequences]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=2e-4)


def test_a_pass_cut_into_padded_rows_gives_the_same(tmp_path: Path) -> None:
    """What a graph replays, without the graph: each row its own span, and rows of padding that touch nothing."""
    write_family("llama", tmp_path)
    model = load_with(CudaOps, tmp_path)
    plain, padded = model.new_cache(6, BLOCK_LEN), model.new_cache(6, BLOCK_LEN)
    prompt, tables = list(range(30)), (np.array([4, 1, 0], np.int32), np.array([2, 5], np.int32))
    for cache in (plain, padded):
        model.forward([PackedSpan(0, prompt, tables[0]), PackedSpan(0, prompt[:9], tables[1])], cache)
    spans = [PackedSpan(30, (7, 8, 9, 10), tables[0]), PackedSpan(9, (3,), tables[1])]
    expected = model.forward(spans, plain)
    layout = blank_layout(8, model, padded)
    fill(layout, model.lay_out(rows_as_spans(spans), BLOCK_LEN))
    state = model.enter(layout, padded)
    with torch.inference_mode():
        model.run_layers(state, 0, model.config.num_layers)
        torch.testing.assert_close(model.finish(state)[:5], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded.keys, plain.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded.values, plain.values, rtol=1e-5, atol=1e-5)
