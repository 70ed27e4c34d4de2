"""Attention in rectangular tensors against the ragged path, and the search for pieces that pad least."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import rectangular_attention
from benchmarks.rectangular_attention import RectangularOps, decomposed, padded
from engine.models.config import DecoderConfig
from engine.ops import Ops, TorchOps
from tests.support.families import write_family
from tests.support.packing import BLOCK_LEN, compute_in_pieces, load_with, random_sequences

LENS = [1, 7, 33, 64, 150]


def logits(ops: type[Ops] | Sequence[float], folder: Path) -> list[torch.Tensor]:
    """Of the same spans of ragged sequences; numbers: the rows that a sequence may take in the KV tensor."""

    def make(config: DecoderConfig, dtype: torch.dtype) -> Ops:
        return TorchOps(config, dtype) if isinstance(ops, type) else RectangularOps(config, dtype, *ops)

    model = load_with(make, folder, torch.float32)
    sequences, num_blocks = random_sequences(model.config.vocab_size, LENS, random.Random(1))
    compute_in_pieces(model, sequences, model.new_cache(num_blocks, BLOCK_LEN), random.Random(2))
    return [torch.cat(sequence.logits) for sequence in sequences]


@pytest.mark.parametrize("rows_per_sequence", [1.0, 1.5, 2.0, 8.0])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_it_gives_what_the_ragged_path_gives(family: str, rows_per_sequence: float, tmp_path: Path) -> None:
    write_family(family, tmp_path)
    for mine, theirs in zip(logits([rows_per_sequence], tmp_path), logits(TorchOps, tmp_path), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_pieces_with_softmaxes_of_their_own_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPIN, section V.A: each piece alone has the wrong denominator. The test above sees it."""

    def means(
        out: torch.Tensor, sums: torch.Tensor, peaks: torch.Tensor, owners: torch.Tensor, num_spans: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.where(sums[..., None] > 0, out / sums[..., None], 0.0)
        counts = torch.zeros(num_spans).index_add(0, owners, torch.ones(len(owners)))
        total = out.new_zeros(num_spans, *out.shape[1:]).index_add(0, owners, own)
        return total, counts.view(-1, 1, 1, 1).expand(total.shape[:-1])

    write_family("llama", tmp_path)
    right = torch.cat(logits(TorchOps, tmp_path))
    monkeypatch.setattr(rectangular_attention, "_merged", means)
    assert not torch.allclose(torch.cat(logits([8.0], tmp_path)), right, rtol=1e-2, atol=1e-2)


def test_the_example_of_the_paper_needs_no_padding() -> None:
    """Figure 9: a request twice as long as the two others."""
    lens = np.array([6, 3, 3])
    assert padded(lens).num_cells == 18
    pieces = decomposed(lens, 4)
    assert (pieces.num_blocks, pieces.owners.tolist(), pieces.firsts.tolist()) == (3, [0, 0, 1, 2], [0, 3, 0, 0])
    assert pieces.num_cells == lens.sum()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 20))
def test_no_other_length_of_pieces_pads_less(lens: list[int], num_more: int) -> None:
    pieces, max_rows = decomposed(np.array(lens), len(lens) + num_more), len(lens) + num_more
    of_each = {length: sum(-(-n // length) for n in lens) for length in range(1, max(lens) + 1)}
    assert pieces.num_cells == min(length * rows for length, rows in of_each.items() if rows <= max_rows)
    covered = [
        [
            first + i
            for first, owner in zip(pieces.firsts, pieces.owners, strict=True)
            if owner == at
            for i in range(pieces.num_blocks)
        ]
        for at in range(len(lens))
    ]
    assert all(blocks[:n] == list(range(n)) for blocks, n in zip(covered, lens, strict=True))


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="3 sequences need as many rows"):
        decomposed(np.array([1, 2, 3]), 2)
