"""``outrider bench early-exit``: passes that rows of rejected drafts leave (``target.early_exit``), over whole passes.

Two targets over one model serve the same requests with whole blocks of the shipped drafter, in turns pass by pass; only
passes while all places are taken are timed. Answers have a fixed length, so both sides commit as many tokens of each.
Exits are learned before, untimed, from other requests. Cases of few or short passes serve their requests several times, so
what exits learn there at first weighs less. A pass of over MAX_OVER_MEDIAN times the median of its side counts as that; the
table has the ratio without this rule, too.

    verify_time_saved = 1 - (verify time per committed token with exits) / (without)

so tokens that exits lose count. ``worst_over_off``: the least ratio of the two speeds over all cases, among them those where
exits should stay off: batch 1, and drafts that are all right.

``identical_fraction``: answers that both targets gave alike; ``.untied_head`` and ``.two_ranks``: with exits and without, of
a target whose head is a matrix of its own, and of one over two processes, untimed; rows are taken to cost so much that they
leave.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from shutil import copytree
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from benchmarks.fixtures import MAX_PASS_TOKENS, Fixtures
from benchmarks.pool import pool
from benchmarks.prompts import BenchPrompt, choose_prompts
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from cluster.config import DrafterConfig, HiddenStateOptions
from cluster.errors import InvalidField
from cluster.types import Request
from drafters.protocol import Demand, Drafter
from drafters.session import key_of
from engine.early_exit import EarlyExit, PassWatch
from engine.factory import head_of, load_target
from engine.models.gguf import convert
from engine.models.manifest import TENSORS
from engine.models.prepare import ensure_model, weights_file
from engine.models.weights import SINGLE
from engine.native import NativeTarget
from engine.sampling import SamplingState
from engine.target import compute
from engine.tensor_parallel.local import load_over_local_ranks
from profiler.interleaved import OwnTime
from router.cost_model import TableCost
from router.plan import Span

NUM_DRAFTS = 7
BATCH = 16
MAX_PROMPT_LEN = 384
MAX_OVER_MEDIAN = 2.0
STEEP = TableCost((1, 100), (0.001, 0.1))  # of a target whose passes are not timed: every row costs as much

Answers = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    batch: int
    temperature: float
    has_right_drafts: bool = False  # drafts are the target's own answer
    repeats: int = 1  # the same requests again, where one time has few or short passes


@dataclass(frozen=True, slots=True)
class _Effort:
    num_requests: int  # of a case of BATCH; smaller batches serve fewer
    num_tokens: int  # of each answer
    num_learned_tokens: int  # of each answer served untimed, to learn from


_QUICK = _Effort(num_requests=32, num_tokens=48, num_learned_tokens=128)
_FULL = _Effort(num_requests=64, num_tokens=96, num_learned_tokens=128)
_LEARNED = _Case("learning", BATCH, 0.0)
_MEASURED = _Case("batch_16", BATCH, 0.0)
CASES = (
    _MEASURED,
    _Case("batch_16_sampled", BATCH, 0.7),
    _Case("batch_4", 4, 0.0, repeats=16),
    _Case("batch_1", 1, 0.0, repeats=10),
    _Case("right_drafts", BATCH, 0.0, has_right_drafts=True, repeats=12),
)


@dataclass(slots=True)
class _Side:
    """One target and its drafter. Seconds and tokens are of timed passes."""

    target: NativeTarget
    drafter: Drafter
    stopwatch: OwnTime = field(default_factory=OwnTime)
    pass_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def s_per_token(self) -> float:
        return self.pass_s * len(self.pass_times_s) / self.num_tokens

    @property
    def pass_s(self) -> float:
        """Mean, long passes cut to the limit: something else ran."""
        most_s = MAX_OVER_MEDIAN * median(self.pass_times_s)
        return mean([min(most_s, seconds) for seconds in self.pass_times_s])


class _Run:
    """A side serving the requests of a case. ``right``: answers that drafts are taken from; None: the drafter's."""

    def __init__(
        self, side: _Side, case: _Case, requests: Sequence[Request], num_tokens: int, right: Answers | None
    ) -> None:
        self._side, self._case, self._num_tokens, self._right = side, case, num_tokens, right
        self._waiting = deque(requests)
        self._live: dict[str, tuple[Request, list[int]]] = {}

    def step(self) -> bool:
        """Fills the free places, drafts, and verifies once. Returns whether requests are left."""
        while self._waiting and len(self._live) < self._case.batch:
            self._admit(self._waiting.popleft())
        if not self._live:
            self._side.target.check_integrity()
            return False
        is_timed = len(self._live) == self._case.batch
        side, demands = self._side, [Demand(key_of(0, name), NUM_DRAFTS) for name in self._live]
        if self._right is None:
            drafts = [draft.token_ids for draft in side.drafter.propose(demands)]
        else:
            drafts = [self._right[name][len(output) :][:NUM_DRAFTS] for name, (_, output) in self._live.items()]
        spans = []
        for (request, output), draft in zip(self._live.values(), drafts, strict=True):
            base_len = len(request.prompt_token_ids) + len(output) - 1
            spans.append(Span.bound(request.id, base_len, (output[-1], *draft), len(draft)))
        side.stopwatch.start()
        outcomes = side.target.execute(spans)
        if is_timed:
            side.pass_times_s.append(side.stopwatch.stop())
            side.num_tokens += sum(len(outcome.chosen) for outcome in outcomes)
        for outcome in outcomes:
            self._commit(outcome.request_id, outcome.chosen)
        return True

    def _admit(self, request: Request) -> None:
        target, prompt = self._side.target, request.prompt_token_ids
        start = compute(target, request, prompt, len(prompt) - 1)
        (outcome,) = target.execute([Span.bound(request.id, start, prompt[start:])])
        self._side.drafter.open(key_of(0, request.id), prompt, len(prompt), request.sampling)
        self._live[request.id] = request, []
        self._commit(request.id, outcome.chosen)

    def _commit(self, name: str, token_ids: Sequence[int]) -> None:
        _, output = self._live[name]
        output.extend(token_ids)
        self._side.drafter.extend(key_of(0, name), token_ids)
        if len(output) >= self._num_tokens:
            self._side.answers[name] = tuple(output[: self._num_tokens])
            del self._live[name]
            self._side.target.release(name)
            self._side.drafter.release(key_of(0, name))


def run(options: BenchOptions) -> BenchResult:
    effort = _QUICK if options.quick else _FULL
    console = Console(stderr=True)
    config = _drafter(options.model)
    fixtures = Fixtures(options.model, (config,), max(effort.num_tokens, effort.num_learned_tokens) + NUM_DRAFTS + 1)
    targets = [fixtures.target, fixtures.make_target()]
    folder = ensure_model(options.model)
    exits = EarlyExit(fixtures.target.model, fixtures.measured_cost, head_of(fixtures.target.model, folder))
    targets[1].exit_early(exits)
    paths = options.prompts or options.data_prompts
    prompts = choose_prompts(paths, 2 * effort.num_requests)
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    answers: Answers = {}
    num_equal = num_answers = 0
    learning = _Side(targets[1], fixtures.make(config, target=targets[1]))
    requests = _requests(fixtures, _LEARNED, prompts[::2], effort)
    _serve([learning], _LEARNED, requests, effort.num_learned_tokens)
    for case in CASES:
        sides = [_Side(target, fixtures.make(config, target=target)) for target in targets]
        requests = _requests(fixtures, case, prompts[1::2], effort)
        off, on = sides
        for number in range(case.repeats):
            _serve(
                sides[:: 1 - 2 * (number % 2)], case, requests, effort.num_tokens, answers if case.has_right_drafts else None
            )
            num_answers += len(off.answers)
            num_equal += sum(on.answers[name] == answer for name, answer in off.answers.items())
        if case is _MEASURED:
            answers = off.answers
        figures[f"on_over_off.{case.name}"] = off.s_per_token / on.s_per_token
        rows.append(_row(case, off, on, exits))
        console.print(f"early-exit: {case.name} done, {len(off.answers)} answers", highlight=False)
    others = []
    for name in ("untied_head", "two_ranks"):
        requests = _requests(fixtures, _LEARNED, prompts[::2], effort)[:BATCH]
        others.append((name, *_compare(name, folder, fixtures, config, requests, effort.num_learned_tokens)))
        figures[f"identical_fraction.{name}"] = others[-1][1] / others[-1][2]
        figures[f"num_left.{name}"] = others[-1][3]
        console.print(f"early-exit: {name} done", highlight=False)
    figures = {
        "verify_time_saved": 1.0 - 1.0 / figures["on_over_off.batch_16"],
        "worst_over_off": min([value for name, value in figures.items() if name.startswith("on_over_off.")]),
        "identical_fraction": num_equal / num_answers,
        **figures,
    }
    return BenchResult(
        "early-exit",
        figures,
        tables=(
            Table(
                f"{config.name}, {NUM_DRAFTS} drafts, verify passes",
                ("case", "off ms", "on ms", "tokens off", "on", "on / off", "uncut", "thresholds by depth"),
                tuple(rows),
            ),
            Table("tokens with exits and without", ("target", "alike", "answers", "drafts whose rows left"), tuple(others)),
        ),
        notes=(
            "on / off: tokens per second of verification; thresholds of the plan at the end of the case, - is no check.",
        ),
    )


class _Recorded(EarlyExit):
    """``watches``: of all passes that rows may leave."""

    watches: tuple[PassWatch, ...] = ()

    def watch(self, spans: Sequence[Span], states: Mapping[str, SamplingState]) -> PassWatch | None:
        watch = super().watch(spans, states)
        self.watches += () if watch is None else (watch,)
        return watch


def _compare(
    name: str, folder: Path, fixtures: Fixtures, config: DrafterConfig, requests: Sequence[Request], num_tokens: int
) -> tuple[int, int, int]:
    """Answers alike with exits and without, all answers, and draft tokens whose rows left."""
    options: dict[str, Any] = {"device": "cpu", "max_num_sequences": BATCH, "max_pass_tokens": MAX_PASS_TOKENS}
    layers = fixtures.target.feature_layers
    with TemporaryDirectory() as scratch:
        if name == "untied_head":
            folder = untied(fixtures.target.embedding, folder, Path(scratch) / folder.name)
            target = load_target(folder, **options, feature_layers=layers)
        else:
            target = load_over_local_ranks(2, folder, options, layers)
        with closing(target):
            exits = _Recorded(target.model, STEEP, head_of(target.model, folder))
            plain, *on = (_Side(target, fixtures.make(config, target=target)) for _ in range(3))
            _serve([plain], _LEARNED, requests, num_tokens)
            target.exit_early(exits)
            for side in on:  # exits learn from nearly all of the first one's passes
                _serve([side], _LEARNED, requests, num_tokens)
    alike = [side.answers[request_id] == answer for side in on for request_id, answer in plain.answers.items()]
    num_left = sum([sum([span.num_drafts for span in w.spans]) - sum(w.nums_drafts()) for w in exits.watches])
    return sum(alike), len(alike), num_left


def untied(embedding: torch.Tensor, folder: Path, into: Path) -> Path:
    """A copy of the model whose head, with the values of its embedding, is a matrix of its own."""
    if (file := weights_file(folder)) is None:
        copytree(folder, into)
    else:
        into.mkdir()
        convert(file, into, with_weights=True)
        (into / TENSORS).unlink()  # else the file would be read instead
    tensors = load_file(into / SINGLE)
    save_file(tensors | {"lm_head.weight": embedding.clone()}, into / SINGLE)
    shape = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(shape | {"tie_word_embeddings": False}))
    return into


def _serve(
    sides: Sequence[_Side], case: _Case, requests: Sequence[Request], num_tokens: int, right: Answers | None = None
) -> None:
    """The sides in turns, each to its end."""
    runs = [_Run(side, case, requests, num_tokens, right) for side in sides]
    live = dict.fromkeys(runs)
    for one in cycle(runs):
        if one in live and not one.step():
            del live[one]
        if not live:
            return


def _requests(fixtures: Fixtures, case: _Case, prompts: Sequence[BenchPrompt], effort: _Effort) -> list[Request]:
    num = effort.num_requests if case.batch == BATCH else max(4, effort.num_requests * case.batch // (2 * BATCH))
    made = fixtures.requests(prompts[:num], case.temperature)
    return [
        replace(r, prompt_token_ids=r.prompt_token_ids[-MAX_PROMPT_LEN:], sampling=replace(r.sampling, ignore_eos=True))
        for r in made
    ]


def _row(case: _Case, off: _Side, on: _Side, exits: EarlyExit) -> tuple[Cell, ...]:
    plan = exits.plan(case.batch * (NUM_DRAFTS + 1), case.batch)
    limits = [
        f"{check.depth}: {'-' if threshold is None else f'{threshold:.1f}'}"
        for check, threshold in zip(exits.checks, plan.thresholds, strict=True)
    ]
    per_pass = [side.num_tokens / len(side.pass_times_s) for side in (off, on)]
    uncut = sum(off.pass_times_s) / off.num_tokens * on.num_tokens / sum(on.pass_times_s)
    times = 1e3 * off.pass_s, 1e3 * on.pass_s, *per_pass, off.s_per_token / on.s_per_token, uncut
    return (case.name, *times, ", ".join(limits))


def _drafter(model: str) -> DrafterConfig:
    """The shipped block drafter. Raises InvalidField: there is none for the model."""
    for config in pool(model):
        if isinstance(config.options, HiddenStateOptions):
            # Whole blocks: with a least survival the drafter itself leaves out most drafts that will be rejected.
            return config.model_copy(update={"options": config.options.model_copy(update={"min_survival": 0.0})})
    raise InvalidField("model", model, "has no shipped dspark drafter, whose drafts this benchmark verifies")
