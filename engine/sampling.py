"""Sampling for targets and drafters alike (docs/architecture.md#principles): argmax_v(z_v + G(seed, position, v)).

z are the logits after penalties, bias, the masks of allowed_token_ids, min_tokens, a grammar and bad words, temperature,
top-k, top-p and min-p, in that order; G is Gumbel noise (``engine.noise``). At temperature 0 it is the plain argmax, the
lowest id of equal ones. The token at a position is thus a function of logits, history, parameters and seed, independent of
batch, device and drafts.

A GPU does all of it in one kernel (``engine.ops.FusedSampling``). Otherwise rows are processed in up to four groups, edited
or not and with or without noise, so that a row pays only for what its request uses.

Log-probabilities of prompts and of chosen tokens are computed here, too.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.sampling_params import SamplingParams
from cluster.types import Request, TokenLogprobs
from engine.acceptance import common_prefix_len
from engine.device import to_device, to_host
from engine.gumbel_argmax import greedy, gumbel_argmax, peaks, probabilities
from engine.logits import BadWords, Edits, Filters, TokenCounts, edit, floors
from engine.noise import noise_keys
from engine.ops import FusedSampling, GumbelArgmax
from router.plan import Span

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 64  # bounds the logits in memory: 64 rows of 128k tokens are 32 MiB in fp32


def token_logprobs(
    logits: Tensor, token_ids: NDArray[np.int64], num_top: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprobs]:
    """Raw log-probabilities of ``token_ids`` (R,) under logits (R, V), each with its ``num_top`` most probable tokens."""
    raw = logits.float()
    norm = raw.logsumexp(-1, keepdim=True)
    tokens = to_device(token_ids, raw.device).clamp_max(raw.shape[-1] - 1)
    chosen = raw.gather(1, tokens[:, None])
    ranks = 1 + (raw > chosen).sum(-1, keepdim=True)
    top = raw.topk(min(max(num_top), raw.shape[-1]))
    columns = [chosen - norm, ranks, top.values - norm, top.indices]
    host = to_host(torch.cat([column.double() for column in columns], dim=-1))  # one copy from the device
    own, ranks_found = host[:, 0].tolist(), host[:, 1].astype(np.int64).tolist()
    top_values, top_ids = np.split(host[:, 2:], 2, axis=1)
    values, ids = top_values.tolist(), top_ids.astype(np.int64).tolist()
    return [
        TokenLogprobs(own[i], tuple(zip(ids[i][:num], values[i][:num], strict=True)), ranks_found[i] if ranked else None)
        for i, num in enumerate(num_top)
    ]


@torch.inference_mode()
def prompt_logprobs(
    request: Request, span: Span, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprobs, ...]:
    """vLLM's ``prompt_logprobs``: of the prompt tokens that the span's rows predict, positions base_len + 1 onwards.

    Args:
        hidden: (rows of the span, hidden size).
        logits_of: hidden states to logits (rows, V).
    """
    num_top = request.sampling.prompt_logprobs
    next_ids = request.prompt_token_ids[span.base_len + 1 : span.base_len + 1 + span.num_compute]
    if num_top is None or not next_ids:
        return ()
    found: list[TokenLogprobs] = []
    for start in range(0, len(next_ids), _ROWS_AT_ONCE):
        ids = np.array(next_ids[start : start + _ROWS_AT_ONCE], np.int64)
        found += token_logprobs(logits_of(hidden[start : start + len(ids)]), ids, [num_top] * len(ids), ranked=True)
    return tuple(found)


class SamplingState:
    """Everything but the logits that a request's next token depends on. One per request. ``token_ids``: the prompt, then the
    committed output. ``prompt_len``: number of prompt tokens among them. ``grammar``: has followed the output; None: a
    drafter samples without the request's grammar."""

    def __init__(
        self, sampling: SamplingParams, token_ids: Sequence[int], prompt_len: int, grammar: "GrammarState | None" = None
    ) -> None:
        if not 0 <= prompt_len <= len(token_ids):
            raise ValueError(f"a prompt of {prompt_len} tokens does not fit into {len(token_ids)} tokens")
        self.sampling = sampling
        self.prompt_len = prompt_len
        self.counts = TokenCounts() if sampling.has_penalties else None
        self.bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
        if by_token := dict(sampling.logit_bias):
            self.bias = np.fromiter(by_token, np.int64), np.fromiter(by_token.values(), np.float32)
        self.allowed_ids = np.array(sampling.allowed_token_ids, np.int64) if sampling.allowed_token_ids else None
        self.bad_words = BadWords(sampling.bad_words, token_ids[prompt_len:]) if sampling.bad_words else None
        self.grammar = grammar
        self._len = len(token_ids)
        if self.counts is not None:
            self.counts.add(token_ids[:prompt_len], generated=False)
            self.counts.add(token_ids[prompt_len:], generated=True)

    def __len__(self) -> int:
        """Committed tokens, prompt included: the position of the next token."""
        return self._len

    @property
    def num_generated(self) -> int:
        return self._len - self.prompt_len

    @property
    def is_plain(self) -> bool:
        """Whether the next token depends on logits, temperature and seed only."""
        s = self.sampling
        edits = s.edits_logits or self.grammar is not None
        return not self.is_filtered and not edits and self.num_generated >= s.min_tokens

    @property
    def is_filtered(self) -> bool:
        return self.sampling.is_filtered

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds committed tokens."""
        self._len += len(token_ids)
        if self.counts is not None:
            self.counts.add(token_ids, generated=True)
        if self.bad_words is not None:
            self.bad_words.extend(token_ids)
        if self.grammar is not None:
            self.grammar.advance(token_ids)


@dataclass(slots=True, eq=False)
class SampleSpan:
    """The last ``num_rows`` of a request's len(drafts) + 1 rows of logits. Row i predicts position len(state) + i after the
    state's history and drafts[:i]. The sampler finds ``rows`` of its logits and their ``edits``."""

    state: SamplingState
    drafts: tuple[int, ...]
    num_rows: int
    rows: slice = field(init=False)
    edits: Edits | None = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.num_rows <= len(self.drafts) + 1:
            raise ValueError(f"a span with {len(self.drafts)} drafts has no {self.num_rows} rows to sample")

    @property
    def num_before(self) -> int:
        """Drafts before the first sampled row."""
        return len(self.drafts) + 1 - self.num_rows

    @property
    def is_noisy(self) -> bool:
        return self.state.sampling.temperature > 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens chosen for the rows of one span. ``error``: the row after these has no choice: all tokens are masked, its
    logits are not finite, or the grammar refuses what its mask allowed. The error counts only if that row is reached
    (``engine.acceptance``)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # if requested
    confidences: tuple[float, ...] = ()  # if the caller wants them: the probability of each token
    error: str | None = None
    is_refused: bool = False  # the request masks all tokens, by its grammar or by tokens and words that it forbids
    runners_up: tuple[tuple[int, ...], ...] = ()  # of drafters that want them: the next choices at each position, best first


class Sampler:
    """Chooses tokens. Stateless: the state of a request comes with its span. All token ids must be below ``vocab_size``
    (``cluster.message_checks`` checks requests and proposals).

    ``kernel``: chooses among all tokens, on the device and in the dtype of the logits; None: plain torch. ``token_ids``: of
    the columns of the logits, where those of a fused kernel are a part of the vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        kernel: GumbelArgmax | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._num_columns = vocab_size if token_ids is None else len(token_ids)
        self.eos_token_ids = tuple(eos_token_ids)
        self._kernel = kernel

    @torch.inference_mode()
    def choose(self, logits: Tensor, spans: Sequence[SampleSpan], want_confidences: bool = False) -> list[Chosen]:
        """One ``Chosen`` per span. Raises ValueError: the rows or columns do not fit the spans or the vocabulary.

        Args:
            logits: (sum of num_rows, V or more), in the order of the spans; not modified. Columns past the vocabulary
                (padding) are ignored.
            want_confidences: fill ``Chosen.confidences``, temperature 1 for greedy requests.
        """
        picks = self._picks(logits, spans, want_confidences)
        end_in_time(spans, picks.token_ids)
        chosen = chosen_of(spans, picks, _raw_logprobs(logits, self.vocab_size, spans, picks))
        return [_fitting(span, one) for span, one in zip(spans, chosen, strict=True)]

    def gathered(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary, (rows, V)."""
        return logits[:, : self.vocab_size]

    def _picks(self, logits: Tensor, spans: Sequence[SampleSpan], want_confidences: bool) -> "Picks":
        num_rows, num_columns = place(spans), self._num_columns
        if logits.dim() != 2 or len(logits) != num_rows or logits.shape[1] < num_columns:
            raise ValueError(f"logits {tuple(logits.shape)} do not fit {num_rows} rows of {num_columns} tokens")
        for span in spans:
            span.edits = self._edits(span)
        if isinstance(self._kernel, FusedSampling) and spans:
            found = self._kernel.choose(
                logits, spans, keys_of(spans), temperatures_of(spans), want_confidences=want_confidences
            )
            return Picks(found.token_ids, found.highest, found.confidences if want_confidences else None)
        logits = logits[:, :num_columns]
        picks = Picks(
            np.full(num_rows, num_columns), np.full(num_rows, np.nan), np.zeros(num_rows) if want_confidences else None
        )
        kernel = None if want_confidences else self._kernel
        for edited in (False, True):
            for noisy in (False, True) if kernel is None else (None,):
                alike = [m for m in spans if (m.edits is not None) == edited and noisy in (None, m.is_noisy)]
                if alike:
                    _pick(logits, alike, picks, kernel)
        return picks

    def _edits(self, span: SampleSpan) -> Edits | None:
        state, sampling = span.state, span.state.sampling
        masked_ids = sampling.stop_token_ids if sampling.ignore_eos else (*self.eos_token_ids, *sampling.stop_token_ids)
        masked_ids = tuple(token_id for token_id in masked_ids if token_id < self.vocab_size)
        num_masked_rows = 0
        if masked_ids:
            num_masked_rows = min(span.num_rows, max(0, sampling.min_tokens - state.num_generated - span.num_before))
        masks = None
        if state.grammar is not None:  # the grammar's end comes before min_tokens
            masks = state.grammar.masks(span.drafts, span.num_before, masked_ids, num_masked_rows)
            num_masked_rows = 0
        if not sampling.edits_logits and not num_masked_rows and masks is None:
            return None
        bad = None if state.bad_words is None else state.bad_words.completing(span.drafts, span.num_rows)
        return Edits(
            sampling, state.counts, state.bias, span.drafts, masked_ids, num_masked_rows, state.allowed_ids, bad, masks
        )


@dataclass(frozen=True, slots=True)
class Picks:
    """Per row, (N,): the token, the largest logit (not finite: no choice) and, on request, the token's probability."""

    token_ids: NDArray[np.int64]
    highest: NDArray[np.float64]
    confidences: NDArray[np.float64] | None


def place(spans: Sequence[SampleSpan]) -> int:
    """Sets the rows of each span in the logits of all. Returns their number."""
    num_rows = 0
    for span in spans:
        span.rows = slice(num_rows, num_rows := num_rows + span.num_rows)
    return num_rows


def _pick(logits: Tensor, members: Sequence[SampleSpan], picks: Picks, kernel: GumbelArgmax | None) -> None:
    """Chooses for the rows of one group and writes ``picks``. The kernel takes rows with and without noise together."""
    is_all = sum(member.num_rows for member in members) == len(logits)
    rows: slice | NDArray[np.int64] = slice(None)
    x = logits
    if not is_all:
        rows = np.concatenate([np.arange(member.rows.start, member.rows.stop) for member in members])
        x = logits[to_device(rows, logits.device)]
    if members[0].edits is not None:
        x = x.to(torch.float32, copy=is_all)
        for own_rows, member in zip(x.split([member.num_rows for member in members]), members, strict=True):
            if member.edits is not None:
                edit(own_rows, member.edits)
    if kernel is not None:
        picks.token_ids[rows], picks.highest[rows] = _by_kernel(x, members, kernel)
        return
    at = peaks(x)
    temperatures = torch.ones_like(at.rows)
    floor = None
    if members[0].is_noisy:
        temperatures = to_device(temperatures_of(members), x.device)
        floor = floors(x, at, temperatures, _filters(members))
        token_ids = gumbel_argmax(x, at, temperatures, floor, to_device(keys_of(members), x.device))
    else:
        token_ids = greedy(x, at)
    columns = [token_ids.double(), at.rows.double()]
    if picks.confidences is not None:
        columns.append(probabilities(x, at, temperatures, floor, token_ids).double())
    found = torch.stack(columns).cpu().numpy()  # one copy from the device for the whole group
    picks.token_ids[rows], picks.highest[rows] = found[:2]
    if picks.confidences is not None:
        picks.confidences[rows] = found[2]


def _by_kernel(
    x: Tensor, members: Sequence[SampleSpan], kernel: GumbelArgmax
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    temperatures = temperatures_of(members)
    if not temperatures.any():
        return kernel(x, np.zeros(len(x), np.int64), temperatures)
    floor = None
    if any(member.is_noisy and member.state.is_filtered for member in members):
        tempered = torch.from_numpy(np.where(temperatures > 0, temperatures, np.float32(1.0)))
        floor = floors(x, peaks(x), tempered, _filters(members)).numpy()
    return kernel(x, keys_of(members), temperatures, floor)


def temperatures_of(members: Sequence[SampleSpan]) -> NDArray[np.float32]:
    return _by_row(members, lambda s: s.temperature, np.float32)


def _filters(members: Sequence[SampleSpan]) -> Filters:
    return Filters.of([member.state.sampling for member in members], [member.num_rows for member in members])


def _by_row(members: Sequence[SampleSpan], value: Callable[[SamplingParams], Any], dtype: type) -> NDArray[Any]:
    return np.repeat(np.array([value(member.state.sampling) for member in members], dtype), [m.num_rows for m in members])


def keys_of(members: Sequence[SampleSpan]) -> NDArray[np.int64]:
    firsts = [len(member.state) + member.num_before for member in members]
    positions = np.concatenate([np.arange(n, n + m.num_rows) for n, m in zip(firsts, members, strict=True)])
    return noise_keys(_by_row(members, lambda s: s.seed, np.uint64), positions)


def _raw_logprobs(logits: Tensor, vocab_size: int, members: Sequence[SampleSpan], picks: Picks) -> dict[int, TokenLogprobs]:
    """Logprobs by row, where requested."""
    asking = [(m, m.state.sampling.top_logprobs) for m in members]
    num_top = {row: num for m, num in asking if num is not None for row in range(m.rows.start, m.rows.stop)}
    if not num_top:
        return {}
    rows = np.fromiter(num_top, np.int64)
    asked = logits[:, :vocab_size].index_select(0, to_device(rows, logits.device))
    found = token_logprobs(asked, picks.token_ids[rows], list(num_top.values()))
    return dict(zip(num_top, found, strict=True))


def end_in_time(members: Sequence[SampleSpan], token_ids: NDArray[np.int64]) -> None:
    """Replaces tokens, (N,), so that outputs with a grammar end within max_tokens (`engine.grammar.state`)."""
    for member in members:
        state = member.state
        if state.grammar is not None:
            num_left = state.sampling.max_tokens - state.num_generated
            chosen = state.grammar.end_in_time(member.drafts, member.num_before, token_ids[member.rows].tolist(), num_left)
            token_ids[member.rows] = chosen


def chosen_of(members: Sequence[SampleSpan], picks: Picks, logprobs: dict[int, TokenLogprobs]) -> list[Chosen]:
    """One ``Chosen`` per span."""
    if not logprobs and picks.confidences is None and np.isfinite(picks.highest).all():
        token_ids = picks.token_ids.tolist()
        return [Chosen(tuple(token_ids[member.rows])) for member in members]
    return [_chosen(member, picks, logprobs) for member in members]


def _chosen(member: SampleSpan, picks: Picks, logprobs: dict[int, TokenLogprobs]) -> Chosen:
    rows = range(member.rows.start, member.rows.stop)
    highest, error = picks.highest[member.rows], None
    if not np.isfinite(highest).all():
        i = int(np.isfinite(highest).argmin())
        position = len(member.state) + member.num_before + i
        why = "every token is masked" if highest[i] == -np.inf else f"its logits hold {highest[i]}"
        error, rows = f"no token can be chosen at position {position}: {why}", rows[:i]
    kept = slice(rows.start, rows.stop)
    confidences = () if picks.confidences is None else tuple(picks.confidences[kept].tolist())
    of_rows = tuple(logprobs[row] for row in rows if row in logprobs)
    is_refused = error is not None and highest[len(rows)] == -np.inf
    return Chosen(tuple(picks.token_ids[kept].tolist()), of_rows, confidences, error, bool(is_refused))


def _fitting(span: SampleSpan, chosen: Chosen) -> Chosen:
    """Without the tokens from the first on that a grammar refuses although its mask allowed it: a defect, which ends this
    request alone."""
    grammar = span.state.grammar
    if grammar is None:
        return chosen
    num_reached = common_prefix_len(span.drafts[span.num_before :], chosen.token_ids) + 1
    refused = grammar.first_refused((*span.drafts[: span.num_before], *chosen.token_ids[:num_reached]))
    if refused is None or refused < span.num_before:
        return chosen
    row, asked = refused - span.num_before, grammar.grammar.grammar
    error = (
        f"the grammar refuses token {chosen.token_ids[row]} at position {len(span.state) + refused}, which its mask allows"
    )
    logger.error("the sampler met a defect: %s; %s grammar: %.2000s", error, asked.kind, asked.source)
    return Chosen(chosen.token_ids[:row], chosen.logprobs[:row], chosen.confidences[:row], error)
