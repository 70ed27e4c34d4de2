"""Part of ``outrider bench routing --live``: the policy `hedge` against all requests with one drafter, on a real server.

The pool is the lookups, `dspark` and the cascade of them all. The same streams take turns at one server: with each drafter,
without any, and as the policy chooses. The target runs in fp32, so that tokens do not depend on drafting.

- ``hedge_over_best_fixed``: tokens per second of the policy over those of the drafter that is fastest in this run, by
  medians over the turns.
- ``identical``: 1 if all answers had the same text.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.chains import ChainTimes, measure
from benchmarks.load import LoadRequest
from benchmarks.pool import pool
from benchmarks.report import BenchOptions, Table
from benchmarks.serve import tokenize
from cluster.config import (
    ApiConfig,
    ClusterConfig,
    Config,
    FileStateConfig,
    HedgePolicy,
    ModelConfig,
    RouterConfig,
    TargetConfig,
)
from deploy.local_ray import free_port
from engine.models.prepare import ensure_model

NUM_STREAMS = 4
NUM_TOKENS, NUM_TOKENS_QUICK = 200, 96
NUM_TURNS, NUM_TURNS_QUICK = 6, 3
MAX_PROMPT_LEN = 256


def config(model: str, state: Path) -> Config:
    """``state``: an empty folder, so that nothing was learned before."""
    return Config(
        model=ModelConfig(name=model),
        target=TargetConfig(dtype="float32", kv_cache_gb=0.25),
        drafters=pool(model),
        router=RouterConfig(policy=HedgePolicy(), slot_ms=100),
        api=ApiConfig(port=free_port()),
        cluster=ClusterConfig(state=FileStateConfig(folder=state)),
    )


def run(options: BenchOptions) -> tuple[dict[str, float], list[Table]]:
    num_tokens, num_turns = (NUM_TOKENS_QUICK, NUM_TURNS_QUICK) if options.quick else (NUM_TOKENS, NUM_TURNS)
    prompts = asyncio.run(tokenize(ensure_model(options.model), options.prompts or options.data_prompts, NUM_STREAMS))
    asks = [
        LoadRequest(str(i), prompt[-MAX_PROMPT_LEN:], num_tokens, temperature=0.8 * (i % 2), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    with TemporaryDirectory(prefix="outrider-bench-") as state:
        made = config(options.model, Path(state))
        turns = measure(made, [drafter.name for drafter in made.drafters] + ["off"], asks, num_turns)
    table = turns.table(f"hedge: seconds of {NUM_STREAMS} streams of {num_tokens} tokens, turn by turn")
    return figures(turns), [table]


def figures(turns: ChainTimes) -> dict[str, float]:
    found = turns.figures
    seconds = {f"hedge.{key}": value for key, value in found.items() if key.startswith("seconds.")}
    return {**seconds, "hedge_over_best_fixed": 1.0 / found["policy_over_fastest"], "hedge.identical": found["identical"]}
