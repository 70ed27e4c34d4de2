"""``outrider train``: prompts, answers, distillation, evaluation, and the drafter's folder, in steps that resume. A step
with changed settings starts anew, but generated text is always kept."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cluster.errors import InvalidField
from drafters.hidden_states.config import BlockConfig, EagleConfig
from drafters.hidden_states.formats import read_config
from drafters.replay import Round
from drafters.shipped import kind_of
from drafters.table import FILE as TABLE_FILE
from drafters.table import count_frequencies
from engine.cpu.packed import product_dtype
from engine.models.prepare import ensure_model
from profiler.calibration import TELLING_MARGINS, log_margins
from training.batches import AnswerBatch, assemble, epoch
from training.block_student import BlockStudent
from training.card import CardData, plot_acceptance, plot_losses, write_card
from training.corpus import (
    GivenPrompt,
    TargetAnswer,
    choose_vocabulary,
    coverage,
    evaluation_fingerprints,
    hold_out,
    read_given,
)
from training.distil import CurvePoint, Distillation, Schedule
from training.distributed import World
from training.eagle_student import EagleStudent
from training.evaluation import (
    DRAFT_LENS,
    Acceptance,
    Halves,
    JudgedDraft,
    acceptance,
    calibrate,
    evaluate,
    in_halves,
    standardisation,
)
from training.frozen import FrozenTarget, free_memory
from training.hidden_states import HiddenStateReader, InMemory, OnDisk, delete_partial_files
from training.layers_student import LayersStudent
from training.recipe import (
    MIN_HELD_OUT,
    TrainOptions,
    batch_plan,
    held_out_share,
    kept_layers,
    network_config,
    reader_layers,
    warm_start,
)
from training.work_folder import WorkFolder, check_replaceable, model_fingerprint, replace_folder
from training.writing import Share, Writer

MAX_TABLE_CONTEXTS = 400_000
MAX_REGRESSION_ROWS = 300_000
MAX_CACHE_BYTES = {"cpu": 24 * 2**30, "cuda": 32 * 2**30}  # of hidden states: on disk, in the GPU's memory
CACHE_SHARE = 0.3  # of the GPU's free memory, at most
# On a CPU batching answers gains nothing, and alone their hidden states are reproducible to the last bit.
MAX_PASS_TOKENS = {"cpu": 1, "cuda": 16384}
CHECK_ANSWERS = 16  # held-out answers that a checkpoint is evaluated on
MAX_MODEL_LEN = 2048
# Options without effect on training, or recorded separately.
_NOT_RECORDED = ("out", "work", "device", "quick", "checkpoint_minutes", "asked", "begin_with")


class Reporter(Protocol):
    def step(self, name: str, total: float) -> Callable[[float], None]:
        """Begins a step. The function takes how much of ``total`` is done."""

    def say(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    """``untrained``: acceptance of the same drafter before training; empty for a table."""

    folder: Path
    trained: tuple[Acceptance, ...]
    untrained: tuple[Acceptance, ...]


def train(options: TrainOptions, world: World, reporter: Reporter) -> Result | None:
    """Runs the pipeline. The first process returns the result, others None.

    Raises:
        InvalidField: the options contradict each other, the files or the folders.
        ModelUnavailable: the target or the drafter to begin with is missing or not supported.
    """
    options = options.resolved()
    check_replaceable(options.out)
    given = read_given(options.prompts, options.data_folder)
    target = FrozenTarget(ensure_model(options.model), device=world.device, dtype=options.dtype, max_model_len=MAX_MODEL_LEN)
    if options.begin_with is not None:
        options = warm_start(options, target)
    identity = {
        "target": target.info.name,
        "tokenizer": target.info.tokenizer_fingerprint,
        "weights": model_fingerprint(target.folder),
        "dtype": target.dtype_name,
        "seed": options.seed,
    }
    work = WorkFolder(options.work, identity, writes=world.is_first)
    if world.is_first:
        delete_partial_files(work.path / "readings")  # other processes read there only after the answers
    reporter.say(f"target {target.info.name} on {world.device}, work in {work.path}")
    answers = _write_answers(options, world, reporter, target, work, given)
    num_answered = len({a.key for a in answers if not a.sources})
    if num_answered < 2:
        raise InvalidField("num_tokens", options.num_tokens, "at least two prompts must be answered, one to evaluate on")
    work.finish("answers")
    learned, held_out = hold_out(answers, held_out_share(num_answered), MIN_HELD_OUT)
    reporter.say(f"{len(learned)} answers to train on, {len(held_out)} held out")
    run = _Run(options, world, reporter, target, work, learned, held_out)
    return run.table() if options.drafter == "table" else run.network()


def _write_answers(
    options: TrainOptions, world: World, reporter: Reporter, target: FrozenTarget, work: WorkFolder, given: list[GivenPrompt]
) -> list[TargetAnswer]:
    writer = Writer(target, work.path, options.seed, Share(world.rank, world.size))
    run = {"processes": world.size, "budget_minutes": options.budget_minutes}
    prompts_s, answers_s, _ = options.seconds()
    if options.num_prompts:
        work.begin("prompts", {"num_prompts": options.num_prompts} | run)
        expired = work.deadline("prompts", prompts_s)
        writer.write_prompts(options.num_prompts, reporter.step("prompts", options.num_prompts), expired)
        world.barrier()
    tasks = writer.tasks(options.num_prompts, given, evaluation_fingerprints(options.data_folder))
    if options.num_prompts:
        work.finish("prompts")
    if not tasks:
        raise InvalidField("prompts", len(given), "none is left to be answered: give more prompts, or more time")
    limits = {"num_tokens": options.num_tokens, "max_answer_tokens": options.max_answer_tokens}
    work.begin("answers", limits | {"tasks": _digest(task.name for task in tasks)} | run)
    expired = work.deadline("answers", answers_s)
    tell = reporter.step("answers", options.num_tokens)
    writer.write_answers(tasks, options.num_tokens, options.max_answer_tokens, tell, expired)
    world.barrier()
    return [a for a in writer.answers(tasks, options.num_tokens) if len(a.answer_token_ids) > 1]


@dataclass
class _Run:
    options: TrainOptions
    world: World
    reporter: Reporter
    target: FrozenTarget
    work: WorkFolder
    learned: Sequence[TargetAnswer]
    held_out: Sequence[TargetAnswer]

    def __post_init__(self) -> None:
        options, world, target, work = self.options, self.world, self.target, self.work
        self._initial = None if options.begin_with is None else read_config(options.begin_with)
        layers = reader_layers(options, target.model.config.num_layers)
        kind = world.device.type
        free_bytes = free_memory(world.device)
        weights = f"{work.identity['weights']} {work.identity['dtype']}"
        cache = (
            OnDisk(work.path / "readings", layers, weights, MAX_CACHE_BYTES[kind], world.size)
            if free_bytes is None
            else InMemory(min(MAX_CACHE_BYTES[kind], int(CACHE_SHARE * free_bytes)))
        )
        self._reader = HiddenStateReader(target, layers, cache, MAX_PASS_TOKENS[kind])
        self._folder = work.path / options.out.name  # of intermediate drafters and the checkpoint
        self._folder.mkdir(exist_ok=True)

    def table(self) -> Result | None:
        if not self.world.is_first:
            return None
        tell = self.reporter.step("counting", 1)
        info = self.target.info
        table = count_frequencies(((answer.token_ids, answer.prompt_len) for answer in self.learned), MAX_TABLE_CONTEXTS)
        fingerprint = info.tokenizer_fingerprint
        replace(table, vocab_size=info.vocab_size, tokenizer_fingerprint=fingerprint).save(self._folder / TABLE_FILE)
        tell(1)
        return self._finish(self._folder, None, [], {})

    def network(self) -> Result | None:
        options, world = self.options, self.world
        vocabulary = self._vocabulary()
        torch.manual_seed(options.seed)
        student = self._student(vocabulary).to(world.device)
        untrained, latest, checkpoint = (self._folder / name for name in ("untrained", "latest", "checkpoint.pt"))
        step = f"train {options.out.name}"
        if not self.work.begin(step, self._settings()) and world.is_first:
            checkpoint.unlink(missing_ok=True)
            shutil.rmtree(untrained, ignore_errors=True)
        world.barrier()
        if world.is_first and kind_of(untrained) is None:
            student.save(untrained)
        bf16 = product_dtype(torch.bfloat16, world.device) == torch.bfloat16  # where its products are faster than fp32's
        checkpoint_s = 60.0 * options.checkpoint_minutes
        schedule = Schedule(options.num_epochs, options.learning_rate, options.seconds()[2], checkpoint_s, bf16)
        data = (self.learned, self._reader, batch_plan(options, world.device))
        check = partial(self._evaluate_checkpoint, student, latest)
        training = Distillation(student, *data, schedule, world, checkpoint, options.seed, check)
        if not training.restore() and self._initial is None:
            student.initialise(self._regression_batches())  # every process from the same answers
        progress = training.progress
        if not progress.done:
            training.run(self.reporter.step("training", 1.0))
        training.use_average()
        if not world.is_first:
            return None
        student.save(latest)
        recipe = {
            "steps": progress.step,
            "minutes of training": round(progress.elapsed_s / 60, 1),
            "tokens read": progress.num_tokens,
            "tokens in its vocabulary": "all" if vocabulary is None else len(vocabulary),
            "share of held-out tokens in it": round(coverage(vocabulary, self.held_out), 4),
        }
        result = self._finish(latest, untrained, progress.points, recipe)
        self.work.finish(step)
        return result

    def _settings(self) -> dict[str, Any]:
        """What the trained weights depend on."""
        options = self.options
        settings = {
            "options": {k: str(v) for k, v in asdict(options).items() if k not in _NOT_RECORDED},
            "answers": _digest(answer.name for answer in self.learned),
            "processes": self.world.size,
        }
        if options.begin_with is not None and self._initial is not None:
            token_ids = self._initial.draft_token_ids or ()
            settings["begin_with"] = [model_fingerprint(options.begin_with), _digest(map(str, token_ids))]
        return settings

    def _vocabulary(self) -> Tensor | None:
        if self._initial is not None:
            token_ids = self._initial.draft_token_ids
            return None if token_ids is None else torch.tensor(token_ids)
        info = self.target.info
        return choose_vocabulary(self.learned, self.options.vocabulary, info.vocab_size, info.eos_token_ids)

    def _student(self, vocabulary: Tensor | None) -> BlockStudent | EagleStudent | LayersStudent:
        options, config = self.options, self.target.model.config
        if options.drafter == "layers":
            return LayersStudent(self.target, kept_layers(config.num_layers, options.num_layers), vocabulary)
        sample = self.learned[:: max(1, len(self.learned) // 64)]
        pairs = zip(self._reader.read(sample), sample, strict=True)
        mean, std = standardisation([states.features[answer.prompt_len - 1 :] for states, answer in pairs])
        described = options, config, vocabulary, self.target.info.tokenizer_fingerprint
        shape = self._initial or network_config(*described)
        if isinstance(shape, EagleConfig) or options.speculators:  # whose projection of the features has no bias
            size = (mean.square() + std.square()).sqrt()[: shape.feature_size]
            mean, std = torch.zeros_like(size), size
        if isinstance(shape, EagleConfig):
            return EagleStudent(shape, self.target, mean, std)
        assert isinstance(shape, BlockConfig)
        student = BlockStudent(shape, self.target, mean, std)
        if options.begin_with is not None:
            student.begin_with(options.begin_with)
        return student

    def _regression_batches(self) -> Iterator[AnswerBatch]:
        total = min(MAX_REGRESSION_ROWS, sum(len(a.token_ids) for a in self.learned))
        tell = self.reporter.step("regression", total)
        plan = batch_plan(self.options, self.world.device)
        # A position costs little here, the moments of a batch cost more.
        plan = replace(plan, max_positions=plan.max_rows * plan.block_size, persistence=1.0)
        num_rows = 0
        for answers, seed in epoch(self.learned, plan, self.options.seed, 0):
            batch = assemble(answers, self._reader, plan, seed, self.world.device)
            num_rows += len(batch.token_ids)
            tell(min(num_rows, total))
            yield batch
            if num_rows >= total:
                return

    def _evaluate_checkpoint(self, student: BlockStudent | EagleStudent | LayersStudent, folder: Path) -> float:
        """Saves the drafter, which can be served from then on. Returns its held-out accepted length."""
        if not self.world.is_first:
            return 0.0
        student.save(folder)
        answers = [a for a in self.held_out if a.temperature == 0.0][:CHECK_ANSWERS] or self.held_out[:CHECK_ANSWERS]
        rounds = evaluate(folder, self.target, self._reader, answers, DRAFT_LENS[-1])
        return acceptance(rounds, DRAFT_LENS[-1], 0.0).accepted_len

    def _finish(self, folder: Path, untrained: Path | None, points: Sequence[CurvePoint], recipe: dict[str, Any]) -> Result:
        """Evaluates, calibrates for each temperature, and replaces the output folder."""
        folders = [f for f in (folder, untrained) if f is not None]
        temperatures = sorted({answer.temperature for answer in self.held_out})
        cases = [(f, t, n) for f in folders for t in temperatures for n in DRAFT_LENS]
        tell = self.reporter.step("evaluation", len(cases))
        found: dict[Path, list[Acceptance]] = {f: [] for f in folders}
        drafts: dict[float, Halves] = {}
        for i, (f, temperature, draft_len) in enumerate(cases):
            halves = in_halves([a for a in self.held_out if a.temperature == temperature])
            first, second = (evaluate(f, self.target, self._reader, half, draft_len) for half in halves)
            found[f].append(acceptance([*first, *second], draft_len, temperature))
            if (f, draft_len) == (folder, DRAFT_LENS[-1]):
                drafts[temperature] = self._judged(f, halves[0], first), self._judged(f, halves[1], second)
            tell(i + 1)
        out = self.options.out
        part = out.with_name(f".{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part, ignore=shutil.ignore_patterns("untrained", "latest", "checkpoint.*"))
        confidences = {} if self.options.drafter == "table" else calibrate(drafts, part)
        before = () if untrained is None else tuple(found[untrained])
        result = Result(out, tuple(found[folder]), before)
        if points:
            plot_losses(points, part / "losses.png")
        plot_acceptance(result.trained, part / "acceptance.png")
        answers = (self.learned, self.held_out)
        write_card(
            part, CardData(self.options, self.target.info.name, *answers, result.trained, before, recipe, confidences)
        )
        replace_folder(part, out)
        return result

    def _judged(self, folder: Path, answers: Sequence[TargetAnswer], rounds: Sequence[Round]) -> list[JudgedDraft]:
        """``rounds``: of the answers, uncalibrated. A second replay of a block drafter tells the margins of its drafts."""
        if not (self.options.form and self.options.form.has_heads):
            return [JudgedDraft(one.confidences, one.num_accepted) for one in rounds]
        again = evaluate(folder, self.target, self._reader, answers, DRAFT_LENS[-1], TELLING_MARGINS)
        return [
            JudgedDraft(one.confidences, one.num_accepted, log_margins(margins.confidences))
            for one, margins in zip(rounds, again, strict=True)
        ]


def _digest(names: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()
