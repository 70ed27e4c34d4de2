"""``outrider bench overlap``: drafting beside verification, over drafting before it, on disjoint cores of this machine.

The target computes on one half of the cores, the drafter on the other, each on threads of its own, as two devices would. The
drafter computes the first layers of the target and chooses by a script: at each position the target's own answer, which was
decoded before, with probability AGREEMENT, and otherwise another token, whose next choices are right as often as
RUNNER_UP. So its computation is real, all arms get the same drafts, and the agreement is that of a good pair. Every arm
serves the same requests with the same draft length and verification; the arms take turns.

- ``overlap_over_barrier.CASE``: tokens per second by the default policy over those of a barrier. By default nothing is
  prepared for several outcomes on a CPU; ``outcomes_over_barrier.CASE`` is with them.
- ``overlap_over_barrier``, ``worst_overlap_over_barrier``: the least of these over the cases whose drafts take 0.4 of a
  round or more, and over the others.
- ``draft_share.CASE``: drafting, of a barrier's round without prompts.
- ``hit_rate.CASE``: commits that a drafter which prepares outcomes was prepared for, its own guess among them.
- ``simulated.*``: with a target and a drafter on GPUs (`benchmarks.overlap_simulated`).
- ``whole_machine_over_barrier.CASE``: a barrier in which target and drafter may use all cores, one after the other.
"""

import random
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate

from benchmarks.completion import Completing
from benchmarks.core_sets import CoreSet, core_sets, usable_cores
from benchmarks.embedded import EmbeddedCluster, PoolEntry
from benchmarks.interleaved import run_interleaved, throughput_of
from benchmarks.overlap_simulated import simulated
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from benchmarks.stoppable_clock import StoppableClock
from cluster.config import DrafterConfig, NgramOptions
from cluster.config.draft_length import FixedLength
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request
from drafters.model import ModelDrafter
from drafters.protocol import Drafter
from drafters.registry import make_drafter
from drafters.session import request_id_of
from drafters.small_model import Question, SmallModel
from engine.factory import DTYPES, build_model
from engine.forward import CausalModel
from engine.kv_cache import BLOCK_LEN
from engine.models.config import load_config
from engine.models.prepare import ensure_model
from engine.models.tokenizer import fingerprint
from engine.models.weights import open_weights
from engine.native import NativeLimits, NativeTarget
from engine.pass_timing import measure_cost
from engine.sampling import Chosen
from engine.target import SpanInput
from engine.threads import in_own_thread
from profiler.online_cost import OnlineCost
from router.cost_model import CostModel
from router.drafting.overlap_gains import remote_bound
from router.planning.planner import PlannerSettings, StepPlanner

TURN_S = 0.5  # several passes of a batch, and shorter than bursts of noise
AGREEMENT = 0.75  # of a draft token, given that those before it are right
# Of its next choices where it is wrong, as measured of a copy of the model (docs/measurements/overlap.md).
RUNNER_UP = (0.43, 0.14)
DRAFT_LEN = 4
PROMPT_LEN = 32
TEMPERATURE = 0.8
MAX_HOLD_S = 5.0  # a barrier must not end before its drafts come, on slow machines too
MAX_OUTCOMES = 4
OVERLAPPING = 0.4  # share of a round that drafting takes, from which overlap must pay


@dataclass(frozen=True, slots=True)
class Rule:
    overlap: str
    max_outcomes: int = 0
    on_all_cores: bool = False


BARRIER, WHOLE, DEFAULT, OUTCOMES = "barrier", "barrier, all cores", "gain", "gain, outcomes"
ARMS: Mapping[str, Rule] = {
    BARRIER: Rule("barrier"),
    WHOLE: Rule("barrier", on_all_cores=True),
    "micro-batch": Rule("micro-batch"),
    "frontier": Rule("frontier"),
    DEFAULT: Rule("gain"),
    OUTCOMES: Rule("gain", MAX_OUTCOMES),
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_layers: float | None  # of the drafter, as a share of the target's; None: an n-gram lookup
    batch: int
    num_tokens: int  # of each request
    num_requests: int


QUICK = (
    Case("third, batch 1", 1 / 3, 1, 192, 2),
    Case("third, batch 4", 1 / 3, 4, 160, 4),
    Case("thin, batch 4", 1 / 15, 4, 160, 4),
)
FULL = (
    Case("third, batch 1", 1 / 3, 1, 256, 4),
    Case("third, batch 2", 1 / 3, 2, 192, 6),
    Case("third, batch 4", 1 / 3, 4, 128, 8),
    Case("third, batch 8", 1 / 3, 8, 96, 16),
    Case("thin, batch 1", 1 / 15, 1, 256, 3),
    Case("thin, batch 4", 1 / 15, 4, 128, 8),
    Case("ngram, batch 4", None, 4, 96, 8),
)


class ScriptedModel(SmallModel):
    """Computes what its model computes, and chooses by a script. Deterministic: by request and position.

    ``answers``: prompt and output by request.
    """

    def __init__(self, model: CausalModel, num_blocks: int, info: ModelInfo, answers: Mapping[str, Sequence[int]]) -> None:
        super().__init__(
            model, num_blocks=num_blocks, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids, max_pass_rows=512
        )
        self._vocab_size = info.vocab_size
        self._answers = {name: tuple(answer) for name, answer in answers.items()}

    def choose(self, questions: Sequence[Question], num_runners_up: int = 0) -> list[Chosen]:
        found = super().choose(questions, num_runners_up)
        return [self._scripted(*one, num_runners_up) for one in zip(questions, found, strict=True)]

    def _scripted(self, question: Question, chosen: Chosen, num_runners_up: int) -> Chosen:
        name = request_id_of(question.request_id).partition("#")[0]
        answer, base_len = self._answers[name], self.committed_len(question.request_id)
        given, token_ids, others = question.ahead, [], []
        for i in range(len(chosen.token_ids)):
            before = (*given, *question.drafts[:i])
            position = base_len + len(before)
            on_path = answer[base_len:position] == before and position < len(answer)
            draw = random.Random(f"{name} {position}")
            own = answer[position] if on_path else self._other(draw)
            is_right = draw.random() < AGREEMENT
            token_ids.append(own if is_right else self._other(draw))
            ranked = [self._other(draw) for _ in range(num_runners_up)]
            rank = bisect(list(accumulate(RUNNER_UP)), draw.random())
            if not is_right and rank < num_runners_up:
                ranked[rank] = own
            others.append(tuple(ranked))
        runners_up = tuple(others) if num_runners_up else ()
        return replace(chosen, token_ids=tuple(token_ids), confidences=(AGREEMENT,) * len(token_ids), runners_up=runners_up)

    def _other(self, draw: random.Random) -> int:
        return draw.randrange(self._vocab_size)


class Pair:
    """A target, and drafters of its first layers, loaded once each."""

    def __init__(self, name: str, cases: Sequence[Case], dtype: str = "auto") -> None:
        folder = ensure_model(name)
        config = load_config(folder)
        dtype = "bfloat16" if dtype == "auto" else dtype
        with open_weights(folder, config, DTYPES[dtype]) as weights:
            self.target = build_model(config, weights, dtype, "cpu")
        self._shallow: dict[float, CausalModel] = {}
        for share in {case.num_layers for case in cases if case.num_layers is not None}:
            shallow = config.truncated(max(1, round(share * config.num_layers)))
            with open_weights(folder, shallow, DTYPES[dtype]) as weights:
                self._shallow[share] = build_model(shallow, weights, dtype, "cpu")
        self.max_len = min(config.max_len, PROMPT_LEN + max(case.num_tokens for case in cases) + 1)
        self.info = ModelInfo(name, config.vocab_size, self.max_len, config.eos_token_ids, fingerprint(folder))

    def engine(self, batch: int) -> NativeTarget:
        num_blocks = batch * (self.max_len // BLOCK_LEN + 2)
        return NativeTarget(self.target, NativeLimits(num_blocks, BLOCK_LEN, batch, 512, self.max_len), prefix_cache=False)

    def make_drafter(self, case: Case, answers: Mapping[str, Sequence[int]]) -> Drafter:
        if case.num_layers is None:
            return make_drafter(DrafterConfig(name="ngram", options=NgramOptions()), self.info)
        num_blocks = case.batch * ((1 + MAX_OUTCOMES) * 2 + self.max_len // BLOCK_LEN + 2)
        return ModelDrafter(ScriptedModel(self._shallow[case.num_layers], num_blocks, self.info, answers))

    def answers(self, case: Case) -> dict[str, list[int]]:
        """Prompt and output of each request, decoded plainly."""
        engine, texts = self.engine(case.batch), {}
        everyone = _requests(case, self.info)
        for start in range(0, len(everyone), case.batch):
            requests = everyone[start : start + case.batch]
            for request in requests:
                texts[request.id] = list(request.prompt_token_ids)
                engine.open(request, request.prompt_token_ids)
            base_lens = {request.id: 0 for request in requests}
            for _ in range(case.num_tokens):
                spans = [SpanInput(r.id, base_lens[r.id], tuple(texts[r.id][base_lens[r.id] :])) for r in requests]
                for outcome in engine.execute(spans):
                    base_lens[outcome.request_id] = len(texts[outcome.request_id])
                    texts[outcome.request_id] += outcome.token_ids
            for request in requests:
                engine.release(request.id)
        return texts


@dataclass
class Arm:
    """One rule on one case. An ``Interleaved`` run."""

    case: Case
    cluster: EmbeddedCluster
    requests: Sequence[Request]
    completing: Completing = field(init=False)

    def __post_init__(self) -> None:
        self.cluster.pause()
        self.completing = self.cluster.begin(self.requests, self.case.batch)

    @property
    def has_ended(self) -> bool:
        if self.completing.ended.done():
            self.completing.ended.result()
        return self.completing.ended.done()

    @property
    def num_tokens_done(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completing.completions)

    def take_turn(self) -> None:
        self.cluster.resume()
        wait([self.completing.ended], TURN_S)
        self.cluster.pause()

    def abort(self) -> None:
        self.cluster.hang_up()


@dataclass(frozen=True, slots=True)
class Found:
    """``tokens_per_s``: by arm; 0 where nothing was measured. ``agreeing``: share of tokens as with a barrier."""

    tokens_per_s: Mapping[str, float]
    accepted: Mapping[str, float]  # tokens of a round, bonus token included
    agreeing: float
    draft_s: float  # of a batch of drafts of a barrier
    pass_s: float
    hit_rate: float = 0.0  # of the drafter that prepares outcomes; 0: it prepares nothing

    @property
    def draft_share(self) -> float:
        return self.draft_s / (self.draft_s + self.pass_s)

    def over_barrier(self, arm: str) -> float:
        return self.tokens_per_s[arm] / self.tokens_per_s[BARRIER]


def run(options: BenchOptions) -> BenchResult:
    cases = QUICK if options.quick else FULL
    pair = in_own_thread(lambda: Pair(options.model, cases))
    partitions = core_sets(len(usable_cores().cores) // 2)
    costs = {part.name: in_partition(part, lambda: measure_cost(pair.engine(1))) for part in (partitions[0], usable_cores())}
    found = result({case: compare(case, pair, partitions, costs) for case in cases})
    figures, table = simulated()
    return replace(found, figures={**found.figures, **figures}, tables=(*found.tables, table))


def in_partition(partition: CoreSet, measure: Callable[[], CostModel]) -> CostModel:
    def measured() -> CostModel:
        partition.enter()
        return measure()

    return in_own_thread(measured)


def compare(
    case: Case,
    pair: Pair,
    partitions: tuple[CoreSet, CoreSet],
    costs: Mapping[str, CostModel],
    arms: Mapping[str, Rule] = ARMS,
) -> Found:
    """Serves the case by every arm, in turns."""
    answers = in_own_thread(lambda: pair.answers(case))
    with ExitStack() as stack:
        runs = {name: _arm(case, rule, pair, answers, partitions, costs, stack) for name, rule in arms.items()}
        run_interleaved(list(runs.values()))
        barrier = runs[BARRIER]
        view = barrier.cluster.loop.telemetry.drafter("drafter").view
        outcomes = runs[OUTCOMES].cluster.drafter_loop("drafter").sessions.outcomes
        outputs = {name: [c.token_ids for c in arm.completing.completions] for name, arm in runs.items()}
        rates, accepted = {}, {}
        for name, arm in runs.items():
            completions = arm.completing.completions
            speed = throughput_of(completions, case.batch, len(completions))
            rates[name] = 0.0 if speed is None else speed.tokens_per_s
            commits = [commit for completion in completions for commit in completion.commits]
            accepted[name] = sum(len(commit.token_ids) for commit in commits) / len(commits)
        pairs = [
            (a, b)
            for name in arms
            for one, other in zip(outputs[name], outputs[BARRIER], strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        return Found(
            rates,
            accepted,
            sum(a == b for a, b in pairs) / len(pairs),
            view.draft_s,
            barrier.cluster.loop.telemetry.step_s.value,
            0.0 if outcomes is None else outcomes.counts.hit_rate,
        )


def _arm(
    case: Case,
    rule: Rule,
    pair: Pair,
    answers: Mapping[str, Sequence[int]],
    partitions: tuple[CoreSet, CoreSet],
    costs: Mapping[str, CostModel],
    stack: ExitStack,
) -> Arm:
    of_target, of_drafter = (usable_cores(), usable_cores()) if rule.on_all_cores else partitions
    settings = PlannerSettings("all", MAX_HOLD_S, overlap=rule.overlap)
    drafter = in_own_thread(lambda: pair.make_drafter(case, answers))
    entry = PoolEntry(drafter, DRAFT_LEN, capacity=case.batch, max_outcomes=rule.max_outcomes)
    cluster = stack.enter_context(
        EmbeddedCluster(
            in_own_thread(lambda: pair.engine(case.batch)),
            pair.info,
            OnlineCost(costs[of_target.name]),
            {"drafter": entry},
            StepPlanner(settings),
            clock=StoppableClock(),
            draft_length=FixedLength(num_tokens=DRAFT_LEN),
            partitions={"target": of_target, "drafter": of_drafter},
        )
    )
    return Arm(case, cluster, _requests(case, pair.info))


def _requests(case: Case, info: ModelInfo) -> list[Request]:
    rng = random.Random(7)
    vocab = range(info.vocab_size // 8, info.vocab_size // 2)
    return [
        Request(
            f"r{i}",
            tuple(rng.choices(vocab, k=PROMPT_LEN)),
            SamplingParams(max_tokens=case.num_tokens, temperature=TEMPERATURE, seed=i + 1, ignore_eos=True),
            arrival_s=float(i),
        )
        for i in range(case.num_requests)
    ]


def result(found: Mapping[Case, Found]) -> BenchResult:
    figures: dict[str, float] = {}
    rest = []
    for case, one in found.items():
        key = case.name.replace(", ", "_").replace(" ", "_")
        figures[f"overlap_over_barrier.{key}"] = one.over_barrier(DEFAULT)
        figures[f"draft_share.{key}"] = one.draft_share
        figures[f"outcomes_over_barrier.{key}"] = one.over_barrier(OUTCOMES)
        figures[f"hit_rate.{key}"] = one.hit_rate
        figures[f"whole_machine_over_barrier.{key}"] = one.over_barrier(WHOLE)
        if one.draft_share < OVERLAPPING:
            rest.append(one.over_barrier(DEFAULT))
    overlapping = [one.over_barrier(DEFAULT) for one in found.values() if one.draft_share >= OVERLAPPING]
    if overlapping:
        figures["overlap_over_barrier"] = min(overlapping)
    if rest:
        figures["worst_overlap_over_barrier"] = min(rest)
    figures["identical_tokens"] = min(one.agreeing for one in found.values())
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            case.name,
            one.draft_share,
            one.hit_rate,
            *(one.over_barrier(arm) for arm in ARMS if arm != BARRIER),
            one.tokens_per_s[BARRIER],
            one.accepted[BARRIER],
            remote_bound(1, one.draft_s, one.pass_s),
        )
        for case, one in found.items()
    )
    columns = (
        "case",
        "drafting of a round",
        "hits",
        *(arm for arm in ARMS if arm != BARRIER),
        "barrier, tokens/s",
        "accepted",
        "bound",
    )
    return BenchResult(
        "overlap", figures, (Table("tokens per second over those of a barrier on the same core sets", columns, rows),)
    )
