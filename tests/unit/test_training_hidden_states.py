"""The target's hidden states, their caches, and batches."""

import random
from pathlib import Path

import pytest
import torch

from tests.support.random_answers import answer
from training.batches import BatchPlan, assemble, epoch
from training.corpus import TargetAnswer
from training.feature_cache import InMemory, OnDisk
from training.frozen import FrozenTarget
from training.hidden_states import HiddenStateReader

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tiny_model_folder: Path) -> FrozenTarget:
    return FrozenTarget(tiny_model_folder, device=CPU, dtype="float32", max_model_len=256)


@pytest.fixture(scope="module")
def answers() -> list[TargetAnswer]:
    return [answer(f"key{i}", 3 + i % 5, 9 + i % 11) for i in range(24)]


@pytest.fixture(scope="module")
def readings(target: FrozenTarget) -> HiddenStateReader:
    return HiddenStateReader(target, (0, 1), InMemory(2**24), max_pass_tokens=64)


def test_anchors_begin_at_the_last_prompt_token_and_have_a_truth(
    answers: list[TargetAnswer], readings: HiddenStateReader
) -> None:
    plan = BatchPlan(max_rows=100, max_positions=40)
    seen: list[str] = []
    for part, seed in epoch(answers, plan, 5, 0):
        batch = assemble(part, readings, plan, seed, CPU)
        assert len(batch.token_ids) <= 100
        assert len(batch.anchors) <= 40
        start, allowed = 0, set()
        for a in part:
            allowed |= set(range(start + a.prompt_len - 1, start + len(a.token_ids) - 1))
            start += len(a.token_ids)
        assert set(batch.anchors.tolist()) <= allowed
        assert bool((batch.anchors + 1 < batch.ends).all())
        seen += [a.key for a in part]
    assert sorted(seen) == sorted(a.key for a in answers)
    assert [k for p, _ in epoch(answers, plan, 5, 0) for k in p] != [k for p, _ in epoch(answers, plan, 5, 1) for k in p]


def test_block_lengths_follow_the_persistence() -> None:
    plan, rng = BatchPlan(100, 40, block_size=4, persistence=0.5), random.Random(3)
    lens = [plan.draw_block_len(rng) for _ in range(4000)]
    assert [lens.count(n) / 4000 for n in range(1, 5)] == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.03)
    assert {BatchPlan(100, 40, block_size=4).draw_block_len(rng) for _ in range(20)} == {4}


def test_hidden_states_do_not_depend_on_grouping(target: FrozenTarget, answers: list[TargetAnswer]) -> None:
    alone = HiddenStateReader(target, (0, 1), InMemory(0), max_pass_tokens=1).read(answers)
    together = HiddenStateReader(target, (0, 1), InMemory(2**24), max_pass_tokens=4096)
    for _ in range(2):  # computed, then kept
        for a, b in zip(alone, together.read(answers), strict=True):
            torch.testing.assert_close(a.features, b.features, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a.normalisers, b.normalisers, rtol=1e-5, atol=1e-5, equal_nan=True)
    first = answers[0].prompt_len - 1
    logits = target.model.logits(alone[0].features[first:, -32:].contiguous())
    torch.testing.assert_close(alone[0].normalisers[first:], logits.logsumexp(-1))
    assert alone[0].normalisers[:first].isnan().all()


def test_cached_hidden_states_are_reused_and_bounded(
    target: FrozenTarget, answers: list[TargetAnswer], tmp_path: Path
) -> None:
    expected = HiddenStateReader(target, (0, 1), InMemory(0), max_pass_tokens=1).read(answers)
    room = sum(reading.num_bytes for reading in expected[:10])
    HiddenStateReader(target, (0, 1), OnDisk(tmp_path, (0, 1), "mine", room), max_pass_tokens=1).read(answers)
    again = OnDisk(tmp_path, (0, 1), "mine", room)
    found = [again.find(answer) for answer in answers]
    assert 0 < sum(reading is not None for reading in found) <= 10
    for reading, wanted in zip(found, expected, strict=True):
        if reading is not None:
            assert torch.equal(reading.features, wanted.features)
            torch.testing.assert_close(reading.normalisers, wanted.normalisers, rtol=0, atol=0, equal_nan=True)
    assert OnDisk(tmp_path, (1,), "mine", room).find(answers[0]) is None, "other layers are another reading"
    assert OnDisk(tmp_path, (0, 1), "yours", room).find(answers[0]) is None, "another target's states are others"
    for path in tmp_path.iterdir():
        path.write_bytes(b"damaged")
    assert all(again.find(answer) is None for answer in answers)
