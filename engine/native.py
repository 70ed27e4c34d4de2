"""The native target: a model, a paged KV cache, and the ledger of its blocks."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from cluster.errors import InvalidField
from cluster.types import Request
from engine.acceptance import accept
from engine.batch_layout import PackedSpan
from engine.device import to_device
from engine.forward import CausalModel, RowWatch
from engine.hidden_states import HiddenStateCache
from engine.kv_blocks import BlockLedger
from engine.sampling import SampleSpan, SamplingState, prompt_logprobs
from engine.target import FeatureSpan
from engine.tensor_parallel.sampling import sampler_of
from router.plan import Capacity, Span

if TYPE_CHECKING:
    from engine.grammar.compiling import Grammars


class PassWatch(RowWatch, Protocol):
    """The watch of one pass over spans."""

    def nums_drafts(self) -> list[int]:
        """Of each span, the drafts whose rows have stayed: the others count as not verified."""

    def learn(self) -> None:
        """After the pass, from the outcomes of its spans."""


class Exits(Protocol):
    """Decides before each pass whether and how its rows may leave (`engine.early_exit`)."""

    def watch(self, spans: Sequence[Span], states: Mapping[str, SamplingState]) -> PassWatch | None:
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
        self._features = HiddenStateCache(shape, feature_layers, num_blocks, block_len, model.kv_dtype, model.device)
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

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        if not spans:
            return ()
        for span in spans:
            self._check(span)
        with self._ledger_lock:
            checkpoints = self._ledger.speculate_all({span.request_id: span.token_ids for span in spans})
        try:
            self._compute(spans, self._watch(spans))
            self._model.synchronize()  # callers time passes, and a pass without sampled rows reads nothing back
        except BaseException:
            with self._ledger_lock:
                for checkpoint in checkpoints.values():
                    self._ledger.commit(checkpoint, 0)
            raise
        with self._ledger_lock:
            for span in spans:  # without the bonus token: the next pass computes its keys
                self._ledger.commit(checkpoints[span.request_id], span.num_compute + span.num_accepted)
        for span in spans:
            self._states[span.request_id].extend(span.chosen)
        return spans

    def exit_early(self, exits: Exits | None) -> None:
        """From now on rows may leave passes as ``exits`` decides; None: all are computed to the end."""
        self._exits = exits

    @contextmanager
    def without_exits(self) -> Iterator[None]:
        """Passes within it are plain: all rows are computed to the end, and nothing is learned from them."""
        exits, self._exits = self._exits, None
        try:
            yield
        finally:
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

    def _check(self, span: Span) -> None:
        """Raises ValueError for a span that contradicts the ledger, which is a bug of the caller."""
        computed_len = self._ledger.computed_len(span.request_id)
        if span.base_len != computed_len:
            raise ValueError(f"span of {span.request_id!r} starts at {span.base_len}; {computed_len} tokens are computed")
        if not 0 <= span.num_drafts < len(span.token_ids) or (span.num_drafts and not span.samples):
            raise ValueError(f"span of {span.request_id!r}: {span.num_drafts} drafts in {len(span.token_ids)} tokens")

    def _watch(self, spans: Sequence[Span]) -> PassWatch | None:
        """Of the pass that begins."""
        return None if self._exits is None else self._exits.watch(spans, self._states)

    def _compute(self, spans: Sequence[Span], watch: PassWatch | None) -> None:
        """Fills in the outcomes."""
        packed = [PackedSpan(span.base_len, span.token_ids, self._ledger.block_table(span.request_id)) for span in spans]
        nums_drafts = [span.num_drafts for span in spans]
        if watch is None:
            states = self._model.forward_with_hidden_states(packed, self._cache, self._features.layers)
        else:
            states = self._model.forward_watched(packed, self._cache, self._features.layers, watch)
            nums_drafts = watch.nums_drafts()
        hidden = states.final
        self._features.write(states.slots, states.features)
        if self.meanwhile is not None:
            self.meanwhile()
        ends = list(accumulate([span.num_compute + num for span, num in zip(spans, nums_drafts, strict=True)]))
        for span, num, end in zip(spans, nums_drafts, ends, strict=True):
            scored = self._scored.get(span.request_id)
            if scored is not None:
                rows = hidden[end - num - span.num_compute : end]
                span.prompt_logprobs = prompt_logprobs(scored, span, rows, self._whole_logits)
                span.scored_from = span.base_len + 1
        self._sample(spans, nums_drafts, ends, hidden)
        if watch is not None:
            watch.learn()

    def _whole_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._sampler.gathered(self._model.logits(hidden))

    def _sample(self, spans: Sequence[Span], nums_drafts: Sequence[int], ends: Sequence[int], hidden: torch.Tensor) -> None:
        """``nums_drafts``: drafts that are verified of each span, whose rows of ``hidden`` end at ``ends``."""
        sampled = [(span, num, end) for span, num, end in zip(spans, nums_drafts, ends, strict=True) if span.samples]
        if not sampled:
            return
        if sum([num + 1 for _, num, _ in sampled]) < len(hidden):
            rows = np.concatenate([np.arange(end - num - 1, end) for _, num, end in sampled])
            hidden = hidden[to_device(rows, hidden.device)]
        logits, states = self._model.logits(hidden), self._states
        asked = [SampleSpan(states[span.request_id], span.drafts[:num], num + 1) for span, num, _ in sampled]
        for (span, _, _), rows_of, chosen in zip(sampled, asked, self._sampler.choose(logits, asked), strict=True):
            accept(span, rows_of.drafts, chosen)


def _cacheable(request: Request, token_ids: Sequence[int]) -> Sequence[int]:
    """Cached rows have no logits."""
    return token_ids if request.sampling.prompt_logprobs is None else ()
