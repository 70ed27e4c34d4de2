"""``outrider bench decode``: how near a decode step comes to the matrix products that it cannot do without, and how much
faster than transformers it answers.

The step is the whole of ``NativeTarget.execute`` for so many sequences with one row each, choice of the token included.
The floor is all of its matrix products and nothing else, by the operators that the step uses, which are the fastest known
here: those with weights, the head for every row included, and the two of attention, over as much context in as many layers,
without its softmax. ``step_over_weight_products`` leaves those two out of the floor, so that it counts the reading of keys
and values as overhead. Step and floors alternate, so that what disturbs the machine disturbs all.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.types import Request, SamplingParams
from deploy.bench.report import BenchOptions, BenchResult, Cell, Table
from engine.cpu.ops import CpuOps
from engine.factory import load_model
from engine.forward import CausalModel
from engine.layout import PackedSpan
from engine.models.prepare import ensure_model
from engine.native import NativeLimits, NativeTarget
from engine.target import SpanInput

CONTEXT_LEN = 512
STEP_ROWS = (1, 8, 32)
BATCHES = (1, 8)
PROMPT_LEN = 128
_BLOCK_LEN = 32
_PREFILL_LEN = 512
_SEED = 17


@dataclass(frozen=True, slots=True)
class _Effort:
    num_steps: int  # of step and floor, alternating
    num_rounds: int  # of answers by each side
    num_new_tokens: int


_QUICK = _Effort(num_steps=60, num_rounds=2, num_new_tokens=48)
_FULL = _Effort(num_steps=300, num_rounds=5, num_new_tokens=128)


def run(options: BenchOptions) -> BenchResult:
    effort = _QUICK if options.quick else _FULL
    folder = ensure_model(options.model)
    model = load_model(folder)
    figures: dict[str, float] = {}
    step_rows, speed_rows = [], []
    for num_rows in STEP_ROWS:
        times = _steps(model, num_rows, effort.num_steps)
        figures[f"step_over_floor.rows_{num_rows}"] = times.step_s / times.floor_s
        figures[f"step_over_weight_products.rows_{num_rows}"] = times.step_s / times.weights_s
        step_rows.append(times.row(num_rows))
    peer = _transformers(folder)
    for batch in BATCHES:
        ours, theirs = _speeds(model, peer, batch, effort)
        figures[f"speedup_over_transformers.batch_{batch}"] = ours / theirs
        speed_rows.append((batch, ours, theirs, ours / theirs))
    return BenchResult(
        bench="decode",
        figures=figures,
        tables=(
            Table(
                f"one step at context {CONTEXT_LEN}, bf16",
                ("rows", "step ms", "floor ms", "weights ms", "step / floor", "step / weights", "tokens/s"),
                tuple(step_rows),
            ),
            Table(
                f"greedy answers of {effort.num_new_tokens} tokens to prompts of {PROMPT_LEN}, tokens/s, bf16",
                ("batch", "outrider", "transformers", "speed-up"),
                tuple(speed_rows),
            ),
        ),
        notes=(
            "floor: all matrix products of the step, by the operators that it uses; weights: without the two of attention.",
            "medians of alternating runs in one process; prompts are random tokens, as long for both sides.",
        ),
    )


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Medians."""

    step_s: float
    floor_s: float
    weights_s: float  # the part of the floor that multiplies with weights

    def row(self, num_rows: int) -> tuple[Cell, ...]:
        ratios = self.step_s / self.floor_s, self.step_s / self.weights_s
        return (num_rows, self.step_s * 1e3, self.floor_s * 1e3, self.weights_s * 1e3, *ratios, num_rows / self.step_s)


def _steps(model: CausalModel, num_rows: int, num_steps: int) -> _StepTimes:
    """A step of ``num_rows`` sequences at CONTEXT_LEN, and its products alone."""
    weights = _weight_products(model, num_rows)
    attention = _attention_products(model, num_rows)
    with _sequences(model, num_rows, CONTEXT_LEN, num_steps + 1) as (target, last_ids):
        step = _decoding(target, last_ids, itertools.count(CONTEXT_LEN))
        works = (step, weights, attention)
        for work in works:
            work()
        times_s = [[_elapsed_s(work) for work in works] for _ in range(num_steps)]
    return _StepTimes(
        step_s=statistics.median(step_s for step_s, _, _ in times_s),
        floor_s=statistics.median(weights_s + attention_s for _, weights_s, attention_s in times_s),
        weights_s=statistics.median(weights_s for _, weights_s, _ in times_s),
    )


def _weight_products(model: CausalModel, num_rows: int) -> Callable[[], None]:
    c = model.config
    widths = (c.hidden_size, c.q_size, c.hidden_size, c.intermediate_size)
    inputs = [torch.randn(num_rows, width).to(model.dtype) for width in widths]

    @torch.inference_mode()
    def work() -> None:
        for products in model.layer_products:
            for product, rows in zip(products, inputs, strict=True):
                product(rows)
        model.logits(inputs[0])

    return work


def _attention_products(model: CausalModel, num_rows: int) -> Callable[[], None]:
    """Nothing where the model runs on plain torch, whose products over blocks cannot be told from the rest."""
    ops = model.ops
    if not isinstance(ops, CpuOps):
        return lambda: None
    num_blocks = CONTEXT_LEN // _BLOCK_LEN + 1
    cache = model.new_cache(num_rows * num_blocks, _BLOCK_LEN)
    cache.keys.fill_(0.1)  # written, for pages that never were would all be the same one
    cache.values.fill_(0.1)
    tables = np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, num_blocks)
    layout = model.lay_out([PackedSpan(CONTEXT_LEN, (0,), table) for table in tables], _BLOCK_LEN)
    queries = torch.randn(num_rows, model.config.num_heads, model.config.head_dim)

    @torch.inference_mode()
    def work() -> None:
        for keys, values in zip(cache.keys, cache.values, strict=True):
            ops.attention_products(queries, layout, keys, values)

    return work


def _speeds(model: CausalModel, peer: Any, batch: int, effort: _Effort) -> tuple[float, float]:
    """Median tokens per second of ours and of transformers, prefill included."""
    prompts = _prompts(batch, PROMPT_LEN, model.config.vocab_size)

    def ours() -> None:
        with _sequences(model, batch, PROMPT_LEN, effort.num_new_tokens) as (target, last_ids):
            step = _decoding(target, last_ids, itertools.count(PROMPT_LEN))
            for _ in range(effort.num_new_tokens - 1):
                step()

    def theirs() -> None:
        ids = torch.tensor(prompts)
        length = {"max_new_tokens": effort.num_new_tokens, "min_new_tokens": effort.num_new_tokens}
        made = peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length)
        assert made.shape == (batch, PROMPT_LEN + effort.num_new_tokens)

    times_s = [(_elapsed_s(ours), _elapsed_s(theirs)) for _ in range(effort.num_rounds + 1)][1:]
    num_tokens = batch * effort.num_new_tokens
    return num_tokens / statistics.median(t for t, _ in times_s), num_tokens / statistics.median(t for _, t in times_s)


@contextmanager
def _sequences(
    model: CausalModel, num: int, prompt_len: int, num_new_tokens: int
) -> Iterator[tuple[NativeTarget, dict[str, int]]]:
    """A target that holds ``num`` different prompts, computed, and the first token of each answer."""
    max_len = prompt_len + num_new_tokens + 1
    limits = NativeLimits(num * -(-max_len // _BLOCK_LEN), _BLOCK_LEN, num, _PREFILL_LEN, max_len)
    target = NativeTarget(model, limits, prefix_cache=False)
    sampling = SamplingParams(max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
    prompts = _prompts(num, prompt_len, model.config.vocab_size)
    requests = [Request(str(i), prompt, sampling, arrival_s=0.0) for i, prompt in enumerate(prompts)]
    for request in requests:
        target.open(request, request.prompt_token_ids)
    last_ids: dict[str, int] = {}
    at_once = max(1, _PREFILL_LEN // prompt_len)
    for start in range(0, num, at_once):
        spans = [SpanInput(request.id, 0, request.prompt_token_ids) for request in requests[start : start + at_once]]
        last_ids |= {outcome.request_id: outcome.token_ids[0] for outcome in target.execute(spans)}
    yield target, last_ids


def _decoding(target: NativeTarget, last_ids: dict[str, int], lens: Iterator[int]) -> Callable[[], None]:
    """A step of one row for every sequence."""

    def step() -> None:
        base_len = next(lens)
        for outcome in target.execute([SpanInput(name, base_len, (token,)) for name, token in last_ids.items()]):
            last_ids[outcome.request_id] = outcome.token_ids[0]

    return step


def _prompts(num: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    rng = random.Random(_SEED)
    return [tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(num)]


def _transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def _elapsed_s(work: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
