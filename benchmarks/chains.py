"""Part of ``outrider bench routing --live``: the policy `chain` against fixed chains, on a real server.

The target runs in fp32, so that tokens do not depend on drafting. The pool is a lookup, and behind it either the
target's weights in bf16, which are nearly always right and take half of the time, or the first third of its layers,
which are rarely right. Streams of each fixed chain and of the policy take turns at one server, so that noise affects
all alike. The first streams belong to the policy alone, without prior knowledge; later ones also learn from the fixed
chains.

Per pool and number of streams: `seconds.CHAIN` is the median over the turns, `policy_over_fastest` the policy's time
over the fastest fixed chain's, and `identical` 1 if all answers had the same text.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.load import HttpTarget, LoadRequest, run_streams
from benchmarks.report import BenchOptions, Cell, Table
from benchmarks.serve import checked, tokenize
from benchmarks.server import ServerProcess
from cluster.config import (
    ApiConfig,
    ChainPolicy,
    ClusterConfig,
    Config,
    DrafterConfig,
    FileStateConfig,
    ModelConfig,
    ModelOptions,
    NgramOptions,
    PlannerConfig,
    RouterConfig,
    TargetConfig,
)
from deploy.local_ray import free_port
from engine.models.config import load_config
from engine.models.prepare import ensure_model

LOOKUP, MODEL = "lookup", "model"
POLICY = "auto"
FIXED = ("off", LOOKUP, MODEL, f"{LOOKUP}>{MODEL}")
NUM_TOKENS = 200
NUM_STREAMS, NUM_STREAMS_QUICK = (1, 4), (1,)
NUM_TURNS, NUM_TURNS_QUICK = 3, 2
MAX_PROMPT_LEN = 256
DRAFT_LEN = 6
HOLD_MS = 200.0  # a draft that takes half of the target's time may be worth several passes


def pools(model: str) -> dict[str, ModelOptions]:
    """The last drafter of each pool."""
    folder = ensure_model(model)
    third = max(1, load_config(folder).num_layers // 3)
    return {
        "bf16": ModelOptions(model=str(folder), kv_cache_gb=0.125),
        "third": ModelOptions(model=str(folder), num_layers=third, kv_cache_gb=0.125),
    }


def config(model: str, last: ModelOptions, state: Path) -> Config:
    """``state``: an empty folder, so that nothing was learned before."""
    return Config(
        model=ModelConfig(name=model),
        target=TargetConfig(dtype="float32", kv_cache_gb=0.25),
        drafters=(
            DrafterConfig(name=LOOKUP, options=NgramOptions(), max_draft_len=DRAFT_LEN),
            DrafterConfig(name=MODEL, options=last, max_draft_len=DRAFT_LEN),
        ),
        planner=PlannerConfig(max_hold_ms=HOLD_MS),
        router=RouterConfig(policy=ChainPolicy(), slot_ms=100),
        api=ApiConfig(port=free_port()),
        cluster=ClusterConfig(state=FileStateConfig(folder=state)),
    )


def run(options: BenchOptions) -> tuple[dict[str, float], list[Table]]:
    """Figures, and a table per pool and number of streams."""
    figures: dict[str, float] = {}
    tables = []
    for pool, last in pools(options.model).items():
        for num_streams in NUM_STREAMS_QUICK if options.quick else NUM_STREAMS:
            prompts = asyncio.run(tokenize(ensure_model(options.model), options.prompts, num_streams))
            asks = [
                LoadRequest(str(i), prompt[-MAX_PROMPT_LEN:], NUM_TOKENS, temperature=0.8 * (i % 2), seed=i)
                for i, prompt in enumerate(prompts)
            ]
            with TemporaryDirectory(prefix="outrider-bench-") as state:
                made = config(options.model, last, Path(state))
                turns = measure(made, FIXED, asks, NUM_TURNS_QUICK if options.quick else NUM_TURNS)
            name = f"chain.{pool}.streams_{num_streams}"
            figures |= {f"{name}.{figure}": value for figure, value in turns.figures.items()}
            tables.append(turns.table(f"{pool}: seconds of {num_streams} streams of {NUM_TOKENS} tokens, turn by turn"))
    return figures, tables


@dataclass(frozen=True, slots=True)
class ChainTimes:
    """Seconds of the first turns, which were the policy's, and of the others by chain."""

    first: Sequence[float]
    by_chain: Mapping[str, Sequence[float]]
    num_texts: int  # distinct texts among all answers

    @property
    def figures(self) -> dict[str, float]:
        medians = {chain: statistics.median(seconds) for chain, seconds in self.by_chain.items()}
        found = {f"seconds.{chain}": seconds for chain, seconds in medians.items()}
        found["policy_over_fastest"] = medians[POLICY] / min(s for chain, s in medians.items() if chain != POLICY)
        found["identical"] = float(self.num_texts == 1)
        return found

    def table(self, title: str) -> Table:
        names = {POLICY: "the policy", "off": "the target alone"}
        named = {names.get(chain, chain.replace(">", " > ")): seconds for chain, seconds in self.by_chain.items()}
        rows: list[tuple[Cell, ...]] = [
            (name, " ".join(f"{s:.2f}" for s in seconds), statistics.median(seconds))
            for name, seconds in ({"the policy, at first": self.first} | named).items()
        ]
        return Table(title, ("with", "turns", "median"), tuple(rows))


def measure(config: Config, fixed: Sequence[str], asks: Sequence[LoadRequest], num_turns: int) -> ChainTimes:
    """Turns of the policy alone, then of each ``fixed`` choice and the policy, by a server of ``config``."""
    with ServerProcess(config) as server:
        with server.client() as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
        target = HttpTarget(server.config.api.host, server.config.api.port, name)
        texts: set[tuple[str, ...]] = set()

        def turn(chain: str) -> float:
            begun_s = time.monotonic()
            wanted = [replace(ask, drafting=chain) for ask in asks]
            answers = checked(asyncio.run(run_streams(target.ask, wanted, len(asks))))
            texts.add(tuple(answer.text for answer in answers))
            return time.monotonic() - begun_s

        turn("off")  # caches the prompts
        first = [turn(POLICY) for _ in range(num_turns)]
        turns: dict[str, list[float]] = {chain: [] for chain in (*fixed, POLICY)}
        for number in range(num_turns):
            for chain, seconds in list(turns.items())[:: 1 if number % 2 == 0 else -1]:
                seconds.append(turn(chain))
    return ChainTimes(first, turns, len(texts))
