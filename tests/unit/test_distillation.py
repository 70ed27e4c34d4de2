"""Distillation improves students beyond their initialisation, on unseen positions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import InvalidField
from drafters.hidden_states.checkpoint import load_network
from drafters.hidden_states.heads import GatedMarkovHead, RecurrentHead
from training.batches import AnswerBatch, BatchPlan, assemble
from training.block_student import BlockStudent
from training.corpus import TargetAnswer
from training.distil import Distillation, Schedule
from training.distributed import World
from training.eagle_student import EagleStudent
from training.evaluation import standardisation
from training.feature_cache import InMemory
from training.frozen import FrozenTarget
from training.hidden_state_student import HiddenStateStudent
from training.hidden_states import HiddenStateReader
from training.layers_student import LayersStudent
from training.recipe import HEADS, HeadKind, TrainOptions, network_config, warm_start
from training.regression import Moments

pytestmark = pytest.mark.slow

HERE = World(0, 1, torch.device("cpu"))
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
