"""The trained drafters: their shape, their initialisation, and that serving computes what training does."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import InvalidField, ModelUnavailable
from drafters.hidden_states.checkpoint import load_network
from drafters.hidden_states.eagle_network import EagleNetwork
from drafters.layers import load_layers
from engine.batch_layout import PackedSpan
from tests.support.random_answers import answer
from training.batches import BatchPlan, assemble, epoch
from training.block_student import BlockStudent
from training.corpus import TargetAnswer, choose_vocabulary, coverage
from training.eagle_student import EagleStudent
from training.evaluation import standardisation
from training.frozen import FrozenTarget
from training.hidden_states import HiddenStateReader, InMemory, OnDisk
from training.layers_student import LayersStudent
from training.recipe import TrainOptions, feature_layers, kept_layers, network_config, reader_layers, warm_start

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


def student(
    target: FrozenTarget,
    readings: HiddenStateReader,
    answers: list[TargetAnswer],
    anchor_rank: int = 24,
    fingerprint: str = "",
) -> BlockStudent:
    options = TrainOptions(
        "", "dspark", Path("out"), Path("work"), num_layers=1, block_size=4, markov_rank=8, anchor_rank=anchor_rank
    )
    vocabulary = choose_vocabulary(answers, 150, 257)
    config = network_config(options, target.model.config, vocabulary, fingerprint)
    mean, std = standardisation([reading.features for reading in readings.read(answers)])
    torch.manual_seed(0)
    return BlockStudent(config, target, mean, std)


def test_the_vocabulary_holds_the_most_frequent_then_the_lowest_ids() -> None:
    said = [TargetAnswer("a", "d", 0.0, 0, (1,), (50, 50, 60, 60, 60, 70))]
    vocabulary = choose_vocabulary(said, 5, 100, always=(99,))
    assert vocabulary is not None
    assert vocabulary.tolist() == [0, 50, 60, 70, 99]
    assert coverage(vocabulary, [TargetAnswer("b", "d", 0.0, 0, (1,), (50, 71))]) == 0.5
    assert choose_vocabulary(said, 100, 100) is None


def test_layers_are_chosen_from_both_ends() -> None:
    assert kept_layers(30, 2) == (0, 1)
    assert kept_layers(30, 4) == (0, 1, 2, 29)
    assert feature_layers(30) == (9, 19, 29)
    assert feature_layers(2) == (0, 1)
    with pytest.raises(InvalidField, match="num_layers"):
        kept_layers(2, 3)


def test_a_saved_dspark_drafter_reads_raw_features(
    target: FrozenTarget, readings: HiddenStateReader, answers: list[TargetAnswer], tmp_path: Path
) -> None:
    mine = student(target, readings, answers)
    plan = BatchPlan(4096, 4096, block_size=4)
    batch = assemble(answers, readings, plan, 1, CPU)
    torch.nn.init.normal_(mine.network.fc.bias)
    mine.save(tmp_path / "saved")
    loaded = load_network(tmp_path / "saved", target.rows)
    with torch.no_grad():
        trained = mine.network(mine.standardised(batch.features), batch.token_ids, batch.lens, batch.anchors)
        served = loaded(batch.features, batch.token_ids, batch.lens, batch.anchors)
    # int8 on disk: a percent for each product
    assert float((trained - served).norm() / trained.norm()) < 0.04


@pytest.mark.parametrize("anchor_rank", [24, 1000])
def test_a_student_started_from_a_saved_drafter_equals_it(
    target: FrozenTarget, readings: HiddenStateReader, answers: list[TargetAnswer], tmp_path: Path, anchor_rank: int
) -> None:
    """With any standardisation of its own; saved again it is the same drafter."""
    first = student(target, readings, answers, anchor_rank)
    torch.nn.init.normal_(first.network.fc.bias)
    assert first.network.anchor_input is not None
    torch.nn.init.normal_(first.network.anchor_input.maps.bias)
    first.save(tmp_path / "first")
    torch.manual_seed(5)
    size = len(first.mean)
    other = BlockStudent(first.config, target, 3 * torch.randn(size), 0.1 + torch.rand(size))
    other.begin_with(tmp_path / "first")
    other.save(tmp_path / "again")
    batch = assemble(answers, readings, BatchPlan(4096, 4096, block_size=4), 1, CPU)
    arguments = (batch.token_ids, batch.lens, batch.anchors)
    served, again = (
        load_network(tmp_path / name, target.rows)(batch.features, *arguments).detach() for name in ("first", "again")
    )
    begun = other.network(other.standardised(batch.features), *arguments).detach()
    torch.testing.assert_close(begun, served, rtol=1e-3, atol=1e-3)
    assert float((again - served).norm() / served.norm()) < 0.005


def test_a_warm_start_keeps_the_shape_of_the_drafter(
    target: FrozenTarget, readings: HiddenStateReader, answers: list[TargetAnswer], tmp_path: Path
) -> None:
    student(target, readings, answers).save(tmp_path / "mine")
    options = TrainOptions("", "dspark", Path("out"), Path("work"), begin_with=tmp_path / "mine")
    for asked in (options, replace(options, block_size=4), replace(options, quick=True).resolved()):
        found = warm_start(asked, target)
        assert (found.num_layers, found.block_size, found.vocabulary) == (1, 4, 150)
        assert (found.markov_rank, found.anchor_rank, found.begin_with) == (8, 24, tmp_path / "mine")
    with pytest.raises(InvalidField, match=r"block_size: must be left out, or 4 as the drafter in mine has it, got 5"):
        warm_start(replace(options, block_size=5), target)


def test_a_warm_start_from_another_shape_is_refused(
    target: FrozenTarget, readings: HiddenStateReader, answers: list[TargetAnswer], tmp_path: Path
) -> None:
    options = TrainOptions("", "dspark", Path("out"), Path("work"), begin_with=tmp_path / "mine")
    with pytest.raises(ModelUnavailable, match="no folder of a trained drafter"):
        warm_start(options, target)
    mine = student(target, readings, answers, fingerprint="another")
    mine.save(tmp_path / "mine")
    with pytest.raises(InvalidField, match="begin_with: must have been trained with the tokenizer of model"):
        warm_start(options, target)
    path = tmp_path / "mine" / "config.json"
    raw = json.loads(path.read_text())
    changes = (
        ({"hidden_size": 64}, "must be a drafter for model, with 2 layers of width 32"),
        ({"tokenizer_fingerprint": None, "target_layer_ids": [1]}, r"must read the layers \[0, 1\]"),
        ({"tokenizer_fingerprint": None, "fc_bias": False}, "that `outrider train` made"),
    )
    for change, message in changes:
        path.write_text(json.dumps(raw | change))
        with pytest.raises(InvalidField, match=message):
            warm_start(options, target)
    layers = LayersStudent(target, (0,), None)
    layers.save(tmp_path / "layers")
    with pytest.raises(InvalidField, match="must be the folder of a drafter of kind dspark, got 'layers'"):
        warm_start(replace(options, begin_with=tmp_path / "layers"), target)
    for kind in ("layers", "table"):
        with pytest.raises(InvalidField, match=f"begin_with: is for drafters with heads, not for {kind}"):
            replace(options, drafter=kind)


def test_the_regression_is_better_than_random_weights(
    target: FrozenTarget, readings: HiddenStateReader, answers: list[TargetAnswer]
) -> None:
    batch = assemble(answers, readings, BatchPlan(4096, 16384, block_size=4), 1, CPU)
    mine = student(target, readings, answers)
    with torch.no_grad():
        before = mine(batch, 1.0)
        mine.initialise([batch])
        after = mine(batch, 1.0)
    assert after.acceptance[:, 0].nanmean() > before.acceptance[:, 0].nanmean() + 0.05
    assert after.acceptance[:, 1:].nanmean() > before.acceptance[:, 1:].nanmean() + 0.01


def test_all_layers_of_the_target_make_a_perfect_drafter(
    target: FrozenTarget, readings: HiddenStateReader, answers: list[TargetAnswer], tmp_path: Path
) -> None:
    """With every layer and the whole head, in training and in serving."""
    mine = LayersStudent(target, (0, 1), None)
    mine.initialise()
    batch = assemble(answers, readings, BatchPlan(4096, 16384, block_size=4), 1, CPU)
    with torch.no_grad():
        assert float(mine(batch, 1.0).acceptance.min()) > 0.999
    mine.save(tmp_path / "saved")
    model, token_ids = load_layers(tmp_path / "saved", target.folder, "float32", "cpu")
    assert token_ids is None
    span = PackedSpan(0, answers[0].token_ids, torch.arange(4, dtype=torch.int32).numpy())
    hidden = model.forward([span], model.new_cache(4, 32))
    (reading,) = readings.read(answers[:1])
    # int8 on disk: a percent for each product
    assert float((hidden - reading.features[:, -32:]).norm() / hidden.norm()) < 0.06


def test_a_saved_eagle_drafts_as_it_was_trained(target: FrozenTarget, answers: list[TargetAnswer], tmp_path: Path) -> None:
    """The scale of the features is in its weights, and its head in the speculators format."""
    options = TrainOptions("", "eagle3", Path("out"), Path("work"), num_layers=1, block_size=3)
    layers = reader_layers(options, target.model.config.num_layers)
    readings = HiddenStateReader(target, layers, InMemory(2**24), max_pass_tokens=64)
    config = network_config(options, target.model.config, choose_vocabulary(answers, 150, 257), "print")
    std = 0.1 + torch.rand(config.feature_size)
    torch.manual_seed(0)
    trained = EagleStudent(config, target, torch.zeros_like(std), std)
    batch = assemble(answers[:6], readings, BatchPlan(1024, 400, 3), 0, CPU)
    trained.initialise([batch])
    trained.save(tmp_path)
    loaded = load_network(tmp_path, target.rows)
    assert replace(loaded.config, shape=config.shape) == config
    assert isinstance(loaded, EagleNetwork)
    given = (batch.token_ids, batch.lens, batch.anchors, 3)
    features = batch.features[:, : config.feature_size]
    expected = trained.network(trained.standardised(batch.features), *given)
    other = (batch.token_ids + 1) % 257
    changed = trained.network(trained.standardised(batch.features), other, *given[1:])
    assert (changed - expected)[:, 0].abs().amax(-1).min() > 0.01, "the token behind the features says nothing"
    torch.testing.assert_close(loaded(features, *given), expected, rtol=0.05, atol=0.05)  # stored in bf16


# ---- the target's hidden states, their caches, and batches


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
