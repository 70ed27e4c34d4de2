"""Drafters of a few layers with a reduced head: the same choices as the whole head's, among the tokens that it knows."""

from pathlib import Path

import pytest
import torch

from cluster.types import SamplingParams
from drafters.layers import load_layers
from drafters.model import ModelDrafter
from drafters.protocol import Demand, Draft
from drafters.small_model import SmallModel
from engine.factory import load_model
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
