"""The native target: a model, a paged KV cache, and the ledger of its blocks."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import InvalidField
from cluster.types import Request, TokenLogprobs
from engine.acceptance import verdict
from engine.batch_layout import PackedSpan
from engine.device import to_device
from engine.forward import CausalModel, RowWatch
from engine.hidden_states import HiddenStateCache
from engine.kv_blocks import BlockLedger
from engine.logprobs import prompt_logprobs
from engine.sampling import SampleSpan, SamplingState
from engine.target import FeatureSpan, SpanInput, SpanOutcome
from engine.tensor_parallel.sampling import sampler_of
from router.plan import Capacity

if TYPE_CHECKING:
    from engine.grammar.compiling import Grammars


class PassWatch(RowWatch, Protocol):
    """The watch of one pass over spans."""

    @property
    def has_left(self) -> bool: ...

    def trimmed(self) -> list[SpanInput]:
        """The spans as if drafts whose rows left had not been verified."""

    def learn(self, outcomes: Sequence[SpanOutcome]) -> None:
        """After the pass. ``outcomes``: of ``trimmed()``."""


class Exits(Protocol):
    """Decides before each pass whether and how its rows may leave (`engine.early_exit`)."""

    def watch(self, spans: Sequence[SpanInput], states: Mapping[str, SamplingState]) -> PassWatch | None:
        """None: a plain pass."""


@dataclass(frozen=True, slots=True)
class NativeLimits:
    """Limits of the KV cache and of a pass. ``*_len`` and ``max_pass_tokens`` are in tokens, ``num_blocks`` in KV blocks."""

    num_blocks: int
    block_len: int
    max_num_sequences: int
    max_pass_tokens: int
    max_model_len: int


class NativeTarget:
    """``engine.target.LoadedTarget`` over a ``CausalModel``, in this process. ``feature_layers``: layers whose hidden states
    are kept for drafters in this process (``read_hidden_states``). ``grammars``: of the model; None: requests have none, or
    another rank masks their logits.

    Drafters on other threads read hidden states of committed positions while a pass runs. The pass writes other rows, so
    only the ledger is locked: blocks neither move nor fall free while rows are copied.

    Raises InvalidField: the limits contradict the model or each other, or the model has no such layers.
    """

    def __init__(
        self,
        model: CausalModel,
        limits: NativeLimits,
        prefix_cache: bool = True,
        feature_layers: Sequence[int] = (),
        grammars: "Grammars | None" = None,
    ) -> None:
        num_blocks, block_len, max_len = limits.num_blocks, limits.block_len, limits.max_model_len
        if not 1 <= max_len <= model.config.max_len:
            raise InvalidField("max_model_len", max_len, f"must lie between 1 and the model's {model.config.max_len}")
        if num_blocks * block_len < max_len:
            reason = f"a KV cache of {num_blocks} blocks of {block_len} tokens cannot hold one sequence of {max_len} tokens"
            raise InvalidField("max_model_len", max_len, f"{reason}: enlarge kv_cache_gb or lower max_model_len")
        self._grammars = grammars
        self._model = model
        self._limits = limits
        self._cache = model.new_cache(num_blocks, block_len)
        shape = model.config.num_layers, model.config.hidden_size
        self._features = HiddenStateCache(shape, feature_layers, num_blocks, block_len, model.dtype, model.device)
        self._ledger = BlockLedger(num_blocks, block_len, prefix_cache)
        self._ledger_lock = threading.Lock()
        self._sampler = sampler_of(model)
        self._states: dict[str, SamplingState] = {}
        self._exits: Exits | None = None
        self.meanwhile: Callable[[], None] | None = None
        self._scored: dict[str, Request] = {}  # those that ask for log-probabilities of their prompts

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        grammar, prompt_len = None, len(request.prompt_token_ids)
        if request.sampling.grammar is not None and self._grammars is not None:
            grammar = self._grammars.follow(request.sampling, token_ids[prompt_len:])
        state = SamplingState(request.sampling, token_ids, prompt_len, grammar)
        with self._ledger_lock:
            computed_len = self._ledger.open(request.id, _cacheable(request, token_ids), request.cache_salt)
        if request.sampling.prompt_logprobs is not None:
            self._scored[request.id] = request
        self._states[request.id] = state
        return computed_len

    def num_cached(self, request: Request, token_ids: Sequence[int]) -> int:
        return self._ledger.num_cached(request.id, _cacheable(request, token_ids), request.cache_salt)

    def execute(self, spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        if not spans:
            return []
        for span in spans:
            self._check(span)
        with self._ledger_lock:
            checkpoints = self._ledger.speculate_all({span.request_id: span.token_ids for span in spans})
        try:
            outcomes = self._compute(spans)
            self._model.synchronize()  # callers time passes, and a pass without sampled rows reads nothing back
        except BaseException:
            with self._ledger_lock:
                for checkpoint in checkpoints.values():
                    self._ledger.commit(checkpoint, 0)
            raise
        with self._ledger_lock:
            for span, outcome in zip(spans, outcomes, strict=True):
                # Without the bonus token: the next pass computes its keys.
                num_kept = len(span.token_ids) - span.num_drafts + outcome.num_accepted
                self._ledger.commit(checkpoints[span.request_id], num_kept)
        for span, outcome in zip(spans, outcomes, strict=True):
            self._states[span.request_id].extend(outcome.token_ids)
        return outcomes

    def exit_early(self, exits: Exits | None) -> None:
        """From now on rows may leave passes as ``exits`` decides; None: all are computed to the end."""
        self._exits = exits

    def release(self, request_id: str) -> None:
        self._ledger.forget(request_id)
        if self._states.pop(request_id, None) is not None:
            with self._ledger_lock:
                self._ledger.release(request_id)
            self._scored.pop(request_id, None)

    @property
    def grammars(self) -> "Grammars | None":
        return self._grammars

    @property
    def model(self) -> CausalModel:
        return self._model

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._features.layers

    @property
    def embedding(self) -> torch.Tensor:
        return self._model.embedding

    @property
    def operators(self) -> str:
        return type(self._model.ops).__name__

    @property
    def is_asynchronous(self) -> bool:
        return self._model.device.type == "cuda"

    def close(self) -> None:
        """It started nothing."""

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], torch.Tensor]:
        ledger = self._ledger
        with self._ledger_lock:
            lens = [ledger.computed_len(one.request_id) if one.request_id in ledger else 0 for one in spans]
            held = [0 <= one.start <= one.stop <= num for one, num in zip(spans, lens, strict=True)]
            found = compress(spans, held)
            return held, self._features.read([(ledger.block_table(s.request_id), s.start, s.stop) for s in found])

    def capacity(self) -> Capacity:
        limits, num_free = self._limits, self._ledger.num_free_blocks
        most = limits.max_num_sequences, limits.max_pass_tokens, limits.max_model_len
        return Capacity(limits.block_len, limits.num_blocks, num_free, *most, self._model.padded_rows)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        for request_id in self._states:
            assert request_id in self._ledger, f"{request_id!r} has a sampling state and no blocks"

    def _check(self, span: SpanInput) -> None:
        """Raises ValueError for a span that contradicts the ledger, which is a bug of the caller."""
        computed_len = self._ledger.computed_len(span.request_id)
        if span.base_len != computed_len:
            raise ValueError(f"span of {span.request_id!r} starts at {span.base_len}; {computed_len} tokens are computed")
        if not 0 <= span.num_drafts < len(span.token_ids) or (span.num_drafts and not span.samples):
            raise ValueError(f"span of {span.request_id!r}: {span.num_drafts} drafts in {len(span.token_ids)} tokens")

    def _compute(self, spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        watch = None if self._exits is None else self._exits.watch(spans, self._states)
        packed = self._packed(spans)
        if watch is None:
            states = self._model.forward_with_hidden_states(packed, self._cache, self._features.layers)
        else:
            states = self._model.forward_watched(packed, self._cache, self._features.layers, watch)
            if watch.has_left:
                spans = watch.trimmed()
        hidden = states.final
        self._features.write(states.slots, states.features)
        if self.meanwhile is not None:
            self.meanwhile()
        scores = self._prompt_logprobs(spans, hidden) if self._scored else {}
        outcomes = self._sample(spans, hidden)
        if watch is not None:
            watch.learn(outcomes)
        return [
            replace(outcome, prompt_logprobs=scores[span.request_id], scored_from=span.base_len + 1)
            if span.request_id in scores
            else outcome
            for span, outcome in zip(spans, outcomes, strict=True)
        ]

    def _packed(self, spans: Sequence[SpanInput]) -> list[PackedSpan]:
        return [PackedSpan(span.base_len, span.token_ids, self._ledger.block_table(span.request_id)) for span in spans]

    def _prompt_logprobs(self, spans: Sequence[SpanInput], hidden: torch.Tensor) -> dict[str, tuple[TokenLogprobs, ...]]:
        ends = np.cumsum([len(span.token_ids) for span in spans]).tolist()
        return {
            span.request_id: prompt_logprobs(
                self._scored[span.request_id], span, hidden[end - len(span.token_ids) : end], self._whole_logits
            )
            for span, end in zip(spans, ends, strict=True)
            if span.request_id in self._scored
        }

    def _whole_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._sampler.gathered(self._model.logits(hidden))

    def _sample(self, spans: Sequence[SpanInput], hidden: torch.Tensor) -> list[SpanOutcome]:
        sampled = [span for span in spans if span.samples]
        if not sampled:
            return [SpanOutcome(span.request_id, (), 0) for span in spans]
        if sum(span.num_drafts + 1 for span in sampled) < len(hidden):
            hidden = hidden[to_device(_sampled_rows(spans), hidden.device)]
        logits, states = self._model.logits(hidden), self._states
        asked = [SampleSpan(states[span.request_id], _drafts(span), span.num_drafts + 1) for span in sampled]
        chosen = iter(self._sampler.choose(logits, asked))
        return [
            verdict(span.request_id, _drafts(span), next(chosen)) if span.samples else SpanOutcome(span.request_id, (), 0)
            for span in spans
        ]


def _cacheable(request: Request, token_ids: Sequence[int]) -> Sequence[int]:
    """Cached rows have no logits."""
    return token_ids if request.sampling.prompt_logprobs is None else ()


def _drafts(span: SpanInput) -> tuple[int, ...]:
    return span.token_ids[len(span.token_ids) - span.num_drafts :]


def _sampled_rows(spans: Sequence[SpanInput]) -> NDArray[np.int64]:
    """Indices of the rows whose logits are sampled, ascending."""
    ends = np.cumsum([len(span.token_ids) for span in spans])
    rows = [np.arange(end - span.num_drafts - 1, end) for span, end in zip(spans, ends, strict=True) if span.samples]
    return np.concatenate(rows)
