"""Distillation improves students beyond their initialisation, on unseen positions; and runs that are resumed."""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import InvalidField
from drafters.hidden_states.checkpoint import load_network
from drafters.hidden_states.heads import GatedMarkovHead, RecurrentHead
from tests.support.word_model import write_wordy_model
from tests.unit.test_train import HERE, Silent, options
from training import work_folder
from training.batches import AnswerBatch, BatchPlan, assemble
from training.block_student import BlockStudent, Moments
from training.corpus import TargetAnswer
from training.distil import Distillation, Schedule
from training.eagle_student import EagleStudent
from training.evaluation import standardisation
from training.frozen import FrozenTarget
from training.hidden_state_student import HiddenStateStudent
from training.hidden_states import HiddenStateReader, InMemory
from training.layers_student import LayersStudent
from training.pipeline import train
from training.recipe import HEADS, HeadKind, TrainOptions, network_config, warm_start
from training.work_folder import WorkFolder

pytestmark = pytest.mark.slow

BLOCK, MARKOV_RANK = 4, 16
NUM_LEARNED = 200
PLAN = BatchPlan(1024, 400, BLOCK, 0.45)
WHOLE = replace(PLAN, max_positions=10**6, persistence=1.0)
SCHEDULE = Schedule(num_epochs=10, learning_rate=2e-3)
LEAST_GAIN = 0.015  # of the expected accepted length: half of what was seen, and a student that is not taught has none


@pytest.fixture(scope="module")
def target(tiny_model_folder: Path) -> FrozenTarget:
    return FrozenTarget(tiny_model_folder, device=HERE.device, dtype="float32", max_model_len=256)


@pytest.fixture(scope="module")
def answers(tiny_model_folder: Path) -> list[TargetAnswer]:
    """Sampled from the target at temperature 1, so that they differ."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    prompts = torch.randint(0, 250, (NUM_LEARNED + 40, 4))
    texts = model.generate(
        inputs=prompts,
        attention_mask=torch.ones_like(prompts),
        pad_token_id=0,
        do_sample=True,
        top_k=0,
        min_new_tokens=36,
        max_new_tokens=36,
    )
    return [TargetAnswer(f"key{i}", "d", 1.0, 7, tuple(ids[:4]), tuple(ids[4:])) for i, ids in enumerate(texts.tolist())]


@pytest.fixture(scope="module")
def readings(target: FrozenTarget) -> HiddenStateReader:
    return HiddenStateReader(target, (0, 1), InMemory(2**26), max_pass_tokens=1024)


@pytest.fixture(scope="module")
def learned(answers: list[TargetAnswer]) -> list[TargetAnswer]:
    return answers[:NUM_LEARNED]


@pytest.fixture(scope="module")
def unseen(answers: list[TargetAnswer], readings: HiddenStateReader) -> AnswerBatch:
    return assemble(answers[NUM_LEARNED:], readings, WHOLE, 0, HERE.device)


def dspark(
    target: FrozenTarget,
    readings: HiddenStateReader,
    answers: Sequence[TargetAnswer],
    head: HeadKind,
    anchor_rank: int = 8,
    block: int = BLOCK,
) -> BlockStudent:
    """With a rank so small that the regression is not optimal."""
    options = TrainOptions(
        "",
        "dspark",
        Path("out"),
        Path("work"),
        num_layers=1,
        block_size=block,
        head=head,
        markov_rank=MARKOV_RANK,
        anchor_rank=anchor_rank,
    )
    mean, std = standardisation([reading.features for reading in readings.read(answers)])
    torch.manual_seed(0)
    return BlockStudent(network_config(options, target.model.config, None, ""), target, mean, std)


def regress(
    student: BlockStudent, target: FrozenTarget, readings: HiddenStateReader, answers: Sequence[TargetAnswer]
) -> None:
    student.initialise([assemble(answers, readings, WHOLE, 0, HERE.device)])


@torch.no_grad()
def expected_len(student: HiddenStateStudent | LayersStudent, batch: AnswerBatch) -> float:
    """Expected accepted length of whole blocks, or of one token, with the bonus token."""
    acceptance = student(batch, 1.0).acceptance
    whole = acceptance[:, None] if acceptance.dim() == 1 else acceptance[~acceptance.isnan().any(1)]
    return 1.0 + float(whole.cumprod(1).sum(1).mean())


def teach(
    student: HiddenStateStudent | LayersStudent, answers: Sequence[TargetAnswer], readings: HiddenStateReader, path: Path
) -> None:
    plan = PLAN if isinstance(student, HiddenStateStudent) else BatchPlan(1024, 400)
    training = Distillation(student, answers, readings, plan, SCHEDULE, HERE, path, seed=0)
    training.run(lambda share: None)
    training.use_average()


@pytest.mark.parametrize("head", HEADS)
def test_dspark_learns_beyond_its_regression(
    target: FrozenTarget,
    readings: HiddenStateReader,
    learned: list[TargetAnswer],
    unseen: AnswerBatch,
    tmp_path: Path,
    head: HeadKind,
) -> None:
    """With every head, whose own parameters are trained too. A saved student is the same."""
    student = dspark(target, readings, learned, head)
    random = expected_len(student, unseen)
    regress(student, target, readings, learned)
    begun = expected_len(student, unseen)
    teach(student, learned, readings, tmp_path / "checkpoint.pt")
    taught = expected_len(student, unseen)
    assert begun > random + 0.2
    assert taught > begun + LEAST_GAIN
    own = student.network.markov_head
    if isinstance(own, GatedMarkovHead):
        assert float(own.gate_proj.weight.detach().abs().max()) > 0.01, "the gate looks at the position"
    if isinstance(own, RecurrentHead):
        of_state = own.joint_proj.weight.detach()[2 * MARKOV_RANK :, :MARKOV_RANK]
        assert float(of_state.abs().max()) > 0.01, "the state is read"
    student.save(tmp_path / "saved")
    again = dspark(target, readings, learned, head)
    again.begin_with(tmp_path / "saved")
    assert expected_len(again, unseen) == pytest.approx(taught, abs=0.01)


def test_eagle_learns_beyond_its_regression(
    target: FrozenTarget, readings: HiddenStateReader, learned: list[TargetAnswer], unseen: AnswerBatch, tmp_path: Path
) -> None:
    """Its regression knows the features before the anchor alone: what the anchor implies, its layer learns."""
    options = TrainOptions("", "eagle3", Path("out"), Path("work"), num_layers=1, block_size=BLOCK)
    config = network_config(options, target.model.config, None, "")
    size = torch.cat([reading.features for reading in readings.read(learned)]).square().mean(0).sqrt()[: config.feature_size]
    torch.manual_seed(0)
    student = EagleStudent(config, target, torch.zeros_like(size), size)
    random = expected_len(student, unseen)
    student.initialise([assemble(learned, readings, WHOLE, 0, HERE.device)])
    begun = expected_len(student, unseen)
    teach(student, learned, readings, tmp_path / "checkpoint.pt")
    assert begun > random
    assert expected_len(student, unseen) > begun + LEAST_GAIN / 2


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_block_drafters_without_our_parts_learn(
    target: FrozenTarget,
    readings: HiddenStateReader,
    learned: list[TargetAnswer],
    unseen: AnswerBatch,
    tmp_path: Path,
    kind: str,
) -> None:
    """Beyond what their layers, the target's own, know at first. A saved one is the same."""
    options = TrainOptions(
        "", kind, Path("out"), Path("work"), num_layers=1, block_size=BLOCK, markov_rank=MARKOV_RANK, speculators=True
    )
    config = network_config(options, target.model.config, None, "")
    size = torch.cat([reading.features for reading in readings.read(learned)]).square().mean(0).sqrt()[: config.feature_size]
    torch.manual_seed(0)
    student = BlockStudent(config, target, torch.zeros_like(size), size)
    student.initialise([assemble(learned, readings, WHOLE, 0, HERE.device)])
    begun = expected_len(student, unseen)
    teach(student, learned, readings, tmp_path / "checkpoint.pt")
    taught = expected_len(student, unseen)
    assert taught > begun + LEAST_GAIN
    student.save(tmp_path / "saved")
    again = BlockStudent(config, target, torch.zeros_like(size), torch.ones_like(size))
    again.network.load_state_dict(load_network(tmp_path / "saved", target.rows).state_dict())
    assert expected_len(again, unseen) == pytest.approx(taught, abs=0.01)


def test_layers_learn_beyond_the_targets_own(
    target: FrozenTarget, readings: HiddenStateReader, learned: list[TargetAnswer], unseen: AnswerBatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    student = LayersStudent(target, (0,), None)
    student.initialise()
    begun = expected_len(student, unseen)
    teach(student, learned, readings, tmp_path / "checkpoint.pt")
    assert expected_len(student, unseen) > begun + LEAST_GAIN


def test_every_head_starts_from_the_same_regression(
    target: FrozenTarget, readings: HiddenStateReader, learned: list[TargetAnswer], unseen: AnswerBatch
) -> None:
    lens = {}
    for head in HEADS:
        student = dspark(target, readings, learned, head)
        regress(student, target, readings, learned)
        lens[head] = expected_len(student, unseen)
    assert lens["gated"] == pytest.approx(lens["markov"], abs=1e-5)
    assert lens["rnn"] == pytest.approx(lens["markov"], abs=0.005)


def test_blocks_of_one_position_start_without_a_bias(
    target: FrozenTarget, readings: HiddenStateReader, learned: list[TargetAnswer]
) -> None:
    student = dspark(target, readings, learned, "rnn", block=1)
    regress(student, target, readings, learned)
    assert student.network.markov_head is not None
    assert not student.network.markov_head.markov_w2.weight.any()


def test_indefinite_moments_have_a_square_root(
    target: FrozenTarget, readings: HiddenStateReader, learned: list[TargetAnswer]
) -> None:
    """Moments of fewer positions than inputs, whose products were summed in fp32."""
    torch.manual_seed(0)
    moments = Moments(dspark(target, readings, learned[:4], "markov").config)
    values = torch.linspace(-1e-5, 1.0, len(moments.xx), dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    moments.xx += basis @ values.diag() @ basis.T
    root = moments.root().double()
    torch.testing.assert_close(root.T @ root, moments.xx, atol=1e-4, rtol=1e-3)


def test_an_anchor_without_context_reads_no_other_sequence(
    target: FrozenTarget, readings: HiddenStateReader, learned: list[TargetAnswer]
) -> None:
    """The regression does not depend on packing. The prompts have one token, which is an anchor too."""
    short = [
        replace(a, key=f"short {a.key}", prompt_token_ids=a.token_ids[:1], answer_token_ids=a.token_ids[1:8])
        for a in learned
    ]
    packed, single = (dspark(target, readings, short, "markov", anchor_rank=1000) for _ in range(2))
    regress(packed, target, readings, short)
    single.initialise(assemble([a], readings, WHOLE, 0, HERE.device) for a in short)
    assert packed.network.anchor_input is not None
    assert single.network.anchor_input is not None
    torch.testing.assert_close(
        packed.network.anchor_input.maps.weight, single.network.anchor_input.maps.weight, rtol=1e-3, atol=1e-4
    )


def test_a_warm_start_keeps_the_head(
    target: FrozenTarget, readings: HiddenStateReader, learned: list[TargetAnswer], tmp_path: Path
) -> None:
    dspark(target, readings, learned, "rnn").save(tmp_path / "mine")
    options = TrainOptions("", "dspark", Path("out"), Path("work"), begin_with=tmp_path / "mine")
    assert warm_start(options, target).head == "rnn"
    with pytest.raises(InvalidField, match="head: must be left out, or rnn as the drafter in mine has it"):
        warm_start(replace(options, head="gated"), target)


def test_an_unknown_head_is_refused() -> None:
    with pytest.raises(InvalidField, match="head: must be one of markov, gated, rnn"):
        TrainOptions("", "dspark", Path("out"), Path("work"), head="vanilla")  # type: ignore[arg-type]


# ---- resuming runs with a time budget


class Cut(Exception):
    """The interruption of a run."""


class Cutting(Silent):
    """Interrupts a run at the given report of a step, and records the reports."""

    def __init__(self, name: str = "", moment: int = 0) -> None:
        self._at = (name, moment)
        self.told: dict[str, list[float]] = {}

    def step(self, name: str, total: float) -> Callable[[float], None]:
        told = self.told.setdefault(name, [])

        def tell(done: float) -> None:
            told.append(done)
            if (name, len(told)) == self._at:
                raise Cut

        return tell


def clock(monkeypatch: pytest.MonkeyPatch, tick_s: float) -> None:
    """Every reading of the clock advances it."""
    times = itertools.count(0.0, tick_s)
    monkeypatch.setattr(work_folder, "monotonic", lambda: next(times))


def test_time_spent_by_earlier_runs_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 10.0)

    def run(seconds: float | None = 100.0, **settings: int) -> int:
        """Returns how often it may be asked before the time is over, at most twenty times."""
        work = WorkFolder(tmp_path, {"target": "a"})
        work.begin("answers", settings)
        is_over = work.deadline("answers", seconds)
        return sum(1 for _ in itertools.takewhile(lambda _: not is_over(), range(20)))

    work = WorkFolder(tmp_path, {"target": "a"})
    work.begin("answers", {})
    is_over = work.deadline("answers", 100.0)
    assert not any(is_over() for _ in range(6))  # and then it is killed
    assert run() == 3
    assert run() == 0
    assert run(num_tokens=5) == 9, "with other settings it begins anew"
    assert run(seconds=None, num_tokens=5) == 20


def test_a_finished_step_gets_no_more_time(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, {"target": "a"})
    work.begin("answers", {})
    work.finish("answers")
    assert work.deadline("answers", 100.0)()


def test_a_checkpoint_that_is_damaged_or_of_another_format_is_ignored(target: FrozenTarget, tmp_path: Path) -> None:
    readings = HiddenStateReader(target, (0, 1), InMemory(0), max_pass_tokens=1)
    plan, timing, path = BatchPlan(100, 10), Schedule(num_epochs=1, learning_rate=1e-3), tmp_path / "checkpoint.pt"

    def training() -> Distillation:
        return Distillation(torch.nn.Linear(2, 2), [], readings, plan, timing, HERE, path, seed=0)

    assert not training().restore()
    training().save()
    assert training().restore()
    path.write_bytes(path.read_bytes()[:1000])
    assert not training().restore()
    training().save()
    torch.save(torch.load(path, weights_only=True) | {"format": 0}, path)
    assert not training().restore()


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_work_folder_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"damaged manifest\.json"):
        WorkFolder(tmp_path, {})


def test_layers_drafters_are_saved_atomically(target: FrozenTarget, tmp_path: Path) -> None:
    """They are saved every few minutes, and may be served meanwhile."""
    mine, folder = LayersStudent(target, (0,), None), tmp_path / "mine"
    mine.save(folder)
    with (folder / "model.safetensors").open("rb") as served:
        mine.save(folder)
        assert os.fstat(served.fileno()).st_nlink == 0, "the file that is mapped stays what it was"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_run_whose_writing_time_is_over_resumes_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompts or answers are added, so training does not start anew."""
    model = write_wordy_model(tmp_path / "model")
    given = tmp_path / "given.jsonl"
    syllables = ("ba", "do", "ki", "lu", "me", "na", "po", "ra", "si", "tu")
    lines = [f"{a}{b} {b}{a} {a}{a}" for a, b in itertools.product(syllables, repeat=2)][:60]
    given.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    asked = options(model, tmp_path, prompts=(given,), num_tokens=20_000, budget_minutes=10.0, checkpoint_minutes=0.0)
    written = [tmp_path / "work" / f"{kind}-0.jsonl" for kind in ("prompts", "answers")]

    clock(monkeypatch, 4.0)
    first = Cutting("training", 5)
    with pytest.raises(Cut):
        train(asked, HERE, first)
    assert max(first.told["prompts"]) < asked.num_prompts, "the time is to end it early"
    assert max(first.told["answers"]) < asked.num_tokens, "the time is to end it early"
    before = [path.read_bytes() for path in written]

    clock(monkeypatch, 4.0)
    second = Cutting()
    assert train(asked, HERE, second) is not None
    assert [path.read_bytes() for path in written] == before
    assert "regression" not in second.told
    assert second.told["training"][0] > first.told["training"][0]
