"""Times of operators, sampling, passes and drafts of the native engine."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from cluster.sampling_params import SamplingParams
from drafters.small_model import Question, SmallModel
from engine.batch_layout import PackedSpan, lay_out
from engine.cuda.ops import CudaOps
from engine.device import to_host
from engine.factory import build_model
from engine.forward import CausalModel
from engine.kv_cache import KvCache
from engine.models.config import DecoderConfig, inverse_frequencies
from engine.models.weights import LayerWeights, LinearWeight
from engine.native import NativeLimits, NativeTarget
from engine.sampling import Sampler, SampleSpan, SamplingState
from tests.gpu.floors import MODEL, TINY, Timings, steps, weight_bytes
from tests.gpu.place import Place

BLOCK_LEN = 32
SAMPLINGS = {
    "greedy": SamplingParams(8, temperature=0.0),
    "temperature 0.8": SamplingParams(8, temperature=0.8),
    "top-p 0.95": SamplingParams(8, temperature=0.8, top_p=0.95),
    "top-k 40, penalties": SamplingParams(8, temperature=0.8, top_k=40, repetition_penalty=1.1, presence_penalty=0.2),
}


class MadeWeights:
    """``engine.models.weights.Weights`` of random numbers, made on the device."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._embedding = self._draw(config.vocab_size, config.hidden_size)

    def _draw(self, *shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=self._device) * 0.02).to(self._dtype)

    def embedding(self) -> torch.Tensor:
        return self._embedding

    def head(self) -> torch.Tensor:
        return self._embedding

    def final_norm(self) -> torch.Tensor:
        return torch.ones(self._config.hidden_size)

    def layers(self) -> Iterator[LayerWeights]:
        c = self._config
        for _ in range(c.num_layers):
            yield LayerWeights(
                input_norm=torch.ones(c.hidden_size),
                qkv=LinearWeight(self._draw(c.q_size + 2 * c.kv_size, c.hidden_size)),
                q_norm=None,
                k_norm=None,
                out=LinearWeight(self._draw(c.hidden_size, c.q_size)),
                post_norm=torch.ones(c.hidden_size),
                gate_up=LinearWeight(self._draw(2 * c.intermediate_size, c.hidden_size)),
                down=LinearWeight(self._draw(c.hidden_size, c.intermediate_size)),
            )


def native_timings(place: Place, found: list[dict[str, Any]]) -> None:
    config, dtype = (MODEL, torch.bfloat16) if place.is_gpu else (TINY, torch.float32)
    timings = Timings(place.device, found)
    one = torch.zeros(1, device=place.device)
    timings.wall("one value to the host", None, lambda: to_host(one))
    _operators(place, timings, config, dtype)
    _sampling(place, timings, config.vocab_size)
    with place.loading() as device:
        weights = MadeWeights(config, dtype, place.device)
        model = build_model(config, weights, str(dtype).removeprefix("torch."), device)
    _passes(place, timings, model)


def _operators(place: Place, timings: Timings, config: DecoderConfig, dtype: torch.dtype) -> None:
    c, ops, size = config, CudaOps(config, dtype), dtype.itemsize

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device).to(dtype)

    norm = torch.ones(c.hidden_size, device=place.device)
    matrix = rand(2 * c.intermediate_size, c.hidden_size)
    product = ops.linear(LinearWeight(matrix))
    for num_rows in (1, 8, 32, 512) if place.is_gpu else (1,):
        x, gate_up = rand(num_rows, c.hidden_size), rand(num_rows, 2 * c.intermediate_size)
        timings.kernel(f"add_norm, {num_rows} rows", x.numel() * (8 + 2 * size), partial(ops.add_norm, x.float(), x, norm))
        timings.kernel(f"gate, {num_rows} rows", 1.5 * gate_up.nbytes, partial(ops.gate, gate_up))
        timings.kernel(f"product with {list(matrix.shape)}, {num_rows} rows", matrix.nbytes, partial(product, x))
    shapes = ((1, 1, 1024), (1, 1, 32_000), (1, 5, 4096), (8, 1, 4096), (64, 1, 1024), (64, 5, 1024), (1, 512, 512))
    for num_spans, span_len, context in shapes if place.is_gpu else ((1, 2, 40),):
        spans = spans_of(num_spans, span_len, context)
        layout = lay_out(spans, BLOCK_LEN, torch.tensor(inverse_frequencies(c)), place.device)
        num_blocks = num_spans * len(spans[0].block_table)
        cache = KvCache.allocate(replace(c, num_layers=1), num_blocks, dtype, place.device, BLOCK_LEN)
        kv, qkv = (cache.keys[0], cache.values[0]), rand(num_spans * span_len, c.q_size + 2 * c.kv_size)
        queries = ops.rotate_and_store(qkv, None, layout, *kv)
        name = f"{num_spans} spans of {span_len} at {context}"
        rotate = partial(ops.rotate_and_store, qkv, None, layout, *kv)
        timings.kernel(f"rotate_and_store, {name}", qkv.nbytes + queries.nbytes + len(qkv) * 2 * c.kv_size * size, rotate)
        kv_bytes = num_spans * (context + span_len) * c.kv_size * 2 * size
        timings.kernel(f"attention, {name}", kv_bytes, partial(ops.attention, queries, layout, *kv))


def spans_of(num_spans: int, span_len: int, context: int) -> list[PackedSpan]:
    tables = np.arange(num_spans * -(-(context + span_len) // BLOCK_LEN), dtype=np.int32).reshape(num_spans, -1)
    return [PackedSpan(context, (0,) * span_len, table) for table in tables]


def _sampling(place: Place, timings: Timings, vocab_size: int) -> None:
    sampler = Sampler(vocab_size, (7,), place.sampling_kernel(vocab_size, torch.float32))
    for num_rows in (1, 8, 64, 256) if place.is_gpu else (1,):
        logits = 3 * torch.randn(num_rows, vocab_size, device=place.device)
        for name, sampling in SAMPLINGS.items():
            states = [SamplingState(replace(sampling, seed=i), [1, 2, 3], 2) for i in range(num_rows)]
            spans = [SampleSpan(state, (), 1) for state in states]
            timings.wall(f"sampling, {name}, {num_rows} rows", logits.nbytes, partial(sampler.choose, logits, spans))


def _passes(place: Place, timings: Timings, model: CausalModel) -> None:
    c, size = model.config, model.dtype.itemsize
    fixed, head_bytes = weight_bytes(c, size), c.vocab_size * c.hidden_size * size
    num_blocks = 2200 if place.is_gpu else 8
    cache = model.new_cache(num_blocks, BLOCK_LEN)
    for num_spans, span_len in ((1, 1), (1, 8), (8, 1), (8, 4), (32, 1), (64, 1)) if place.is_gpu else ((1, 1),):
        context = 1000 if place.is_gpu else 20
        spans = spans_of(num_spans, span_len, context)
        name = f"{num_spans} spans of {span_len} at {context}"
        num_bytes = fixed - head_bytes + num_spans * context * c.kv_bytes_per_token(size)
        timings.wall(f"pass without head, {name}", num_bytes, partial(model.forward, spans, cache))
        plainly = partial(CausalModel.forward_with_hidden_states, model, spans, cache, ())
        timings.wall(f"pass without head or graph, {name}", num_bytes, plainly)
    limits = NativeLimits(num_blocks, BLOCK_LEN, 64, 1024, min(c.max_len, num_blocks * BLOCK_LEN, 8192))
    steps(timings, NativeTarget(model, limits), (1, 8, 32, 64, 512) if place.is_gpu else (1,), fixed)
    small = SmallModel(model, num_blocks=num_blocks, vocab_size=c.vocab_size, eos_token_ids=(0,))
    for num_requests in (1, 8, 32) if place.is_gpu else (1,):
        asked = {f"{num_requests}-{i}": (5,) for i in range(num_requests)}
        for i, name in enumerate(asked):
            small.open(name, range(1, 60), 30, replace(SAMPLINGS["temperature 0.8"], seed=i))

        def draft(asked: dict[str, tuple[int, ...]] = asked) -> None:
            """The next token of each, by a pass of one row."""
            for name, chosen in zip(asked, small.choose([Question(*one) for one in asked.items()]), strict=True):
                asked[name] += chosen.token_ids

        timings.wall(f"a draft token of {num_requests} requests", fixed, draft)
