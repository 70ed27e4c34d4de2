"""``outrider train``: prompts, answers, distillation, evaluation, and the drafter's folder, in steps that resume.

A step is done when the manifest of the work folder says so. A step that was cut off leaves lines in files or a checkpoint,
from which it goes on; one whose settings changed begins anew, except that what the target wrote is always kept.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cluster.errors import InvalidField
from drafters.dspark.config import load_dspark_config
from drafters.shipped import kind_of
from drafters.table import FILE as TABLE_FILE
from drafters.table import count_frequencies
from drafters.training.batches import Batch, assemble, epoch
from drafters.training.card import CardData, write_card
from drafters.training.confidences import Halves, calibrate, in_halves
from drafters.training.corpus import Answer, evaluation_fingerprints, read_given
from drafters.training.distil import Distillation, Point, Progress
from drafters.training.distributed import World
from drafters.training.dspark_student import DSparkStudent
from drafters.training.evaluation import DRAFT_LENS, Acceptance, acceptance, evaluate, standardisation
from drafters.training.feature_cache import InMemory, OnDisk, sweep
from drafters.training.frozen import FrozenTarget, free_memory
from drafters.training.held_out import hold_out
from drafters.training.hidden_states import FeatureCache, HiddenStateReader, Rows, target_rows
from drafters.training.layers_student import LayersStudent
from drafters.training.manifest import WorkFolder
from drafters.training.output_dir import check_replaceable, replace_folder
from drafters.training.plots import plot_acceptance, plot_losses
from drafters.training.recipe import (
    HELD_OUT,
    MAX_HELD_OUT,
    MIN_HELD_OUT,
    Times,
    TrainOptions,
    batch_plan,
    dspark_config,
    feature_layers,
    kept_layers,
    regression_plan,
    schedule,
)
from drafters.training.time_budget import TimeBudget
from drafters.training.vocabulary import choose_vocabulary, coverage
from drafters.training.warm_start import going_on
from drafters.training.writing import Share, Writer
from engine.models.identity import model_fingerprint
from engine.models.prepare import ensure_model

MAX_TABLE_CONTEXTS = 400_000
MAX_REGRESSION_ROWS = 300_000
MAX_KEPT_BYTES = {"cpu": 24 * 2**30, "cuda": 32 * 2**30}  # of readings: on disk, in the GPU's memory
KEPT_SHARE = 0.3  # of the memory that the GPU has left, at most
# On a CPU an answer is read as fast alone, and then its reading does not depend on others, not even in the last bit.
MAX_PASS_TOKENS = {"cpu": 1, "cuda": 16384}
CHECK_ANSWERS = 16  # held-out answers that a checkpoint is tried on
MAX_MODEL_LEN = 2048
# Do not change what training does, except for the last, which is told where it is given.
_UNTOLD = ("out", "work", "device", "quick", "checkpoint_minutes", "asked", "begin_with")


class Reporter(Protocol):
    """Shows how far a step is."""

    def step(self, name: str, total: float) -> Callable[[float], None]:
        """A step begins; the function is told how much of ``total`` is done, and may be told the same twice."""

    def say(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    """``untrained`` is the same drafter with random weights, or the one that training began with, on the same held-out
    answers; none for a table."""

    folder: Path
    trained: tuple[Acceptance, ...]
    untrained: tuple[Acceptance, ...]


class Student(Protocol):
    def save(self, folder: Path, target_folder: Path) -> None: ...


def train(options: TrainOptions, world: World, reporter: Reporter) -> Result | None:
    """The whole pipeline; the first process returns the result, others None.

    Raises:
        InvalidField: options that contradict each other, prompts that must not be trained on, a work folder of another run,
            a place for the drafter where something else is.
        ModelUnavailable: the target is missing or not supported.
    """
    options = options.resolved()
    check_replaceable(options.out)
    given = read_given(options.prompts, options.data_folder)
    target = FrozenTarget(ensure_model(options.model), device=world.device, dtype=options.dtype, max_model_len=MAX_MODEL_LEN)
    if options.begin_with is not None:
        options = going_on(options, target)
    identity = {
        "target": target.info.name,
        "tokenizer": target.info.tokenizer_fingerprint,
        "weights": model_fingerprint(target.folder),
        "dtype": target.dtype_name,
        "seed": options.seed,
    }
    work = WorkFolder(options.work, identity, writes=world.is_first)
    if world.is_first:
        sweep(work.path / "readings")  # others read nothing before all have answers
    times = Times.of(options.budget_minutes, options.num_prompts)
    writer = Writer(target, work.path, options.seed, Share(world.rank, world.size))
    reporter.say(f"target {target.info.name} on {world.device}, work in {work.path}")

    by_whom = {"processes": world.size, "budget_minutes": options.budget_minutes}
    if options.num_prompts:
        is_over = _begin(work, "prompts", {"num_prompts": options.num_prompts} | by_whom, times.prompts_s)
        tell = reporter.step("prompts", options.num_prompts)
        writer.write_prompts(options.num_prompts, _adding(tell), is_over)
        world.barrier()
    tasks = writer.tasks(options.num_prompts, given, evaluation_fingerprints(options.data_folder))
    if options.num_prompts:
        work.finish("prompts", num_to_answer=len({task.key for task in tasks}))
    if not tasks:
        raise InvalidField("prompts", len(given), "nothing is left to be answered: give more prompts, or more time")
    bounds = {"num_tokens": options.num_tokens, "max_answer_tokens": options.max_answer_tokens}
    of_tasks = {"tasks": _digest(task.name for task in tasks)}
    is_over = _begin(work, "answers", bounds | of_tasks | by_whom, times.answers_s)
    tell = reporter.step("answers", options.num_tokens)
    writer.write_answers(tasks, options.num_tokens, options.max_answer_tokens, _adding(tell), is_over)
    world.barrier()
    answers = [a for a in writer.answers(tasks, options.num_tokens) if len(a.answer_token_ids) > 1]
    num_answered = len({a.key for a in answers if not a.sources})
    if num_answered < 2:
        raise InvalidField("num_tokens", options.num_tokens, "at least two prompts must be answered, one to evaluate on")
    work.finish("answers", num_answers=len(answers), num_tokens=sum(len(a.answer_token_ids) for a in answers))
    learned, held_out = hold_out(answers, min(HELD_OUT, MAX_HELD_OUT / num_answered), MIN_HELD_OUT)
    reporter.say(f"{len(learned)} answers to learn from, {len(held_out)} held out")
    run = _Run(options, world, reporter, target, work, learned, held_out)
    return run.table() if options.drafter == "table" else run.network(times.training_s)


class _Run:
    """From answers to a drafter's folder."""

    def __init__(
        self,
        options: TrainOptions,
        world: World,
        reporter: Reporter,
        target: FrozenTarget,
        work: WorkFolder,
        learned: Sequence[Answer],
        held_out: Sequence[Answer],
    ) -> None:
        self._options, self._world, self._reporter = options, world, reporter
        self._target, self._work = target, work
        self._learned, self._held_out = learned, held_out
        self._begun = None if options.begin_with is None else load_dspark_config(options.begin_with)
        self._layers = feature_layers(target.model.config.num_layers)
        kind = world.device.type
        free_bytes = free_memory(world.device)
        if free_bytes is not None:
            kept: FeatureCache = InMemory(min(MAX_KEPT_BYTES[kind], int(KEPT_SHARE * free_bytes)))
        else:
            of_target = f"{work.identity['weights']} {work.identity['dtype']}"
            kept = OnDisk(work.path / "readings", self._layers, of_target, MAX_KEPT_BYTES[kind], world.size)
        self._readings = HiddenStateReader(target, self._layers, kept, MAX_PASS_TOKENS[kind])
        self._folder = work.path / options.out.name  # of what is under way
        self._folder.mkdir(exist_ok=True)

    def table(self) -> Result | None:
        if not self._world.is_first:
            return None
        tell = self._reporter.step("counting", 1)
        texts = ((answer.token_ids, answer.prompt_len) for answer in self._learned)
        info = self._target.info
        table = count_frequencies(texts, MAX_TABLE_CONTEXTS)
        table = replace(table, vocab_size=info.vocab_size, tokenizer_fingerprint=info.tokenizer_fingerprint)
        table.save(self._folder / TABLE_FILE)
        tell(1)
        rows = target_rows(self._target)
        return self._conclude(rows, self._folder, None, [], {})

    def network(self, max_seconds: float | None) -> Result | None:
        options, world = self._options, self._world
        vocabulary = self._vocabulary()
        rows = target_rows(self._target)
        torch.manual_seed(options.seed)
        student = self._student(vocabulary, rows).to(world.device)
        fresh, latest = self._folder / "untrained", self._folder / "latest"
        settings = {
            "options": {k: str(v) for k, v in asdict(options).items() if k not in _UNTOLD},
            "answers": _digest(f"{answer.key} {answer.temperature}" for answer in self._learned),
            "processes": world.size,
        }
        if options.begin_with is not None:
            begun = self._begun.draft_token_ids if self._begun is not None else None
            settings["begin_with"] = [model_fingerprint(options.begin_with), _digest(map(str, begun or ()))]
        step = f"train {options.out.name}"
        if not self._work.begin(step, settings) and world.is_first:
            (self._folder / "checkpoint.pt").unlink(missing_ok=True)
            shutil.rmtree(fresh, ignore_errors=True)
        world.barrier()
        if world.is_first and kind_of(fresh) is None:
            student.save(fresh, self._target.folder)
        plan = batch_plan(options, world.device)
        training = Distillation(
            student,
            self._learned,
            self._readings,
            plan,
            schedule(options, world.device, max_seconds),
            world,
            self._folder / "checkpoint.pt",
            options.seed,
            evaluate=lambda: self._try(student, latest, rows),
        )
        if not training.restore():
            self._initialise(student)
            training.restart()
        if not training.progress.done:
            tell = self._reporter.step("training", 1.0)
            training.run(lambda _, share: tell(share))
        training.use_average()
        if not world.is_first:
            return None
        student.save(latest, self._target.folder)
        result = self._conclude(rows, latest, fresh, training.progress.points, _recipe(training.progress, vocabulary, self))
        self._work.finish(step, accepted_len=result.trained[-1].accepted_len, steps=training.progress.step)
        return result

    def _student(self, vocabulary: Tensor | None, rows: Rows) -> DSparkStudent | LayersStudent:
        options, config = self._options, self._target.model.config
        if options.drafter == "layers":
            return LayersStudent(self._target.folder, kept_layers(config.num_layers, options.num_layers), rows, vocabulary)
        sample = self._learned[:: max(1, len(self._learned) // 64)]
        pairs = zip(self._readings.of(sample), sample, strict=True)
        mean, std = standardisation([reading.features[answer.prompt_len - 1 :] for reading, answer in pairs])
        shape = self._begun or dspark_config(options, config, vocabulary, self._target.info.tokenizer_fingerprint)
        student = DSparkStudent(shape, rows, mean, std)
        if options.begin_with is not None:
            student.begin_with(options.begin_with, rows)
        return student

    def _vocabulary(self) -> Tensor | None:
        if self._begun is not None:
            token_ids = self._begun.draft_token_ids
            return None if token_ids is None else torch.tensor(token_ids)
        info = self._target.info
        return choose_vocabulary(self._learned, self._options.vocabulary, info.vocab_size, info.eos_token_ids)

    def _initialise(self, student: DSparkStudent | LayersStudent) -> None:
        """The same in each process: all see the same answers. A drafter that training begins with is there already."""
        if self._begun is not None:
            return
        if isinstance(student, LayersStudent):
            student.initialise(self._target.folder)
            return
        total = min(MAX_REGRESSION_ROWS, sum(len(a.token_ids) for a in self._learned))
        student.initialise(self._regression_batches(self._reporter.step("regression", total), total), self._target)

    def _regression_batches(self, tell: Callable[[float], None], total: int) -> Iterator[Batch]:
        plan = regression_plan(batch_plan(self._options, self._world.device))
        num_rows = 0
        for answers, seed in epoch(self._learned, plan, self._options.seed, 0):
            batch = assemble(answers, self._readings, plan, seed, self._world.device)
            num_rows += len(batch.token_ids)
            tell(min(num_rows, total))
            yield batch
            if num_rows >= total:
                return

    def _try(self, student: Student, folder: Path, rows: Rows) -> float:
        """Held-out accepted length of what there is now, which is saved: it can be served already."""
        if not self._world.is_first:
            return 0.0
        student.save(folder, self._target.folder)
        answers = [a for a in self._held_out if a.temperature == 0.0][:CHECK_ANSWERS] or self._held_out[:CHECK_ANSWERS]
        rounds = evaluate(folder, self._target, rows, self._readings, answers, DRAFT_LENS[-1])
        return acceptance(rounds, DRAFT_LENS[-1], 0.0).accepted_len

    def _conclude(
        self, rows: Rows, folder: Path, untrained: Path | None, points: Sequence[Point], recipe: dict[str, Any]
    ) -> Result:
        """Evaluation, calibration, and the folder at its place, at once. Calibration is for the lowest temperature: higher
        ones are not told apart when a drafter is served, and of their drafts fewer survive."""
        folders = [f for f in (folder, untrained) if f is not None]
        temperatures = sorted({answer.temperature for answer in self._held_out})
        cases = [(f, t, n) for f in folders for t in temperatures for n in DRAFT_LENS]
        tell = self._reporter.step("evaluation", len(cases))
        found: dict[Path, list[Acceptance]] = {f: [] for f in folders}
        drafts: Halves = ([], [])
        for i, (f, temperature, draft_len) in enumerate(cases):
            answers = [a for a in self._held_out if a.temperature == temperature]
            first, second = (evaluate(f, self._target, rows, self._readings, half, draft_len) for half in in_halves(answers))
            found[f].append(acceptance([*first, *second], draft_len, temperature))
            if (f, temperature, draft_len) == (folder, temperatures[0], DRAFT_LENS[-1]):
                drafts = first, second
            tell(i + 1)
        out = self._options.out
        part = out.with_name(f".{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part, ignore=shutil.ignore_patterns("untrained", "latest", "checkpoint.*"))
        confidences = {} if self._options.drafter == "table" else calibrate(drafts, part)
        trained, fresh = tuple(found[folder]), tuple(found[untrained]) if untrained is not None else ()
        if points:
            plot_losses(points, part / "losses.png")
        plot_acceptance(trained, part / "acceptance.png")
        of_run = (self._options, self._target.info.name, self._learned, self._held_out)
        write_card(part, CardData(*of_run, trained, fresh, recipe, confidences))
        replace_folder(part, out)
        return Result(out, trained, fresh)

    @property
    def learned(self) -> Sequence[Answer]:
        return self._learned

    @property
    def held_out(self) -> Sequence[Answer]:
        return self._held_out


def _recipe(progress: Progress, vocabulary: Tensor | None, run: _Run) -> dict[str, Any]:
    return {
        "steps": progress.step,
        "minutes of training": round(progress.elapsed_s / 60, 1),
        "tokens read": progress.num_tokens,
        "tokens in its vocabulary": "all" if vocabulary is None else len(vocabulary),
        "share of held-out tokens in it": round(coverage(vocabulary, run.held_out), 4),
    }


def _adding(tell: Callable[[float], None]) -> Callable[[int], None]:
    total = 0

    def add(num: int) -> None:
        nonlocal total
        total += num
        tell(total)

    return add


def _begin(work: WorkFolder, step: str, settings: Mapping[str, Any], seconds: float | None) -> TimeBudget:
    """Goes on with a step of these settings. One that ended for want of time gets no more: what follows is made of it."""
    is_same = work.begin(step, settings)
    return TimeBudget(work, step, seconds, is_done=is_same and work.is_done(step))


def _digest(names: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()
