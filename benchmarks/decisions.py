"""``outrider bench decisions``: time of decisions in a router's slot and in a target's round.

A slot: 1,000 requests of several kinds and eight drafters with 256 places, reports in and a table out, as in the live
router (`actors.router.Router`), while requests come and go. Every placed request reports its rounds and as many scores.
A round: for 256 decoding requests with a proposal each, the plan, the plan beside prompts, and all that planning takes: the
plan, the budgets, and what is learned from the pass. And all Python of a live round for 64 and 256 drafted requests, what of
it lies before drafters are sent what was committed, and how long a twin of an asynchronous device waits for it between two
passes; and of a round of plainly decoded ones, with an idle drafter and without (`benchmarks/round_python.py`).

Decisions use one thread and never wait. The ``cpu`` figures are that thread's processor time, which a busy machine
disturbs less. Garbage collection is off.
"""

import gc
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.report import BenchOptions, BenchResult, Table
from benchmarks.round_python import PASS_S, Gap, gap_ms, plain_python_ms, python_times
from cluster.config import DraftLengthConfig, PolicyConfig
from cluster.cpu_scheduling import without_collection
from cluster.types import Commit, RoutingTable
from router.assignment import Observation, PoolMember, Positions, RequestView, ScoreCounts
from router.cost_model import TableCost, monotone
from router.drafter.policies import build_policy
from router.drafter.router import SLOT_S, Router, SlotReport
from router.drafting.length import PassFeedback
from router.drafting.policies import build_draft_lengths
from router.drafting.value import DraftingValue
from router.drafting.verification import PassContext
from router.estimates.drafter_stats import Judgement
from router.estimates.drift import DriftDetector
from router.plan import Capacity, DrafterView, SequenceView
from router.planning.planner import StepPlanner

NUM_REQUESTS = 1000
NUM_DRAFTERS = 8
NUM_PLACES = 256
NUM_KINDS = 13  # kinds of prompts, suited to different drafters
TURNOVER = 0.05  # share of requests that end, and arrive, per slot
DRAFT_LEN = 7
NUM_ROUNDS = 10  # per request and slot
NUM_SLOTS, NUM_SLOTS_QUICK = 400, 120
NUM_SEQUENCES = 256
NUM_PLANS, NUM_PLANS_QUICK = 2000, 500
NUM_PROMPTS = 2  # that wait beside them
NUMS_DRAFTED = (64, 256)  # requests of the live rounds
NUM_ROUNDS_TIMED, NUM_ROUNDS_TIMED_QUICK = 1000, 200
_WARM_UP_SLOTS = 70  # until the memory of requests has its final size
_SEED = 17


def run(options: BenchOptions) -> BenchResult:
    cost, num_rounds = step_cost(), NUM_ROUNDS_TIMED_QUICK if options.quick else NUM_ROUNDS_TIMED
    gaps = {num: gap_ms(num, num_rounds, cost) for num in NUMS_DRAFTED}  # first: the process of a target holds no router
    slot = slot_times(NUM_SLOTS_QUICK if options.quick else NUM_SLOTS)
    num_plans = NUM_PLANS_QUICK if options.quick else NUM_PLANS
    plan, beside_prompts, round_ = plan_times(num_plans), plan_times(num_plans, NUM_PROMPTS), round_times(num_plans)
    figures = {
        "slot_p50_ms": slot.p50_ms,
        "slot_p99_ms": slot.p99_ms,
        "slot_p99_cpu_ms": slot.p99_cpu_ms,
        "plan_p50_ms": plan.p50_ms,
        "plan_p50_cpu_ms": plan.p50_cpu_ms,
        "round_p50_ms": round_.p50_ms,
        "round_p99_ms": round_.p99_ms,
        "round_p50_cpu_ms": round_.p50_cpu_ms,
        "round_p50_cpu_ms.prompts": beside_prompts.p50_cpu_ms,
    }
    for num, gap in gaps.items():
        times_of = python_times(num, num_rounds, cost)
        figures |= {f"round_python_ms.{num}": times_of.round_ms, f"publish_python_ms.{num}": times_of.publish_ms}
        figures[f"plan_gap_ms.{num}"] = gap.total
        figures[f"plain_python_ms.{num}"] = plain_python_ms(num, num_rounds, cost, has_drafter=False)
        figures[f"not_queried_python_ms.{num}"] = plain_python_ms(num, num_rounds, cost, has_drafter=True)
    decisions = {
        f"a slot of {NUM_REQUESTS} requests, {NUM_DRAFTERS} drafters, {NUM_PLACES} places": slot,
        f"the plan of {NUM_SEQUENCES} requests with {DRAFT_LEN} draft tokens each": plan,
        f"the same beside {NUM_PROMPTS} prompts": beside_prompts,
        "plan, budgets and learning of a round": round_,
    }
    rows = tuple((name, t.p50_ms, t.p99_ms, t.p50_cpu_ms, t.p99_cpu_ms) for name, t in decisions.items())
    return BenchResult(
        "decisions",
        figures,
        tables=(
            Table("decisions, default policies", ("what", "p50 ms", "p99 ms", "p50 cpu ms", "p99 cpu ms"), rows),
            Table(
                f"between two passes of an asynchronous device, of {1e3 * PASS_S:.0f} ms each, in ms",
                ("requests", *Gap._fields),
                tuple((num, *gap) for num, gap in gaps.items()),
            ),
        ),
        notes=(
            "round_python_ms: Python of a live round of drafted requests on the target's thread; publish_python_ms: "
            "of that, from the end of the pass until drafters are sent what was committed",
            "plain_python_ms: of plainly decoded requests; not_queried_python_ms: beside a drafter that is not queried",
            "the first slots, in which arrays grow, do not count",
        ),
    )


class DecisionTimes:
    """Times of successive decisions: wall clock and processor time of the thread."""

    def __init__(self) -> None:
        self._wall_ms: list[float] = []
        self._cpu_ms: list[float] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        yield
        self._cpu_ms.append(1e3 * (time.thread_time() - cpu_s))
        self._wall_ms.append(1e3 * (time.perf_counter() - wall_s))

    @property
    def p50_ms(self) -> float:
        return statistics.median(self._wall_ms)

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self._wall_ms, n=100)[98]

    @property
    def p50_cpu_ms(self) -> float:
        return statistics.median(self._cpu_ms)

    @property
    def p99_cpu_ms(self) -> float:
        return statistics.quantiles(self._cpu_ms, n=100)[98]


def slot_times(num_slots: int) -> DecisionTimes:
    traffic = Traffic(random.Random(_SEED))
    router = Router(build_policy(PolicyConfig()), traffic.pool, DriftDetector(SLOT_S))
    times = DecisionTimes()
    gc.collect()
    with without_collection():
        for slot in range(_WARM_UP_SLOTS + num_slots):
            if slot == _WARM_UP_SLOTS:
                times = DecisionTimes()
            report = traffic.report()
            with times.one():
                table = router.slot([report])
            if table is not None:
                traffic.follow(table)
    return times


def plan_times(num_plans: int, num_prompts: int = 0) -> DecisionTimes:
    rng = random.Random(_SEED)
    planner, batches = StepPlanner(), [[*sequences(rng), *prompts(num_prompts)] for _ in range(8)]
    drafters = {f"d{j}": DrafterView(0.005, 1.5, 0.6) for j in range(NUM_DRAFTERS)}
    capacity = Capacity(16, 100_000, 50_000, 2 * NUM_SEQUENCES, 16 * NUM_SEQUENCES, 8192)
    times, context = DecisionTimes(), PassContext(drafters, capacity, step_cost(), now_s=0.0)
    gc.collect()
    with without_collection():
        for i in range(num_plans):
            with times.one():
                planner.plan(batches[i % len(batches)], context)
    return times


def round_times(num_rounds: int) -> DecisionTimes:
    """Plan, budgets and learning. Reply times, the price of a row and the decode rate vary from round to round."""
    rng = random.Random(_SEED)
    batches = [sequences(rng) for _ in range(8)]
    feedbacks = [_feedback(batch, rng) for batch in batches]
    capacity = Capacity(16, 100_000, 50_000, 2 * NUM_SEQUENCES, 16 * NUM_SEQUENCES, 8192)
    draft_lens = {f"d{j}": DRAFT_LEN for j in range(NUM_DRAFTERS)}
    planner, lengths = StepPlanner(), build_draft_lengths(DraftLengthConfig(), draft_lens)
    times, cost = DecisionTimes(), step_cost()
    gc.collect()
    with without_collection():
        for i in range(num_rounds):
            views = {f"d{j}": _drafter_view(rng) for j in range(NUM_DRAFTERS)}
            price, tokens_per_s = 0.05 * rng.uniform(0.9, 1.1), 2000.0 * rng.uniform(0.9, 1.1)
            batch = batches[i % len(batches)]
            with times.one():
                planner.plan(batch, PassContext(views, capacity, cost, now_s=0.0))
                lengths.budgets(batch, DraftingValue(cost, views, price, tokens_per_s))
                lengths.learn(feedbacks[i % len(batches)])
    return times


def _drafter_view(rng: random.Random) -> DrafterView:
    """Its drafts take 4 ms, and are far from being worth micro-batches or frontiers."""
    reply_s, num_requests = 0.005 * rng.uniform(0.9, 1.1), NUM_SEQUENCES / NUM_DRAFTERS
    return DrafterView(reply_s, 1.5, 0.6 + rng.uniform(-0.02, 0.02), 1.0, 0.004, num_requests, 0.0001, DRAFT_LEN)


def _feedback(batch: list[SequenceView], rng: random.Random) -> PassFeedback:
    commits, judgements = [], {}
    for sequence in batch:
        num_right = 0
        while num_right < DRAFT_LEN and rng.random() < 0.6:
            num_right += 1
        token_ids = tuple(range(num_right + 1))
        commits.append(Commit(sequence.request_id, sequence.committed_len, token_ids, DRAFT_LEN, num_right))
        confidences = tuple(rng.random() for _ in range(min(num_right + 1, DRAFT_LEN)))
        judgements[sequence.request_id] = Judgement(sequence.drafter or "", confidences, num_right)
    return PassFeedback(commits, judgements, 0.1, 0.12)


def prompts(num: int) -> list[SequenceView]:
    """That have begun and have much left."""
    return [SequenceView(f"prompt-{i}", 4000, 256, 0, True, None, None, 200) for i in range(num)]


def step_cost() -> TableCost:
    """A target's cost, flat up to a knee."""
    return monotone([(1, 0.02), (8, 0.021), (64, 0.03), (256, 0.06), (1024, 0.2), (4096, 0.8)], 1e-8)


def sequences(rng: random.Random) -> list[SequenceView]:
    """Decoding requests with a proposal each, whose survival is calibrated."""
    found = []
    for i in range(NUM_SEQUENCES):
        survival, probability = [], 1.0
        for _ in range(DRAFT_LEN):
            probability *= rng.uniform(0.3, 1.0)
            survival.append(probability)
        length = rng.randint(100, 2000)
        found.append(
            SequenceView(
                request_id=f"chatcmpl-{i:024x}-0",
                committed_len=length,
                computed_len=length - 1,
                num_drafted=DRAFT_LEN,
                running=True,
                drafter=f"d{i % NUM_DRAFTERS}",
                awaiting_since_s=None,
                max_new_tokens=200,
                survival=tuple(survival),
            )
        )
    return found


class Traffic:
    """Requests of several kinds, and their target's reports."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.pool = tuple(PoolMember(f"d{j}", NUM_PLACES // NUM_DRAFTERS, 0.02 * (j + 1)) for j in range(NUM_DRAFTERS))
        self._kinds = [  # how often each drafter is right
            tuple(rng.uniform(0.1, 0.8) for _ in range(NUM_DRAFTERS)) for _ in range(NUM_KINDS)
        ]
        self._live: dict[str, tuple[RequestView, tuple[float, ...]]] = {}
        self._num_born = 0
        self._version = 0
        self._come(NUM_REQUESTS)

    def report(self) -> SlotReport:
        observations, scores = [], []
        for request, kind in self._live.values():
            if request.chain:
                drafted = int(request.chain[0][1:])
                observations.append(self._observe(request, drafted, kind[drafted]))
                other = self._rng.randrange(NUM_DRAFTERS)
                if other != drafted:
                    scores.append(ScoreCounts(request.request_id, f"d{other}", self._positions(kind[other])))
        requests = tuple(request for request, _ in self._live.values())
        members = tuple(member.name for member in self.pool)
        return SlotReport(requests, tuple(observations), self._version, members, scores=tuple(scores))

    def follow(self, table: RoutingTable) -> None:
        """Applies a table; some requests end and others arrive."""
        self._version = table.version
        for request_id, (request, kind) in list(self._live.items()):
            if self._rng.random() < TURNOVER:
                del self._live[request_id]
                continue
            chain = table.chains.get(request_id, request.chain)
            moved = replace(request, chain=chain, committed_len=request.committed_len + 2 * NUM_ROUNDS)
            self._live[request_id] = (moved, kind)
        self._come(NUM_REQUESTS - len(self._live))

    def _come(self, num: int) -> None:
        for _ in range(num):
            kind = self._rng.choice(self._kinds)
            length = self._rng.randint(20, 400)
            request_id = f"chatcmpl-{self._num_born:024x}-0"
            self._num_born += 1
            self._live[request_id] = (RequestView(request_id, length, length, ()), kind)

    def _observe(self, request: RequestView, drafter: int, rate: float) -> Observation:
        positions = self._positions(rate)
        num_right = sum(positions.num_right)
        return Observation(
            request.request_id,
            f"d{drafter}",
            NUM_ROUNDS,
            NUM_ROUNDS * DRAFT_LEN,
            num_right,
            NUM_ROUNDS + num_right,
            NUM_ROUNDS * 0.02 * (1.0 + 0.1 * drafter),
            positions,
        )

    def _positions(self, rate: float) -> Positions:
        positions = Positions()
        for _ in range(NUM_ROUNDS):
            num_right = 0
            while num_right < DRAFT_LEN and self._rng.random() < rate:
                num_right += 1
            positions = positions.plus(num_right, failed=num_right < DRAFT_LEN)
        return positions
