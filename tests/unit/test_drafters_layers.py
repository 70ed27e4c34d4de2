"""Drafters of a few layers with a reduced head: the same choices as the whole head's, among the tokens that it knows."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import ModelUnavailable
from cluster.sampling_params import SamplingParams
from drafters.layers import SINGLE, TOKEN_IDS, load_layers
from drafters.model import ModelDrafter
from drafters.protocol import Demand, Draft
from drafters.reduced_vocab import ReducedHead
from drafters.small_model import SmallModel
from engine.factory import load_model, make_ops
from engine.models.config import load_config
from engine.ops import GumbelArgmax
from engine.sampling import Sampler, SampleSpan, SamplingState
from tests.support.tiny_model import write_tiny_layers, write_tiny_model

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
NOISY = SamplingParams(max_tokens=64, temperature=0.9, seed=5, ignore_eos=True)
VOCAB_SIZE = 257


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3)


def drafter(folder: Path, target: Path) -> ModelDrafter:
    model, output_ids = load_layers(folder, target, "float32", "cpu")
    return ModelDrafter(SmallModel(model, num_blocks=16, vocab_size=VOCAB_SIZE, eos_token_ids=(256,), output_ids=output_ids))


def draft(drafter: ModelDrafter, sampling: SamplingParams, num_requests: int = 1) -> list[Draft]:
    names = [f"r{i}" for i in range(num_requests)]
    for i, name in enumerate(names):
        drafter.open(name, [10 + i, 20, 30, 40, 50], 5, sampling)
    return drafter.propose([Demand(name, 12) for name in names])


def kernel_of(target: Path, token_ids: torch.Tensor, dtype: torch.dtype) -> GumbelArgmax | None:
    """None without a compiler."""
    return make_ops(load_config(target), dtype, torch.device("cpu")).gumbel_argmax(token_ids.numpy())


@pytest.mark.parametrize("token_ids", [None, [[1]], [0.5, 0.7], [3, 3], [-1, 2], [0, VOCAB_SIZE]])
def test_no_file_and_no_list_of_tokens_are_refused(target: Path, tmp_path: Path, token_ids: list[Any] | None) -> None:
    path = write_tiny_layers(tmp_path, target, range(9)) / SINGLE
    if token_ids is None:
        path.write_bytes(path.read_bytes()[:100])
    else:
        save_file(load_file(path) | {TOKEN_IDS: torch.tensor(token_ids)}, path)
    with pytest.raises(ModelUnavailable):
        load_layers(tmp_path, target, "float32", "cpu")


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_a_head_that_knows_every_token_changes_nothing(target: Path, tmp_path: Path, sampling: SamplingParams) -> None:
    reduced = drafter(write_tiny_layers(tmp_path, target, range(VOCAB_SIZE)), target)
    model = load_model(target, "float32", num_layers=2)
    whole = ModelDrafter(SmallModel(model, num_blocks=16, vocab_size=VOCAB_SIZE, eos_token_ids=(256,)))
    for a, b in zip(draft(reduced, sampling, 3), draft(whole, sampling, 3), strict=True):
        assert a.token_ids == b.token_ids
        assert a.confidences == pytest.approx(b.confidences, rel=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_only_known_tokens_are_drafted_and_the_best_of_them(target: Path, tmp_path: Path, sampling: SamplingParams) -> None:
    known = range(0, VOCAB_SIZE, 3)
    reduced = drafter(write_tiny_layers(tmp_path, target, known), target)
    drafted = draft(reduced, sampling, 4)
    assert {token for d in drafted for token in d.token_ids} <= set(known)
    assert all(len(d.token_ids) == 12 for d in drafted)


def test_logits_of_the_reduced_head_are_those_of_the_whole(target: Path, tmp_path: Path) -> None:
    known = [3, 77, 200]
    model, output_ids = load_layers(write_tiny_layers(tmp_path, target, known), target, "float32", "cpu")
    assert output_ids is not None
    assert output_ids.tolist() == known
    hidden = torch.randn(5, model.config.hidden_size)
    whole = load_model(target, "float32", num_layers=2)
    torch.testing.assert_close(model.logits(hidden), whole.logits(hidden)[:, known])


def test_a_larger_batch_after_a_small_one_sees_no_leftovers(target: Path, tmp_path: Path) -> None:
    known = range(0, VOCAB_SIZE, 2)
    folder = write_tiny_layers(tmp_path, target, known)
    used, fresh = drafter(folder, target), drafter(folder, target)
    draft(used, NOISY, 1)
    draft(used, GREEDY, 6)
    assert draft(used, NOISY, 5) == draft(fresh, NOISY, 5)


@pytest.mark.parametrize("seed", range(4))
def test_the_short_way_chooses_what_the_targets_sampler_would(target: Path, seed: int) -> None:
    """Rows with and without noise in one batch, with several rows a span."""
    rng = torch.Generator().manual_seed(seed)
    known = torch.sort(torch.randperm(3000, generator=rng)[:700]).values
    head = ReducedHead(known, 3000, Sampler(3000, (1,)), kernel_of(target, known, torch.bfloat16))
    spans = []
    for i, temperature in enumerate((0.0, 0.8, 1.0, 0.0, 0.3)):
        sampling = SamplingParams(max_tokens=50, temperature=temperature, seed=100 * seed + i)
        spans.append(SampleSpan(SamplingState(sampling, (5,) * (9 + i), 4), (1, 2, 3)[: i % 3], 1 + i % 3))
    logits = (3.0 * torch.randn(sum(span.num_rows for span in spans), 700, generator=rng)).bfloat16()
    whole = torch.full((len(logits), 3000), -torch.inf, dtype=torch.bfloat16)
    whole[:, known] = logits
    expected = Sampler(3000, (1,)).choose(whole, spans, want_confidences=True)
    for got, wanted in zip(head.choose(logits, spans), expected, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.confidences == pytest.approx(wanted.confidences, rel=1e-4)


def test_the_short_way_says_when_there_is_nothing_to_choose(target: Path) -> None:
    known = torch.arange(5)
    head = ReducedHead(known, 9, Sampler(9, ()), kernel_of(target, known, torch.float32))
    logits = torch.zeros(3, 5)
    logits[1] = torch.nan
    state = SamplingState(SamplingParams(max_tokens=5, temperature=0.5), (1,), 1)
    (chosen,) = head.choose(logits, [SampleSpan(state, (2, 3), 3)])
    assert len(chosen.token_ids) == len(chosen.confidences) == 1
    assert chosen.error is not None


@pytest.mark.parametrize("change", [{"top_p": 0.5}, {"top_k": 1}, {"repetition_penalty": 1.5}, {"logit_bias": ((6, 50.0),)}])
def test_whoever_asks_for_more_gets_it_from_the_targets_sampler(target: Path, change: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=50, temperature=0.9, **change)
    spans = [SampleSpan(SamplingState(sampling, (6, 8, 6), 2), (), 1)]
    known = torch.tensor([2, 4, 6, 8])
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.5]])
    whole = torch.full((1, 9), -torch.inf)
    whole[:, known] = logits
    head = ReducedHead(known, 9, Sampler(9, ()), kernel_of(target, known, torch.float32))
    assert head.choose(logits, spans) == Sampler(9, ()).choose(whole, spans, True)


def test_a_draft_ends_behind_the_token_that_makes_it_unlikely(target: Path, tmp_path: Path) -> None:
    folder = write_tiny_layers(tmp_path, target, range(VOCAB_SIZE))
    model, output_ids = load_layers(folder, target, "float32", "cpu")
    small = SmallModel(model, num_blocks=16, vocab_size=VOCAB_SIZE, eos_token_ids=(256,), output_ids=output_ids)
    (whole,) = draft(ModelDrafter(small), NOISY)
    survival = [math.prod(whole.confidences[: i + 1]) for i in range(12)]
    (short,) = draft(ModelDrafter(small, min_survival=0.1), NOISY)
    kept = len(short.token_ids)
    assert short.token_ids == whole.token_ids[:kept]
    assert survival[kept - 1] < 0.1
    assert all(s >= 0.1 for s in survival[: kept - 1])
