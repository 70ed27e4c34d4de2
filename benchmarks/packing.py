"""``outrider bench packing``: attention of verify spans by padding, by request decomposition and ragged (SPIN, figure 12).

One layer of the model's shape in fp32, spans of 1 + 7 rows, in three kinds of batches: contexts of one length, of a skewed
distribution as in chats, and one long context among short ones. Padding and decomposition multiply the same rectangular
tensors (`benchmarks/rectangular_attention.py`); ragged in torch loops over sequences; ragged compiled is what Outrider runs.

``decomposition_over_padding.KIND.BATCH``, ``ragged_over_decomposition.KIND.BATCH``: how many times as fast.
``cells_saved.KIND.BATCH``: share of the KV tensor that decomposition saves over padding.
"""

import random
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.rectangular_attention import RectangularOps, decomposed, padded
from benchmarks.report import BenchOptions, BenchResult, Table
from engine.batch_layout import Layout, PackedSpan, lay_out
from engine.cpu.ops import CpuOps
from engine.kv_cache import BLOCK_LEN, KvCache
from engine.models.config import DecoderConfig, inverse_frequencies, load_config
from engine.models.prepare import ensure_model
from engine.ops import Ops, TorchOps
from profiler.interleaved import Timing, TimingBudget, time_interleaved
from profiler.stopwatch import OwnTime

BATCHES, BATCHES_QUICK = (4, 8, 16, 32), (4, 16)
NUM_ROWS = 8  # of a span
MAX_CONTEXT = 1900
ROWS_PER_SEQUENCE = 3.0  # of the KV tensor, at most
_SEED = 5

CONTEXTS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "even": lambda rng, num: [512] * num,
    "skewed": lambda rng, num: [min(MAX_CONTEXT, max(32, int(rng.lognormvariate(5.6, 0.9)))) for _ in range(num)],
    "one-long": lambda rng, num: [MAX_CONTEXT, *[128] * (num - 1)],
}
BACKENDS = ("padding", "decomposition", "ragged torch", "ragged")


def run(options: BenchOptions) -> BenchResult:
    config = load_config(ensure_model(options.model)).truncated(1)
    budget = TimingBudget(min_visits=5, budget_s=4.0 if options.quick else 10.0)
    figures: dict[str, float] = {}
    rows: list[tuple[str | int | float, ...]] = []
    for kind, draw in CONTEXTS.items():
        for batch in BATCHES_QUICK if options.quick else BATCHES:
            contexts = draw(random.Random(_SEED), batch)
            times = attention_times(config, contexts, budget)
            saved = cells_saved(contexts)
            name = f"{kind}.{batch}"
            figures |= {
                f"decomposition_over_padding.{name}": times["padding"].seconds / times["decomposition"].seconds,
                f"ragged_over_decomposition.{name}": times["decomposition"].seconds / times["ragged"].seconds,
                f"cells_saved.{name}": saved,
            }
            rows.append((kind, batch, *[1e3 * times[backend].seconds for backend in BACKENDS], saved))
    columns = ("contexts", "batch", *[f"{backend} ms" for backend in BACKENDS], "cells saved")
    return BenchResult("packing", figures, (Table("attention of one layer", columns, tuple(rows)),))


def attention_times(config: DecoderConfig, contexts: list[int], budget: TimingBudget) -> dict[str, Timing]:
    """Of one layer. Laying the tensors out counts once in a pass, so it is shared by the model's layers and not timed."""
    layout, cache = packed(config, contexts)
    queries = torch.randn(layout.num_rows, config.num_heads, config.head_dim, generator=torch.Generator().manual_seed(_SEED))
    backends: dict[str, Ops] = {
        "padding": RectangularOps(config, torch.float32),
        "decomposition": RectangularOps(config, torch.float32, ROWS_PER_SEQUENCE),
        "ragged torch": TorchOps(config, torch.float32),
        "ragged": CpuOps(config, torch.float32),
    }
    queries *= config.head_dim**-0.5
    stopwatch = OwnTime()

    def work(ops: Ops) -> Callable[[], float]:
        def seconds() -> float:
            stopwatch.start()
            ops.attention(queries, layout, cache.keys[0], cache.values[0])
            return stopwatch.stop()

        return seconds

    return time_interleaved({name: work(ops) for name, ops in backends.items()}, budget, time.perf_counter)


def packed(config: DecoderConfig, contexts: list[int]) -> tuple[Layout, KvCache]:
    """Verify spans behind these contexts, and a cache of random keys and values."""
    num_blocks = [-(-(context + NUM_ROWS) // BLOCK_LEN) for context in contexts]
    cache = KvCache.allocate(config, sum(num_blocks), torch.float32, torch.device("cpu"))
    cache.keys.normal_()
    cache.values.normal_()
    ends = np.cumsum(num_blocks)
    tables = [np.arange(end - num, end, dtype=np.int32) for end, num in zip(ends, num_blocks, strict=True)]
    spans = [PackedSpan(context, [0] * NUM_ROWS, table) for context, table in zip(contexts, tables, strict=True)]
    frequencies = torch.tensor(inverse_frequencies(config), dtype=torch.float32)
    return lay_out(spans, BLOCK_LEN, frequencies, torch.device("cpu")), cache


def cells_saved(contexts: list[int]) -> float:
    lens = -(-(np.array(contexts) + NUM_ROWS) // BLOCK_LEN)
    return 1.0 - decomposed(lens, int(ROWS_PER_SEQUENCE * len(lens))).num_cells / padded(lens).num_cells
