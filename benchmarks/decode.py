"""``outrider bench decode``: decode step over its floor.

The step is the whole of ``NativeTarget.execute`` for a number of sequences with one row each, token choice included.
The floor is the time of its products with weights, including the head for every row, and of the two attention products
over the same context in as many layers, without softmax. Products with weights take at least the larger of

- the time to read the weights in bfloat16, or as shipped their bytes in the file, at the machine's bandwidth, measured in
  turn with the step;
- the time of the fastest known products, measured in turn too: the step's own operators, ours in bfloat16, oneDNN with
  prepacked fp32 weights, or oneDNN in bfloat16 where the CPU level supports it. A short trial selects the fastest.

``log_prob_error.DTYPE``: root mean square difference of a token's log-probability from fp32, over NUM_SCORED tokens of text.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from benchmarks.prompts import choose_prompts
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from deploy.api.tokenizer import Tokenizer
from engine.batch_layout import PackedSpan
from engine.cpu.ops import CpuOps
from engine.cpu_level import cpu_level
from engine.dtypes import AS_SHIPPED, AUTO, choose_dtype
from engine.factory import load_model
from engine.forward import CausalModel
from engine.models.gguf_file import GgufFile
from engine.models.prepare import ensure_model, shipped_file
from engine.models.weights import open_weights
from engine.native import NativeLimits, NativeTarget
from engine.ops import TorchOps
from router.plan import Span

Choice = TypeVar("Choice")

CONTEXT_LEN = 512
STEP_ROWS = (1, 8, 32)
NUM_STEPS, NUM_STEPS_QUICK, NUM_SCORED = 300, 60, 700  # steps in turn with the floor; tokens of text
_BLOCK_LEN = 32
_SEED = 17
_NUM_TRIALS = 5  # per candidate product


def run(options: BenchOptions) -> BenchResult:
    num_steps = NUM_STEPS_QUICK if options.quick else NUM_STEPS
    folder = ensure_model(options.model)
    dtype, level = choose_dtype(options.dtype or AUTO, "cpu"), cpu_level()
    model = load_model(folder, dtype)
    num_bytes = _weight_bytes(folder, dtype, model)
    baselines = _baselines(folder, dtype, model)
    figures = _log_prob_errors(folder, options, {name.removeprefix("outrider "): one for name, one in baselines.items()})
    rows = []
    for num_rows in STEP_ROWS:
        times = _steps(model, baselines, num_rows, num_steps, num_bytes)
        figures[f"step_over_floor.rows_{num_rows}"] = times.step_s / times.floor_s
        rows.append(times.row(num_rows))
    return BenchResult(
        bench="decode",
        figures=figures,
        tables=(
            Table(
                f"one step at context {CONTEXT_LEN}, {dtype}, CPU level {level}",
                ("rows", "step ms", "floor ms", "weights ms", "read ms", "best product", "step / floor"),
                tuple(rows),
            ),
        ),
        notes=(
            "floor: weights ms and attention's two products; weights ms: the larger of read ms and the best product's time.",
            "medians of runs in turn in one process; prompts are random tokens.",
        ),
    )


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Medians."""

    step_s: float
    floor_s: float
    weights_s: float  # products with weights, a part of the floor
    read_s: float  # reading the weights
    best_product: str

    def row(self, num_rows: int) -> tuple[Cell, ...]:
        times = (self.step_s, self.floor_s, self.weights_s, self.read_s)
        return (num_rows, *(one * 1e3 for one in times), self.best_product, self.step_s / self.floor_s)


def _weight_bytes(folder: Path, dtype: str, model: CausalModel) -> int:
    """Of the matrices that one row is multiplied by."""
    if dtype == AS_SHIPPED:
        tensors, tied = GgufFile(shipped_file(folder)).tensors, model.config.tied_embeddings
        return sum(one.num_bytes for name, one in tensors.items() if len(one.shape) == 2 and (tied or "embed" not in name))
    c = model.config
    qkv_and_out = (2 * c.q_size + 2 * c.kv_size) * c.hidden_size
    return 2 * (c.num_layers * (qkv_and_out + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size)


def _log_prob_errors(folder: Path, options: BenchOptions, models: Mapping[str, CausalModel]) -> dict[str, float]:
    text = "\n".join(prompt.text for prompt in choose_prompts(options.prompts or options.data_prompts, NUM_SCORED))
    token_ids = tuple(Tokenizer.from_folder(folder).encode_each([text])[0][: NUM_SCORED + 1])

    def log_probs(model: CausalModel) -> torch.Tensor:
        num_blocks = len(token_ids) // _BLOCK_LEN + 1
        span = PackedSpan(0, token_ids, np.arange(num_blocks, dtype=np.int32))
        with torch.inference_mode():
            logits = model.logits(model.forward([span], model.new_cache(num_blocks, _BLOCK_LEN)))
        return logits.float().log_softmax(-1)[torch.arange(len(token_ids) - 1), torch.tensor(token_ids[1:])]

    found = {name: log_probs(model) for name, model in models.items()}
    exact = found.pop("oneDNN float32")
    return {f"log_prob_error.{name}": float((one - exact).square().mean().sqrt()) for name, one in found.items()}


def _baselines(folder: Path, dtype: str, model: CausalModel) -> dict[str, CausalModel]:
    """The model as served, in our bfloat16, and with torch's products: in fp32, and in bfloat16 where that is fast."""
    dtypes = [torch.float32, torch.bfloat16] if cpu_level().has_bf16_products else [torch.float32]
    baselines = {f"outrider {dtype}": model}
    if dtype == AS_SHIPPED:
        baselines["outrider bfloat16"] = load_model(folder, "bfloat16")
    for kind in dtypes:
        with open_weights(folder, model.config, kind) as weights:
            ops = TorchOps(model.config, kind)
            baselines[f"oneDNN {str(kind).removeprefix('torch.')}"] = CausalModel(model.config, weights, ops, kind)
    return baselines


def _steps(
    model: CausalModel, baselines: Mapping[str, CausalModel], num_rows: int, num_steps: int, num_bytes: int
) -> _StepTimes:
    """Times of a step of ``num_rows`` sequences at CONTEXT_LEN, and of its floor."""
    products = {name: _weight_products(rival, num_rows) for name, rival in baselines.items()}
    best, weights = _fastest(products, lambda work: work())
    attention, read = _attention_products(model, num_rows), _read_weights(num_bytes)
    with _sequences(model, num_rows, num_steps + 1) as (target, last_ids):
        step = _decoding(target, last_ids, itertools.count(CONTEXT_LEN))
        works = (step, weights, attention, read)
        for work in works:
            work()
        times_s = [[_elapsed_s(work) for work in works] for _ in range(num_steps)]
    step_s, products_s, attention_s, read_s = (statistics.median(each) for each in zip(*times_s, strict=True))
    weights_s = max(products_s, read_s)
    return _StepTimes(step_s, weights_s + attention_s, weights_s, read_s, best)


def _fastest(candidates: Mapping[str, Choice], work: Callable[[Choice], object]) -> tuple[str, Choice]:
    """By the shortest of a few alternating runs: noise only adds to a run."""
    for candidate in candidates.values():
        work(candidate)
    times_s = [[_elapsed_s(partial(work, one)) for one in candidates.values()] for _ in range(_NUM_TRIALS)]
    shortest = [min(each) for each in zip(*times_s, strict=True)]
    return list(candidates.items())[shortest.index(min(shortest))]


def _read_weights(num_bytes: int) -> Callable[[], None]:
    """Reads so many bytes, by a product of two halves."""
    first, second = torch.ones(num_bytes // 8), torch.ones(num_bytes // 8)  # four bytes each

    def work() -> None:
        torch.dot(first, second)

    return work


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
    """Does nothing if the model runs on plain torch, whose block products cannot be separated from the rest."""
    ops = model.ops
    if not isinstance(ops, CpuOps):
        return lambda: None
    num_blocks = CONTEXT_LEN // _BLOCK_LEN + 1
    cache = model.new_cache(num_rows * num_blocks, _BLOCK_LEN)
    cache.keys.fill_(0.1)  # untouched pages would share one zero page
    cache.values.fill_(0.1)
    tables = np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, num_blocks)
    layout = model.lay_out([PackedSpan(CONTEXT_LEN, (0,), table) for table in tables], _BLOCK_LEN)
    queries = torch.randn(num_rows, model.config.num_heads, model.config.head_dim)

    @torch.inference_mode()
    def work() -> None:
        for keys, values in zip(cache.keys, cache.values, strict=True):
            ops.attention(queries, layout, keys, values, products_only=True)

    return work


@contextmanager
def _sequences(model: CausalModel, num: int, num_new_tokens: int) -> Iterator[tuple[NativeTarget, dict[str, int]]]:
    """A target that holds ``num`` different computed prompts, and the first token of each answer."""
    max_len = CONTEXT_LEN + num_new_tokens + 1
    limits = NativeLimits(num * -(-max_len // _BLOCK_LEN), _BLOCK_LEN, num, CONTEXT_LEN, max_len)
    target = NativeTarget(model, limits, prefix_cache=False)
    sampling = SamplingParams(max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
    prompts = _prompts(num, CONTEXT_LEN, model.config.vocab_size)
    requests = [Request(str(i), prompt, sampling, arrival_s=0.0) for i, prompt in enumerate(prompts)]
    last_ids: dict[str, int] = {}
    for request in requests:
        target.open(request, request.prompt_token_ids)
        (outcome,) = target.execute([Span.bound(request.id, 0, request.prompt_token_ids)])
        last_ids[request.id] = outcome.chosen[0]
    yield target, last_ids


def _decoding(target: NativeTarget, last_ids: dict[str, int], lens: Iterator[int]) -> Callable[[], None]:
    """A step of one row for every sequence."""

    def step() -> None:
        base_len = next(lens)
        for outcome in target.execute([Span.bound(name, base_len, (token,)) for name, token in last_ids.items()]):
            last_ids[outcome.request_id] = outcome.chosen[0]

    return step


def _prompts(num: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    rng = random.Random(_SEED)
    return [tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(num)]


def _elapsed_s(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
