"""``outrider bench decode``: how near a decode step comes to the matrix products that it cannot do without, and how much
faster than transformers it answers.

The step is the whole of ``NativeTarget.execute`` for so many sequences with one row each, choice of the token included.
The floor is all of its products with weights and nothing else, by the same operator, which is the fastest one known here.
Step and floor alternate, so that what disturbs the machine disturbs both.
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

import torch

from cluster.types import Request, SamplingParams
from deploy.bench.report import BenchOptions, BenchResult, Table
from engine.factory import load_model
from engine.forward import CausalModel
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
    num_steps: int  # step and floor pairs
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
        step_s, floor_s = _steps(model, num_rows, effort.num_steps)
        figures[f"step_over_floor.rows_{num_rows}"] = step_s / floor_s
        step_rows.append((num_rows, step_s * 1e3, floor_s * 1e3, step_s / floor_s, num_rows / step_s))
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
                ("rows", "step ms", "floor ms", "step / floor", "tokens/s"),
                tuple(step_rows),
            ),
            Table(
                f"greedy answers of {effort.num_new_tokens} tokens to prompts of {PROMPT_LEN}, tokens/s, bf16",
                ("batch", "outrider", "transformers", "speed-up"),
                tuple(speed_rows),
            ),
        ),
        notes=(
            "floor: all products with weights, the head for every row included, by the operator that the step uses.",
            "medians of alternating runs in one process; prompts are random tokens, as long for both sides.",
        ),
    )


def _steps(model: CausalModel, num_rows: int, num_steps: int) -> tuple[float, float]:
    """Median seconds of a step of ``num_rows`` sequences at CONTEXT_LEN, and of its products alone."""
    with _sequences(model, num_rows, CONTEXT_LEN, num_steps + 1) as (target, last_ids):
        inputs = {width: torch.randn(num_rows, width).to(model.dtype) for _, width in model.products}
        products = [(product, inputs[width]) for product, width in model.products]

        @torch.inference_mode()
        def floor() -> None:
            for product, rows in products:
                product(rows)

        step = _decoding(target, last_ids, itertools.count(CONTEXT_LEN))
        floor()
        step()
        times_s = [(_elapsed_s(step), _elapsed_s(floor)) for _ in range(num_steps)]
    return statistics.median(t for t, _ in times_s), statistics.median(t for _, t in times_s)


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
