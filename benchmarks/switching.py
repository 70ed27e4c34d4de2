"""Part of ``outrider bench routing --live``: the cost of switching drafters within a request.

The whole cluster in one process, on the real model. A lookup drafts for a request with a long prompt; then the routing
table names a drafter with a model, which has kept in step in its spare time (SPIN's fast switching, section IV.C) or
has not. The stall is the time from the table to the first commit that verifies a draft of the new drafter, less its
usual round time. Both variants alternate, on different prompts, so that noise affects both alike.

`switch_stall_saved`: the share of the stall that keeping in step saves; medians over the switches.
"""

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.embedded import EmbeddedCluster, PoolEntry
from benchmarks.report import BenchOptions, BenchResult, Table
from cluster.config import Config, DrafterConfig, FixedLength, ModelConfig, ModelOptions, NgramOptions, TargetConfig
from cluster.resolve import resolve
from cluster.sampling_params import SamplingParams
from cluster.types import Request, RoutingTable
from deploy.profile_command import here
from router.cost_model import TableCost
from router.planning.planner import PlannerSettings, StepPlanner

PROMPT_LEN, PROMPT_LEN_QUICK = 1024, 512
NUM_SWITCHES, NUM_SWITCHES_QUICK = 8, 4  # per variant
NUM_LAYERS = 4  # the target's first layers, as the drafter
DRAFT_LEN = 4
BEFORE = 64  # tokens before the switch
NUM_ROUNDS = 4  # of the new drafter, for its usual round time
MAX_TOKENS = 160
MAX_HOLD_S = 60.0
NUM_BEFORE_TOLD = 2  # the pass during which the table arrives, and the one before drafters are informed
FROM, TO = "lookup", "model"


@dataclass(frozen=True, slots=True)
class Switch:
    """Seconds from the new table to the first commit with a draft of the new drafter, and of its usual round."""

    first_s: float
    round_s: float

    @property
    def stall_s(self) -> float:
        return max(0.0, self.first_s - self.round_s)


def run(options: BenchOptions) -> BenchResult:
    prompt_len = PROMPT_LEN_QUICK if options.quick else PROMPT_LEN
    num_switches = NUM_SWITCHES_QUICK if options.quick else NUM_SWITCHES
    with waiting_cluster(resolve(config(options.model, prompt_len), here())) as cluster:
        switches = measure(cluster, prompt_len, num_switches)
    return result(switches, prompt_len)


def waiting_cluster(config: Config) -> EmbeddedCluster:
    """Of a resolved configuration. Every pass waits for its proposals, of a fixed length: plain decoding in the meantime, or
    for good where a busy machine makes drafts too slow to pay, would hide the stall."""
    from drafters.registry import make_drafter
    from engine.loading import load_target

    engine, model, _ = load_target(config)
    pool = {one.name: PoolEntry(make_drafter(one, model), one.max_draft_len) for one in config.drafters}
    planner = StepPlanner(PlannerSettings("all", MAX_HOLD_S, overlap="barrier"))
    draft_length = FixedLength(num_tokens=DRAFT_LEN)
    return EmbeddedCluster(engine, model, TableCost((1,), (1e4,)), pool, planner, draft_length=draft_length)


def config(model: str, prompt_len: int) -> Config:
    drafter = ModelOptions(model=model, num_layers=NUM_LAYERS, kv_cache_gb=0.25)
    return Config(
        model=ModelConfig(name=model, max_model_len=prompt_len + MAX_TOKENS),
        target=TargetConfig(kv_cache_gb=0.25),
        drafters=(
            DrafterConfig(name=FROM, options=NgramOptions()),
            DrafterConfig(name=TO, options=drafter),
        ),
    )


def measure(cluster: EmbeddedCluster, prompt_len: int, num_switches: int) -> dict[bool, list[Switch]]:
    """By whether the new drafter kept in step."""
    rng = random.Random(5)
    vocab = range(cluster.model.vocab_size // 8, cluster.model.vocab_size // 2)
    switches: dict[bool, list[Switch]] = {True: [], False: []}
    version = 0
    for i in range(num_switches + 1):  # the first is a warm-up
        for in_step in (True, False) if i % 2 else (False, True):
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            request = Request(f"s{version}", tuple(rng.choices(vocab, k=prompt_len)), sampling, time.monotonic())
            found = asyncio.run(_switch(cluster, request, version, (TO,) if in_step else ()))
            version += 2
            if i and found is not None:
                switches[in_step].append(found)
    return switches


async def _switch(cluster: EmbeddedCluster, request: Request, version: int, scorers: tuple[str, ...]) -> Switch | None:
    """None: the request ended before the new drafter had drafted often enough."""

    def table(number: int, drafter: str) -> RoutingTable:
        chain = (drafter,)
        return RoutingTable(version + number, {request.id: chain}, (chain,), scorers=scorers)

    cluster.loop.publish_table(table(1, FROM))
    num_tokens, switched = 0, False
    told_s: list[float] = []
    arrived_s: list[float] = []
    stream = cluster.client.generate(request)
    async for commit in stream:
        now_s = time.monotonic()
        num_tokens += len(commit.token_ids)
        if not switched and num_tokens >= BEFORE:
            switched = True
            cluster.loop.publish_table(table(2, TO))
        elif switched and commit.drafter == TO and commit.num_proposed:
            arrived_s.append(now_s)
            if len(arrived_s) > NUM_ROUNDS:
                break
        elif switched and len(told_s) < NUM_BEFORE_TOLD:
            told_s.append(now_s)
    await stream.aclose()
    if not told_s or len(arrived_s) <= NUM_ROUNDS:
        return None
    rounds = [later - sooner for sooner, later in pairwise(arrived_s)]
    return Switch(arrived_s[0] - told_s[-1], statistics.median(rounds))


def result(switches: dict[bool, list[Switch]], prompt_len: int) -> BenchResult:
    stalls = {in_step: statistics.median(one.stall_s for one in found) for in_step, found in switches.items()}
    rows = tuple(
        (
            "in step" if in_step else "catches up",
            len(found),
            1e3 * statistics.median(one.first_s for one in found),
            1e3 * statistics.median(one.round_s for one in found),
            1e3 * stalls[in_step],
        )
        for in_step, found in switches.items()
    )
    return BenchResult(
        "routing",
        {
            "switch_stall_saved": 1.0 - stalls[True] / stalls[False] if stalls[False] > 0.0 else 0.0,
            "switch_stall_ms.in_step": 1e3 * stalls[True],
            "switch_stall_ms.catching_up": 1e3 * stalls[False],
        },
        tables=(
            Table(
                f"a switch in mid-request, prompts of {prompt_len} tokens, to the target's first {NUM_LAYERS} layers",
                ("the new drafter", "switches", "first draft verified ms", "usual round ms", "stall ms"),
                rows,
            ),
        ),
    )
