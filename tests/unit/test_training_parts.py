"""The parts of training, each against its definition written out plainly."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import InvalidField, ModelUnavailable
from drafters.dspark.checkpoint import TargetRows, load_network
from drafters.layers import load_layers
from drafters.replay import Round
from drafters.training.batches import BatchPlan, assemble, epoch
from drafters.training.begun import going_on
from drafters.training.corpus import (
    Answer,
    WrittenPrompt,
    append,
    fingerprint,
    is_usable,
    read_answers,
    read_given,
    read_written,
    repair,
)
from drafters.training.dspark_student import DSparkStudent
from drafters.training.evaluation import acceptance, standardisation
from drafters.training.frozen import FrozenTarget
from drafters.training.held_out import hold_out
from drafters.training.kept import InMemory, OnDisk
from drafters.training.layers_student import LayersStudent
from drafters.training.losses import TargetDistribution, distillation, position_weights
from drafters.training.readings import Readings, target_rows
from drafters.training.recipe import TrainOptions, dspark_config, feature_layers, kept_layers
from drafters.training.vocabulary import choose_vocabulary, coverage, positions_in
from drafters.training.writing import Share, Writer
from engine.layout import PackedSpan

CPU = torch.device("cpu")


def answer(key: str, prompt: int, length: int, temperature: float = 0.0) -> Answer:
    generator = torch.Generator().manual_seed(hash_of(key))
    ids = torch.randint(0, 250, (prompt + length,), generator=generator).tolist()
    return Answer(key, "d", temperature, 7, tuple(ids[:prompt]), tuple(ids[prompt:]))


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[:6], "little")


@pytest.fixture(scope="module")
def target(tiny_model_folder: Path) -> FrozenTarget:
    return FrozenTarget(tiny_model_folder, device=CPU, dtype="float32", max_model_len=256)


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return [answer(f"key{i}", 3 + i % 5, 9 + i % 11) for i in range(24)]


@pytest.fixture(scope="module")
def readings(target: FrozenTarget) -> Readings:
    return Readings(target, (0, 1), InMemory(2**24), max_pass_tokens=64)


def student(
    target: FrozenTarget, readings: Readings, answers: list[Answer], anchor_rank: int = 24, fingerprint: str = ""
) -> DSparkStudent:
    options = TrainOptions(
        "", "dspark", Path("out"), Path("work"), num_layers=1, block_size=4, markov_rank=8, anchor_rank=anchor_rank
    )
    vocabulary = choose_vocabulary(answers, 150, 257)
    config = dspark_config(options, target.model.config, vocabulary, fingerprint)
    mean, std = standardisation([reading.features for reading in readings.of(answers)])
    torch.manual_seed(0)
    return DSparkStudent(config, target_rows(target), mean, std)


def distribution(logits: torch.Tensor) -> TargetDistribution:
    return TargetDistribution(logits, logits.logsumexp(-1), torch.arange(len(logits)))


def test_total_variation_counts_what_cannot_be_drafted_as_lost() -> None:
    torch.manual_seed(1)
    full, z = torch.randn(5, 11), torch.randn(5, 4)
    vocabulary = torch.tensor([1, 4, 5, 9])
    places = positions_in(vocabulary, 11)[torch.tensor([4, 0, 9, 5, 10])]
    target = TargetDistribution(full[:, vocabulary], full.logsumexp(-1), torch.arange(5))
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25, 1.0])
    found = distillation(z, target, places, weights, progress=1.0)
    q = torch.zeros(5, 11)
    q[:, vocabulary] = z.softmax(-1)
    distance = (q - full.softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(found.acceptance, 1 - distance / 2)
    torch.testing.assert_close(found.match, (weights * distance).sum() / 3.0)
    inside = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    own = z.log_softmax(-1).gather(1, places.clamp_min(0)[:, None]).squeeze(1)
    cross_entropy = -(weights * inside * own).sum() / 3.0
    torch.testing.assert_close(found.total, 0.1 * cross_entropy + 0.9 * found.match)


def test_the_match_begins_as_divergence_and_ends_as_variation() -> None:
    torch.manual_seed(2)
    z, target = torch.randn(3, 6), distribution(torch.randn(3, 6))
    places, weights = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    at = {p: float(distillation(z, target, places, weights, p).total) for p in (0.0, 0.15, 0.3, 1.0)}
    divergence = -(target.log_probs(slice(None)).exp() * z.log_softmax(-1)).sum(-1).mean()
    cross_entropy = -z.log_softmax(-1)[:, 0].mean()
    assert at[0.0] == pytest.approx(float(0.1 * cross_entropy + 0.9 * divergence), rel=1e-5)
    assert at[0.15] == pytest.approx((at[0.0] + at[1.0]) / 2, rel=1e-5)
    assert at[0.3] == at[1.0]


@pytest.mark.parametrize("progress", [0.0, 0.2, 1.0])
def test_gradients_are_those_of_the_losses_as_defined(progress: float) -> None:
    """Of more rows than are taken at once, some of which share the target's."""
    torch.manual_seed(4)
    num, size = 75, 13
    full, rows = torch.randn(20, 17), torch.randint(0, 20, (num,))
    target = TargetDistribution(full[:, :size], full.logsumexp(-1), rows)
    places, weights = torch.randint(-1, size, (num,)), torch.rand(num)
    z = torch.randn(num, size, requires_grad=True)
    plain = z.detach().clone().requires_grad_()
    log_q, p = plain.log_softmax(-1), target.log_probs(slice(None)).exp()
    scale, annealed = weights / weights.sum(), min(1.0, progress / 0.3)
    own = log_q.gather(1, places.clamp_min(0)[:, None]).squeeze(1)
    variation = 2 * (1 - torch.minimum(p, log_q.exp()).sum(-1))
    match = annealed * variation - (1 - annealed) * (p * log_q).sum(-1)
    expected = (scale * (0.9 * match - 0.1 * (places >= 0) * own)).sum()
    found = distillation(z, target, places, weights, progress).total
    torch.testing.assert_close(found, expected)
    (3.0 * found).backward()
    (3.0 * expected).backward()
    torch.testing.assert_close(z.grad, plain.grad, rtol=1e-4, atol=1e-7)


def test_the_confidence_is_taught_the_expected_acceptance() -> None:
    torch.manual_seed(3)
    z, target = torch.randn(2, 6), distribution(torch.randn(2, 6))
    label = distillation(z, target, torch.zeros(2, dtype=torch.int64), torch.ones(2), 1.0).acceptance
    confidence = torch.logit(label).requires_grad_()
    found = distillation(z, target, torch.zeros(2, dtype=torch.int64), torch.ones(2), 1.0, confidence)
    found.total.backward()
    assert confidence.grad is not None
    assert confidence.grad.abs().max() < 1e-6  # the label itself is where the loss is least


def test_early_positions_weigh_most() -> None:
    assert position_weights(7).tolist() == pytest.approx([math.exp(-k / 7) for k in range(7)])


def test_the_vocabulary_holds_what_is_said_most_then_the_lowest_ids() -> None:
    said = [Answer("a", "d", 0.0, 0, (1,), (50, 50, 60, 60, 60, 70))]
    vocabulary = choose_vocabulary(said, 5, 100, always=(99,))
    assert vocabulary is not None
    assert vocabulary.tolist() == [0, 50, 60, 70, 99]
    assert coverage(vocabulary, [Answer("b", "d", 0.0, 0, (1,), (50, 71))]) == 0.5
    assert choose_vocabulary(said, 100, 100) is None


def test_answers_are_held_out_by_prompt() -> None:
    both = [answer(f"k{i}", 2, 3, t) for i in range(20) for t in (0.0, 0.7)]
    learned, held_out = hold_out(both, 0.1)
    assert len(held_out) == 4
    assert not {a.key for a in learned} & {a.key for a in held_out}
    assert [len(part) for part in hold_out(both[:4], 0.1)] == [2, 2]
    assert [len(part) for part in hold_out(both, 0.1, at_least=8)] == [28, 12]


def test_what_is_composed_of_held_out_texts_is_not_learned_from() -> None:
    """Nor is all of it evaluated on: where most tasks hold some held-out text, they would take the place of all others."""
    texts = [answer(f"k{i:02}", 2, 3, t) for i in range(40) for t in (0.0, 0.7)]
    rng = random.Random(0)
    composed = [
        replace(answer(f"c{i:02}", 2, 3), sources=tuple(f"k{j:02}" for j in rng.sample(range(40), 4))) for i in range(50)
    ]
    learned, held_out = hold_out([*texts, *composed], 0.1)
    held = {a.key for a in held_out if not a.sources}
    assert len(held) == 4
    assert not {a.key for a in learned} & {a.key for a in held_out}
    assert all(held.isdisjoint(a.sources) for a in learned)
    tasks = [a for a in held_out if a.sources]
    assert len(tasks) == 5
    assert not any(held.isdisjoint(a.sources) for a in tasks)
    assert len(learned) + sum(not held.isdisjoint(a.sources) for a in composed) + 8 == len(texts) + len(composed)


def test_answers_of_older_files_do_not_tell_their_sources(tmp_path: Path) -> None:
    new, old = replace(answer("new", 2, 3), sources=("a", "b")), answer("old", 2, 3)
    append(tmp_path / "answers-0.jsonl", new)
    append(tmp_path / "answers-0.jsonl", old)
    lines = [json.loads(line) for line in (tmp_path / "answers-0.jsonl").read_text().splitlines()]
    del lines[1]["sources"]
    (tmp_path / "answers-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_answers([tmp_path / "answers-0.jsonl"])) == [new, old]


def test_anchors_begin_at_the_last_prompt_token_and_have_a_truth(answers: list[Answer], readings: Readings) -> None:
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


def test_blocks_are_as_long_as_drafting_comes_far() -> None:
    plan, rng = BatchPlan(100, 40, block_size=4, persistence=0.5), random.Random(3)
    lens = [plan.draw_block_len(rng) for _ in range(4000)]
    assert [lens.count(n) / 4000 for n in range(1, 5)] == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.03)
    assert {BatchPlan(100, 40, block_size=4).draw_block_len(rng) for _ in range(20)} == {4}


def test_readings_are_the_targets_own_states_however_they_are_grouped(target: FrozenTarget, answers: list[Answer]) -> None:
    alone = Readings(target, (0, 1), InMemory(0), max_pass_tokens=1).of(answers)
    together = Readings(target, (0, 1), InMemory(2**24), max_pass_tokens=4096)
    for _ in range(2):  # computed, then kept
        for a, b in zip(alone, together.of(answers), strict=True):
            torch.testing.assert_close(a.features, b.features, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a.normalisers, b.normalisers, rtol=1e-5, atol=1e-5, equal_nan=True)
    first = answers[0].prompt_len - 1
    logits = target.model.logits(alone[0].features[first:, -32:].contiguous())
    torch.testing.assert_close(alone[0].normalisers[first:], logits.logsumexp(-1))
    assert alone[0].normalisers[:first].isnan().all()


def test_readings_on_disk_serve_the_next_run_and_are_bounded(
    target: FrozenTarget, answers: list[Answer], tmp_path: Path
) -> None:
    expected = Readings(target, (0, 1), InMemory(0), max_pass_tokens=1).of(answers)
    room = sum(reading.num_bytes for reading in expected[:10])
    Readings(target, (0, 1), OnDisk(tmp_path, (0, 1), "mine", room), max_pass_tokens=1).of(answers)
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


def test_a_saved_dspark_drafter_computes_on_raw_features_what_was_trained_on_standardised_ones(
    target: FrozenTarget, readings: Readings, answers: list[Answer], tmp_path: Path
) -> None:
    mine = student(target, readings, answers)
    plan = BatchPlan(4096, 4096, block_size=4)
    batch = assemble(answers, readings, plan, 1, CPU)
    torch.nn.init.normal_(mine.network.fc.bias)
    mine.save(tmp_path / "saved", target.folder)
    rows = target_rows(target)
    loaded = load_network(tmp_path / "saved", TargetRows(rows.embedding, rows.head))
    with torch.no_grad():
        trained = mine.network(mine.standardised(batch.features), batch.token_ids, batch.lens, batch.anchors)
        served = loaded(batch.features, batch.token_ids, batch.lens, batch.anchors)
    # int8 on disk: a percent for each product
    assert float((trained - served).norm() / trained.norm()) < 0.04


@pytest.mark.parametrize("anchor_rank", [24, 1000])
def test_a_student_begun_with_a_saved_drafter_computes_what_that_does(
    target: FrozenTarget, readings: Readings, answers: list[Answer], tmp_path: Path, anchor_rank: int
) -> None:
    """Whatever its own features' means and deviations are; and saved at once it is that drafter again."""
    first = student(target, readings, answers, anchor_rank)
    torch.nn.init.normal_(first.network.fc.bias)
    assert first.network.anchor_input is not None
    torch.nn.init.normal_(first.network.anchor_input.maps.bias)
    first.save(tmp_path / "first", target.folder)
    torch.manual_seed(5)
    size, rows = len(first.mean), target_rows(target)
    other = DSparkStudent(first.config, rows, 3 * torch.randn(size), 0.1 + torch.rand(size))
    other.begin_with(tmp_path / "first", rows)
    other.save(tmp_path / "again", target.folder)
    batch = assemble(answers, readings, BatchPlan(4096, 4096, block_size=4), 1, CPU)
    arguments = (batch.token_ids, batch.lens, batch.anchors)
    served, again = (
        load_network(tmp_path / name, TargetRows(rows.embedding, rows.head))(batch.features, *arguments).detach()
        for name in ("first", "again")
    )
    begun = other.network(other.standardised(batch.features), *arguments).detach()
    torch.testing.assert_close(begun, served, rtol=1e-3, atol=1e-3)
    assert float((again - served).norm() / served.norm()) < 0.005


def test_going_on_keeps_the_shape_of_the_drafter(
    target: FrozenTarget, readings: Readings, answers: list[Answer], tmp_path: Path
) -> None:
    student(target, readings, answers).save(tmp_path / "mine", target.folder)
    options = TrainOptions("", "dspark", Path("out"), Path("work"), begin_with=tmp_path / "mine")
    for asked in (options, replace(options, block_size=4), replace(options, quick=True).resolved()):
        found = going_on(asked, target)
        assert (found.num_layers, found.block_size, found.vocabulary) == (1, 4, 150)
        assert (found.markov_rank, found.anchor_rank, found.begin_with) == (8, 24, tmp_path / "mine")
    with pytest.raises(InvalidField, match=r"block_size: must be left out, or 4 as the drafter in mine has it, got 5"):
        going_on(replace(options, block_size=5), target)


def test_going_on_with_what_does_not_fit_is_refused(
    target: FrozenTarget, readings: Readings, answers: list[Answer], tmp_path: Path
) -> None:
    options = TrainOptions("", "dspark", Path("out"), Path("work"), begin_with=tmp_path / "mine")
    with pytest.raises(ModelUnavailable, match="no folder of a trained drafter"):
        going_on(options, target)
    mine = student(target, readings, answers, fingerprint="another")
    mine.save(tmp_path / "mine", target.folder)
    with pytest.raises(InvalidField, match="begin_with: must have been trained with the tokenizer of model"):
        going_on(options, target)
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
            going_on(options, target)
    layers = LayersStudent(target.folder, (0,), target_rows(target), None)
    layers.save(tmp_path / "layers", target.folder)
    with pytest.raises(InvalidField, match="must be the folder of a drafter of kind dspark, got 'layers'"):
        going_on(replace(options, begin_with=tmp_path / "layers"), target)
    for kind in ("layers", "table"):
        with pytest.raises(InvalidField, match=f"begin_with: is for dspark, and cannot go on with {kind}"):
            replace(options, drafter=kind)


def test_the_regression_predicts_better_than_chance_before_any_step(
    target: FrozenTarget, readings: Readings, answers: list[Answer]
) -> None:
    batch = assemble(answers, readings, BatchPlan(4096, 16384, block_size=4), 1, CPU)
    mine = student(target, readings, answers)
    with torch.no_grad():
        before = mine(batch, 1.0)
        mine.initialise([batch], target)
        after = mine(batch, 1.0)
    assert after.acceptance[:, 0].nanmean() > before.acceptance[:, 0].nanmean() + 0.05
    assert after.acceptance[:, 1:].nanmean() > before.acceptance[:, 1:].nanmean() + 0.01


def test_all_layers_of_the_target_are_its_perfect_drafter(
    target: FrozenTarget, readings: Readings, answers: list[Answer], tmp_path: Path
) -> None:
    """Trained or not: with every layer and the whole head nothing is lost, in training as where it is served."""
    mine = LayersStudent(target.folder, (0, 1), target_rows(target), None)
    mine.initialise(target.folder)
    batch = assemble(answers, readings, BatchPlan(4096, 16384, block_size=4), 1, CPU)
    with torch.no_grad():
        assert float(mine(batch, 1.0).acceptance.min()) > 0.999
    mine.save(tmp_path / "saved", target.folder)
    model, token_ids = load_layers(tmp_path / "saved", target.folder, "float32", "cpu")
    assert token_ids is None
    span = PackedSpan(0, answers[0].token_ids, torch.arange(4, dtype=torch.int32).numpy())
    hidden = model.forward([span], model.new_cache(4, 32))
    (reading,) = readings.of(answers[:1])
    # int8 on disk: a percent for each product
    assert float((hidden - reading.features[:, -32:]).norm() / hidden.norm()) < 0.06


def test_layers_are_chosen_from_both_ends() -> None:
    assert kept_layers(30, 2) == (0, 1)
    assert kept_layers(30, 4) == (0, 1, 2, 29)
    assert feature_layers(30) == (9, 19, 29)
    assert feature_layers(2) == (0, 1)
    with pytest.raises(InvalidField, match="num_layers"):
        kept_layers(2, 3)


def test_acceptance_is_conditional_by_position() -> None:
    rounds = [Round("a", (0.5,) * 3, 3, 4), Round("a", (0.5,) * 3, 1, 2), Round("b", (0.5,) * 3, 0, 1), Round("b", (), 0, 1)]
    found = acceptance(rounds, 3, 0.0)
    assert found.accepted_len == 2.0
    assert found.by_position == pytest.approx((2 / 3, 1 / 2, 1.0))
    assert found.by_domain == {"a": 3.0, "b": 1.0}


def test_prompts_are_split_at_line_feeds_alone(tmp_path: Path) -> None:
    text = "one line\u2028with a line separator\x0bin it"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    (given,) = read_given([tmp_path / "p.jsonl"], None)
    assert (given.domain, given.prompt) == ("p", text)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine one"}\n{"question": "?"}\n')
    with pytest.raises(InvalidField, match=r"bad\.jsonl:2"):
        read_given([tmp_path / "bad.jsonl"], None)


def test_a_half_written_line_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "prompts-0.jsonl"
    append(path, WrittenPrompt(0, "chat", "whole"))
    with path.open("a") as file:
        file.write('{"index": 1, "dom')
    assert [w.index for w in read_written([path])] == [0]
    repair(path)
    append(path, WrittenPrompt(1, "chat", None))
    assert [w.index for w in read_written([path])] == [0, 1]


@pytest.mark.parametrize("text", ["short", "x" * 5000, "with <|im_end|> inside it", "cut \ufffd in the middle", "so " * 40])
def test_what_is_no_prompt(text: str) -> None:
    assert not is_usable(text)


def test_prompts_that_differ_in_dress_alone_are_one(target: FrozenTarget, tmp_path: Path) -> None:
    for i, prompt in enumerate(["What is a river?", "what is  a river", "What is a lake?", "Where is the evaluation?"]):
        append(tmp_path / "prompts-0.jsonl", WrittenPrompt(i, "qa", prompt))
    tasks = Writer(target, tmp_path, 0).tasks(4, [], frozenset({fingerprint("where is THE evaluation")}))
    assert [t.prompt for t in tasks if t.temperature == 0.0] == ["What is a river?", "What is a lake?"]


def test_shares_divide_the_work(target: FrozenTarget) -> None:
    names = [f"{i}" for i in range(50)]
    parts = [Share(rank, 3).of(names) for rank in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert sorted(i for rank in range(3) for i in Share(rank, 3).attempts(2)) == list(range(16))
