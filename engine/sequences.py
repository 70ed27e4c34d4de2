"""The live requests of one target: their committed tokens, what is drafted for them, and when they end."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cluster.types import Commit, FinishReason, ModelInfo, Prefill, Request
from engine.draft_state import DraftState
from engine.predicted_output import PredictedOutput
from router.cost_model import Floats
from router.drafting.ranking import DraftsAtHand
from router.estimates.survival import SurvivalRows
from router.plan import SequenceView, SloProgress, Span

MAX_SCORED = 1024  # prompt tokens whose log-probabilities one commit holds

_NO_SPAN = Span("", 0)

if TYPE_CHECKING:
    from engine.grammar.compiling import CompiledGrammar
    from engine.outbox import GatewayOutbox


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A request under way. ``token_ids[:computed_len]`` are in the target's cache."""

    request: Request
    token_ids: list[int]
    stop_token_ids: frozenset[int] = frozenset()  # end of sequence included, where it ends the request
    computed_len: int = 0
    cached_len: int = 0  # while it waits: its first tokens that the prefix cache held when it was asked last
    running: bool = False
    arrived_s: float = 0.0  # at this target
    first_token_s: float | None = None  # when it was committed
    admitted_s: float | None = None  # when its first pass began; None: still queued
    awaits_grammar: bool = False  # it is compiled now; until then the request is not planned
    awaits_adapter: bool = False  # as awaits_grammar: its files are read now
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache held then
    # Of the last pass that chose tokens for it, or failed to, until that is published.
    span: Span = field(default_factory=lambda: _NO_SPAN)
    finish: FinishReason | None = None
    num_prompt_logprobs: int = 0  # prompt tokens whose log-probabilities are published
    gateway: "GatewayOutbox | None" = None  # by which it came; its commits go there

    # Derived from the request; each round reads them several times.
    prompt_len: int = field(init=False)
    end_len: int = field(init=False)  # committed length at which max_tokens is reached
    last_len: int = field(init=False)  # and at which that or the model's context is
    teaches: bool = field(init=False)
    has_slo: bool = field(init=False)
    draft: DraftState = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_token_ids)
        self.end_len = self.prompt_len + self.request.sampling.max_tokens
        self.last_len = self.end_len
        self.teaches = self.request.teaches
        self.has_slo = self.request.slo.ttft_s is not None or self.request.slo.tpot_s is not None
        predicted = () if self.request.chain == () else self.request.prediction_token_ids
        prediction = PredictedOutput(predicted, self.request.output_token_ids) if predicted else None
        self.draft = DraftState(self.token_ids, self.prompt_len, prediction=prediction)

    @property
    def max_new_tokens(self) -> int:
        return self.end_len - len(self.token_ids)

    def follow(self, grammar: "CompiledGrammar") -> None:
        """Its grammar is compiled, so that it may be planned."""
        self.awaits_grammar = False
        drafts = self.request.chain != ()
        self.draft.follow(grammar.follow(self.token_ids[self.prompt_len :]), drafts)

    def admit(self, num_cached_tokens: int, now_s: float) -> None:
        """A pass begins with it. Only the first admission is timed: later ones follow a preemption."""
        self.computed_len, self.cached_len = num_cached_tokens, 0
        self.running = True
        if self.admitted_s is None:
            self.admitted_s = now_s
            self.num_cached_tokens = num_cached_tokens

    def preempt(self) -> None:
        """Its blocks are given up. The committed tokens stay, and are computed again later."""
        self.computed_len = 0
        self.running = False
        self.draft.preempt()

    def prefill(self, now_s: float) -> Prefill:
        """For its first commit, made now. Raises AssertionError for a request that was never admitted."""
        assert self.admitted_s is not None
        return Prefill(self.num_cached_tokens, self.admitted_s - self.arrived_s, now_s - self.admitted_s)

    def committed(self) -> Commit:
        """What `Sequences.commit` took last."""
        span, judged, first_s, num = self.span, self.draft.judged, self.first_token_s, len(self.span.chosen)
        base_len, drafter = len(self.token_ids) - num, None if judged is None else judged[0].drafter
        if span.error is not None:
            return Commit(span.request_id, base_len, (), finish=self.finish, error=span.error)
        counts, logprobs = (span.num_drafts, min(span.num_accepted, num)), span.logprobs[:num]
        prefill = self.prefill(first_s) if base_len == self.prompt_len and first_s is not None else None
        return Commit(span.request_id, base_len, span.chosen, *counts, drafter, logprobs, self.finish, None, prefill)

    def forget_pass(self) -> None:
        """Frees the objects of the last commit once it is published, so that the next pass need not before its launch."""
        self.span = _NO_SPAN
        self.draft.forget_judged()

    def view(self) -> SequenceView:
        draft = self.draft
        proposal = draft.proposal
        committed_len = len(self.token_ids)
        return SequenceView(
            self.request.id,
            committed_len,
            self.computed_len,
            0 if proposal is None else len(proposal.token_ids),
            self.running,
            draft.drafter,
            draft.awaiting_since_s,
            self.end_len - committed_len,
            () if proposal is None else draft.survival,
            draft.committed_s,
            self.arrived_s,
            self._slo_progress(committed_len) if self.has_slo else None,
            self.cached_len,
        )

    def _slo_progress(self, committed_len: int) -> SloProgress:
        slo, first_token_s = self.request.slo, self.first_token_s
        first_due_s = None if slo.ttft_s is None or first_token_s is not None else self.arrived_s + slo.ttft_s
        return SloProgress(first_due_s, slo.tpot_s, first_token_s, committed_len - self.prompt_len)


@dataclass(slots=True)
class Sequences:
    """All live requests in order of arrival."""

    model: ModelInfo
    _live: dict[str, LiveSequence] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._live.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __getitem__(self, request_id: str) -> LiveSequence:
        return self._live[request_id]

    def get(self, request_id: str) -> LiveSequence | None:
        return self._live.get(request_id)

    def snapshot(self) -> tuple[LiveSequence, ...]:
        """For readers on other threads: the copy is one step of the interpreter."""
        return tuple(self._live.values())

    @property
    def num_running(self) -> int:
        return len([None for s in self._live.values() if s.running])

    def waiting(self) -> list[LiveSequence]:
        """For their first pass, or after a preemption."""
        return [s for s in self._live.values() if not (s.running or s.awaits_grammar or s.awaits_adapter)]

    def add(self, request: Request, now_s: float = 0.0) -> LiveSequence:
        sampling = request.sampling
        ignores_eos = sampling.ignore_eos and sampling.grammar is None  # the end of a grammar ends the request
        stops = frozenset(sampling.stop_token_ids).union(() if ignores_eos else self.model.eos_token_ids)
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        sequence = LiveSequence(request, token_ids, stops, arrived_s=now_s)
        sequence.last_len = min(sequence.end_len, self.model.max_model_len)
        if request.output_token_ids:  # as if its tokens had come in time: this target knows no other times of them
            sequence.first_token_s = now_s - (request.slo.tpot_s or 0.0) * len(request.output_token_ids)
        self._live[request.id] = sequence
        return sequence

    def remove(self, request_id: str) -> LiveSequence | None:
        return self._live.pop(request_id, None)

    def views(self) -> list[SequenceView]:
        return [s.view() for s in self._live.values() if not (s.awaits_grammar or s.awaits_adapter)]

    def drafts_at_hand(self, max_verify_len: int) -> DraftsAtHand | None:
        """``max_verify_len``: of one proposal. None: some request does more than decode, or awaits its proposal, or its
        survival is not known."""
        request_ids: list[str] = []
        lens: list[int] = []
        rows: SurvivalRows | None = None  # in which most proposals have their survival
        places: list[int] = []
        apart: dict[int, tuple[float, ...]] = {}  # survival of the others
        for request_id, sequence in self._live.items():
            draft, length = sequence.draft, len(sequence.token_ids)
            if length - sequence.computed_len != 1 or draft.awaiting_since_s is not None or not sequence.running:
                if sequence.awaits_grammar or sequence.awaits_adapter:
                    continue
                return None
            num, place, proposal, own = 0, 0, draft.proposal, draft.survival_rows
            if proposal is not None:
                num = min(len(proposal.token_ids), sequence.last_len - 1 - length, max_verify_len)
                if own is not None and not draft.num_behind and (own is rows or rows is None):
                    rows, place = own, draft.survival_row
                elif len(survival := draft.survival) < num:
                    return None
                else:
                    apart[len(lens)] = survival
            request_ids.append(request_id)
            lens.append(num)
            places.append(place)
        return DraftsAtHand(request_ids, lens, _gathered(None if rows is None else rows.values, places, apart, lens))

    def bind(self, spans: Iterable[Span]) -> None:
        """Sets the tokens of planned spans. A cached prefix may have shortened what is left to compute since the plan."""
        live = self._live
        for span in spans:
            sequence = live[span.request_id]
            token_ids, start = sequence.token_ids, sequence.computed_len
            end = start + span.num_compute
            span.base_len = start
            if end < len(token_ids):
                span.token_ids, span.num_drafts, span.samples = tuple(token_ids[start:end]), 0, False
                continue
            proposal, num = sequence.draft.proposal, span.num_drafts
            drafts = proposal.token_ids[:num] if proposal is not None and num else ()
            span.num_compute, span.num_drafts = len(token_ids) - start, len(drafts)
            span.token_ids = (token_ids[start], *drafts) if span.num_compute == 1 else (*token_ids[start:], *drafts)

    def prompt_commits(self, span: Span) -> list[Commit]:
        """Log-probabilities of prompt tokens that are not published yet: a pass after a preemption computes some again."""
        sequence = self._live[span.request_id]
        new = span.prompt_logprobs[sequence.num_prompt_logprobs + 1 - span.scored_from :]
        sequence.num_prompt_logprobs += len(new)
        return [
            Commit(span.request_id, sequence.prompt_len, (), prompt_logprobs=new[start : start + MAX_SCORED])
            for start in range(0, len(new), MAX_SCORED)
        ]

    def commit(self, span: Span, now_s: float) -> LiveSequence | None:
        """Takes the tokens that a pass chose and judges the proposal. None for a prefill chunk. Tokens beyond a stop token
        or ``max_tokens`` are cut off, of the span too: plain decoding would never have computed them."""
        sequence, chosen = self._live[span.request_id], span.chosen
        if span.error is not None:
            sequence.finish = FinishReason.REFUSED if span.is_refused else FinishReason.ERROR
            sequence.span, span.chosen = span, ()
            sequence.draft.judge(())
            return sequence
        if not chosen:
            computed_len = span.computed_len
            sequence.computed_len = span.base_len + len(span.token_ids) if computed_len is None else computed_len
            return None
        committed, stops = sequence.token_ids, sequence.stop_token_ids
        base_len, num, finish = len(committed), len(chosen), None
        room = sequence.last_len - base_len
        if num >= room:
            num, finish = room, FinishReason.LENGTH
        if stops and not stops.isdisjoint(chosen[:num]):
            num, finish = 1 + next(i for i, token in enumerate(chosen) if token in stops), FinishReason.STOP
        if finish is not None:
            span.chosen = chosen = chosen[:num]
        sequence.span, sequence.finish = span, finish
        committed.extend(chosen)
        sequence.computed_len = base_len + num - 1
        if base_len == sequence.prompt_len:
            sequence.first_token_s = now_s
        sequence.draft.judge(chosen)
        return sequence


def _gathered(
    rows: Floats | None, places: Sequence[int], apart: Mapping[int, tuple[float, ...]], lens: Sequence[int]
) -> Floats:
    """As of `DraftsAtHand`."""
    width = max(lens, default=0)
    if rows is not None and rows.shape[1] >= width:
        values = rows.take(places, axis=0)
    else:
        values = np.zeros((len(lens), width))
        if rows is not None:
            values[:, : rows.shape[1]] = rows[places]
    for i, survival in apart.items():
        values[i, : lens[i]] = survival[: lens[i]]
    if sum(lens) < values.size:
        values[np.arange(values.shape[1]) >= np.array(lens)[:, None]] = -1.0
    return values
