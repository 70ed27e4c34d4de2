"""``outrider bench overlap``: drafting beside verification, over drafting before it, on disjoint cores of this machine.

The target computes on one half of the cores, the drafter on the other, each on threads of its own, as two devices would. The
target is the model with all layers after the first third damped, and the drafter is its first third: so their agreement is
that of a good pair, their computation is real, and no trained pair is needed. Every arm serves the same requests with the
same draft length and verification; the arms take turns.

- ``overlap_over_barrier.CASE``: tokens per second by the default policy over those of a barrier.
- ``worst_overlap_over_barrier``: the least of these over the cases whose drafts take less than 0.4 of a round.
- ``draft_share.CASE``: drafting, of a barrier's round without prompts.
- ``whole_machine_over_barrier.CASE``: a barrier in which target and drafter may use all cores, one after the other.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.embedded import Completing, EmbeddedCluster, PoolEntry
from benchmarks.interleaved import run_interleaved, throughput_of
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from benchmarks.stoppable_clock import StoppableClock
from cluster.config import DrafterConfig, NgramOptions
from cluster.config.draft_length import FixedLength
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request
from drafters.model import ModelDrafter
from drafters.protocol import Drafter
from drafters.registry import make_drafter
from drafters.small_model import SmallModel
from engine.factory import DTYPES, build_model
from engine.kv_cache import BLOCK_LEN
from engine.models.config import load_config
from engine.models.prepare import ensure_model
from engine.models.tokenizer import fingerprint
from engine.models.weights import LayerWeights, LinearWeight, Weights, open_weights
from engine.native import NativeLimits, NativeTarget
from engine.partition import CoreSet, core_sets, usable_cores
from engine.pass_timing import measure_cost
from engine.threads import in_own_thread
from profiler.online_cost import OnlineCost
from router.cost_model import CostModel
from router.overlap.gains import remote_bound
from router.planner import PlannerSettings, StepPlanner

DAMPING = 0.1  # of what a layer after the first third adds
DRAFT_LEN = 4
PROMPT_LEN = 32
TEMPERATURE = 0.8
MAX_HOLD_S = 5.0  # a barrier must not end before its drafts come, on slow machines too
OVERLAPPING = 0.4  # share of a round that drafting takes, from which overlap must pay
BARRIER, WHOLE, DEFAULT = "barrier", "barrier, all cores", "gain"
ARMS = (BARRIER, WHOLE, "micro-batch", "frontier", DEFAULT)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kind: str  # of the drafter
    batch: int
    num_tokens: int  # of each request
    num_requests: int


QUICK = (
    Case("model, batch 1", "model", 1, 96, 2),
    Case("model, batch 8", "model", 8, 48, 8),
    Case("ngram, batch 4", "ngram", 4, 64, 4),
)
FULL = (
    Case("model, batch 1", "model", 1, 192, 6),
    Case("model, batch 4", "model", 4, 128, 8),
    Case("model, batch 8", "model", 8, 96, 16),
    Case("ngram, batch 1", "ngram", 1, 128, 4),
    Case("ngram, batch 4", "ngram", 4, 96, 12),
)


class Damped:
    """Weights whose later layers add little."""

    def __init__(self, weights: Weights, first: int) -> None:
        self._weights, self._first = weights, first
        self.embedding, self.final_norm, self.head = weights.embedding, weights.final_norm, weights.head

    def layers(self) -> Iterator[LayerWeights]:
        for i, layer in enumerate(self._weights.layers()):
            yield layer if i < self._first else _damped(layer)


def _damped(layer: LayerWeights) -> LayerWeights:
    def of(linear: LinearWeight) -> LinearWeight:
        return LinearWeight(linear.weight * DAMPING, None if linear.bias is None else linear.bias * DAMPING, linear.uneven)

    return LayerWeights(
        layer.input_norm,
        layer.qkv,
        layer.q_norm,
        layer.k_norm,
        of(layer.out),
        layer.post_norm,
        layer.gate_up,
        of(layer.down),
    )


class Pair:
    """A target and a third of it, loaded once."""

    def __init__(self, name: str, max_tokens: int, dtype: str = "auto") -> None:
        folder = ensure_model(name)
        config = load_config(folder)
        num_layers = max(1, config.num_layers // 3)
        dtype = "bfloat16" if dtype == "auto" else dtype
        with open_weights(folder, config, DTYPES[dtype]) as weights:
            self.target = build_model(config, Damped(weights, num_layers), dtype, "cpu")
        shallow = config.truncated(num_layers)
        with open_weights(folder, shallow, DTYPES[dtype]) as weights:
            self.drafter = build_model(shallow, weights, dtype, "cpu")
        self.max_len = min(config.max_len, PROMPT_LEN + max_tokens + 1)
        self.info = ModelInfo(name, config.vocab_size, self.max_len, config.eos_token_ids, fingerprint(folder))

    def engine(self, batch: int) -> NativeTarget:
        num_blocks = batch * (self.max_len // BLOCK_LEN + 2)
        return NativeTarget(self.target, NativeLimits(num_blocks, BLOCK_LEN, batch, 512, self.max_len), prefix_cache=False)

    def make_drafter(self, kind: str, batch: int) -> Drafter:
        if kind == "ngram":
            return make_drafter(DrafterConfig(name="ngram", options=NgramOptions()), self.info)
        num_blocks = batch * (self.max_len // BLOCK_LEN + 2)
        eos = self.info.eos_token_ids
        return ModelDrafter(
            SmallModel(self.drafter, num_blocks=num_blocks, vocab_size=self.info.vocab_size, eos_token_ids=eos)
        )


@dataclass
class Arm:
    """One policy on one case. An ``Interleaved`` run."""

    case: Case
    policy: str
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

    def take_turn(self, turn_s: float) -> None:
        self.cluster.resume()
        wait([self.completing.ended], turn_s)
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

    @property
    def draft_share(self) -> float:
        return self.draft_s / (self.draft_s + self.pass_s)

    def over_barrier(self, arm: str) -> float:
        return self.tokens_per_s[arm] / self.tokens_per_s[BARRIER]


def run(options: BenchOptions) -> BenchResult:
    cases = QUICK if options.quick else FULL
    pair = in_own_thread(lambda: Pair(options.model, max(case.num_tokens for case in cases)))
    partitions = core_sets(len(usable_cores().cores) // 2)
    costs = {part.name: in_partition(part, lambda: measure_cost(pair.engine(1))) for part in (partitions[0], usable_cores())}
    return result({case: compare(case, pair, partitions, costs) for case in cases})


def in_partition(partition: CoreSet, measure: Callable[[], CostModel]) -> CostModel:
    def measured() -> CostModel:
        partition.enter()
        return measure()

    return in_own_thread(measured)


def compare(
    case: Case, pair: Pair, partitions: tuple[CoreSet, CoreSet], costs: Mapping[str, CostModel], arms: Sequence[str] = ARMS
) -> Found:
    """Serves the case by every arm, in turns."""
    with ExitStack() as stack:
        runs = {policy: _arm(case, policy, pair, partitions, costs, stack) for policy in arms}
        run_interleaved(list(runs.values()))
        barrier = runs[BARRIER]
        view = barrier.cluster.loop.telemetry.drafter("drafter").view
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
            barrier.cluster.loop.telemetry.step_s or 0.0,
        )


def _arm(
    case: Case,
    policy: str,
    pair: Pair,
    partitions: tuple[CoreSet, CoreSet],
    costs: Mapping[str, CostModel],
    stack: ExitStack,
) -> Arm:
    of_target, of_drafter = (usable_cores(), usable_cores()) if policy == WHOLE else partitions
    settings = PlannerSettings("all", MAX_HOLD_S, overlap=BARRIER if policy == WHOLE else policy)
    drafter = in_own_thread(lambda: pair.make_drafter(case.kind, case.batch))
    cluster = stack.enter_context(
        EmbeddedCluster(
            in_own_thread(lambda: pair.engine(case.batch)),
            pair.info,
            OnlineCost(costs[of_target.name]),
            {"drafter": PoolEntry(drafter, DRAFT_LEN, capacity=case.batch)},
            StepPlanner(settings),
            clock=StoppableClock(),
            draft_length=FixedLength(num_tokens=DRAFT_LEN),
            partitions={"target": of_target, "drafter": of_drafter},
        )
    )
    return Arm(case, policy, cluster, _requests(case, pair.info))


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
        *(arm for arm in ARMS if arm != BARRIER),
        "barrier, tokens/s",
        "accepted",
        "bound",
    )
    return BenchResult(
        "overlap", figures, (Table("tokens per second over those of a barrier on the same core sets", columns, rows),)
    )
