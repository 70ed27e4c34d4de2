"""Plans a target pass: which sequences are computed, how much of each proposal is verified, which requests are held.

Which requests a pass takes, and which wait for their proposals, is a policy of `router/drafting/overlap.py`.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter
from typing import Protocol, Self

from cluster.config import Config
from router.cost_model import CostModel
from router.drafting.overlap import PassStart
from router.drafting.policies import OVERLAP_POLICIES, VERIFICATION_POLICIES
from router.drafting.verification import MIN_CHUNK_LEN, PassContext, PassRows, SearchesBesidePasses
from router.plan import NO_PROMPTS, Capacity, PromptRows, SequenceView, Span, StepPlan
from router.planning.slo import NO_LIMITS, RoundLimits, by_deadline, round_limits

MAX_CHUNK_S = 2.0  # that the prompt tokens of a pass may add, by the cost model: streams must not stall
_ID, _SLO = attrgetter("request_id"), attrgetter("slo")


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """``max_chunk_len``: prompt tokens of a pass that also decodes; a long prompt must not stall streams."""

    verification: str = "outrider"
    max_hold_s: float = 0.05
    max_chunk_len: int = 256
    overlap: str = "gain"


class Planner(Protocol):
    def plan(self, sequences: Sequence[SequenceView], context: PassContext) -> StepPlan:
        """The next plan. ``sequences`` in order of arrival; ``context``: what is known before prompts are chosen."""

    def fork(self) -> "Planner | None":
        """A planner in the same state, that plans ahead of a pass. None, the default: what it verifies depends on more than
        the survival of the draft tokens at hand."""
        return None

    def search(self) -> None:
        """Beside the planned pass: what later plans need of it."""
        return


class StepPlanner:
    """Holds by expected gain, decodes before it prefills, and preempts the youngest when blocks run out."""

    def __init__(self, settings: PlannerSettings | None = None) -> None:
        self._settings = settings or PlannerSettings()
        self._verification = VERIFICATION_POLICIES[self._settings.verification]()
        self._overlap = OVERLAP_POLICIES[self._settings.overlap](self._settings.max_hold_s)

    @classmethod
    def of(cls, config: Config) -> "StepPlanner":
        planner = config.planner
        return cls(PlannerSettings(planner.verify, planner.max_hold_ms / 1e3, config.target.longest_chunk, planner.overlap))

    def fork(self) -> Self | None:
        if self._settings.verification != "outrider":
            return None
        other = copy(self)
        other._overlap = copy(self._overlap)
        return other

    def search(self) -> None:
        if isinstance(self._verification, SearchesBesidePasses):
            self._verification.search()

    def plan(self, sequences: Sequence[SequenceView], context: PassContext) -> StepPlan:
        batch, blocks = _Batch.of(sequences, context.capacity, context.now_s), _Blocks(context.capacity)
        start = self._choose_decoding(batch, context)
        plan = StepPlan((), (), (), start.held, start.wake_s, start.frontiers, start.num_micro_batches)
        if start.wake_s is not None:
            return plan
        ready, preempted = _make_room(start.ready, batch.running, blocks)
        prompts, context = self._choose_prompts(batch, len(ready), bool(ready or start.held), context)
        rows = self._verification.rows(ready, context)
        decode = _decode_spans(ready, rows.verify_lens, blocks, followed=bool(prompts))
        num_tokens = _num_prompt_tokens(decode, ready, rows, context)
        if preempted:
            prompts = [s for s in prompts if s.running and s.request_id not in preempted]
        prefill, admitted = _prefill_spans(prompts, num_tokens, batch.num_places + len(preempted), blocks)
        if not decode and not prefill and not preempted and not start.held and len(batch.running) > 1:
            preempted = [batch.running[-1].request_id]  # half-computed prompts hold all blocks
        return replace(
            plan,
            spans=(*decode, *prefill),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            held={name: until_s for name, until_s in start.held.items() if name not in preempted},
            num_prompt_tokens_left=batch.num_remaining - sum([span.num_compute for span in prefill]),
            best_left_out=best_left_out(ready, [span.num_drafts for span in decode]),
        )

    def _choose_decoding(self, batch: "_Batch", context: PassContext) -> PassStart:
        """Of the decoding requests those that the pass takes, and those that wait for their proposal."""
        # With objectives a pass that prompts fill is long: a request that misses it may miss its objective, so passes wait.
        prompt_rows = NO_PROMPTS if batch.has_slo else self._prompt_rows(batch.num_remaining, context.capacity)
        start = self._overlap.start(batch.decoding, context, prompt_rows)
        is_idle = start.held and not start.ready and not batch.has_prompts
        return replace(start, wake_s=min(start.held.values())) if is_idle else start

    def _choose_prompts(
        self, batch: "_Batch", num_ready: int, is_live: bool, context: PassContext
    ) -> tuple[list[SequenceView], PassContext]:
        """Prompts in their order; and the pass, with the most of their tokens that it may compute and what objectives leave
        it. ``is_live``: requests decode, whose streams a long pass would stall."""
        capacity, cost, limits, prompts = context.capacity, context.cost, NO_LIMITS, batch.prefilling + batch.waiting
        if batch.has_slo:
            prompts = by_deadline(prompts, context.now_s)
            limits = self.limits(batch.decoding, prompts, cost, context.now_s)
        most = min(batch.num_remaining, capacity.max_pass_tokens - num_ready)
        if is_live:
            most = min(most, max(self._settings.max_chunk_len, limits.num_due_tokens))
        before = prompts[0].computed_len + prompts[0].cached_len if prompts else 0  # that the next chunk attends to
        num_tokens = max_chunk_len(most, before, cost, min(MAX_CHUNK_S, limits.chunk_s)) if prompts else 0
        known = context.drafters, capacity, cost, context.now_s
        return prompts, PassContext(*known, num_tokens, *limits.of_pass(), num_prompt_context=before)

    def limits(
        self, decoding: Sequence[SequenceView], prompts: Sequence[SequenceView], cost: CostModel, now_s: float
    ) -> RoundLimits:
        """What objectives leave a pass: arguments as of `round_limits`."""
        return round_limits(decoding, prompts, cost, now_s)

    def _prompt_rows(self, num_remaining: int, capacity: Capacity) -> PromptRows:
        if not num_remaining:
            return NO_PROMPTS
        longest = min(self._settings.max_chunk_len, capacity.max_pass_tokens)
        now = min(longest, num_remaining)
        return PromptRows(now, min(longest, num_remaining - now))


def best_left_out(ready: Iterable[SequenceView], nums_verified: Iterable[int]) -> float:
    """As of `StepPlan`."""
    pairs = zip(ready, nums_verified, strict=True)
    return max([s.survival[num] for s, num in pairs if len(s.survival) > num], default=0.0)


def max_chunk_len(num_tokens: int, num_context: int, cost: CostModel, max_s: float = MAX_CHUNK_S) -> int:
    """The most of ``num_tokens`` prompt tokens that add at most ``max_s`` to a pass of one row; at least MIN_CHUNK_LEN.
    ``num_context``: tokens of the prompt before them."""
    low, high = min(MIN_CHUNK_LEN, num_tokens), num_tokens
    limit_s = cost.prefill_s(1, num_context) + max_s
    while low < high:  # more rows never make a pass faster
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.prefill_s(middle, num_context) <= limit_s else (low, middle - 1)
    return low


def _num_prompt_tokens(decode: Sequence[Span], ready: Sequence[SequenceView], rows: PassRows, context: PassContext) -> int:
    """That the pass computes beside the spans that decode: not every policy regards room and limit for both together."""
    num_rows = len(decode) + sum([span.num_drafts for span in decode])
    num_tokens = min(context.capacity.max_pass_tokens - num_rows, rows.num_prompt_tokens)
    if num_tokens and decode and context.limit_s is not None:
        left_s = context.limit_s - context.cost.step_s(num_rows, sum(s.committed_len for s in ready))
        num_tokens = max_chunk_len(num_tokens, context.num_prompt_context, context.cost, max(0.0, left_s))
    return num_tokens


@dataclass(frozen=True, slots=True)
class _Batch:
    """The requests of a plan, each list in order of arrival; those that wait by deadline, if any has an objective."""

    running: list[SequenceView]
    decoding: list[SequenceView]  # of the running ones
    prefilling: list[SequenceView]
    waiting: list[SequenceView]
    num_places: int  # for more
    num_remaining: int  # prompt tokens of those that have a place
    has_slo: bool

    @classmethod
    def of(cls, sequences: Sequence[SequenceView], capacity: Capacity, now_s: float) -> "_Batch":
        running = [s for s in sequences if s.running]
        decoding = [s for s in running if s.committed_len - s.computed_len == 1]
        # Usually every sequence decodes: then there is nothing to sort.
        prefilling = [s for s in running if s.num_left > 1] if len(decoding) < len(running) else []
        waiting = [s for s in sequences if not s.running] if len(running) < len(sequences) else []
        has_slo = any(map(_SLO, sequences))
        if has_slo:
            waiting = by_deadline(waiting, now_s)
        num_places = capacity.max_num_sequences - len(running)
        num_remaining = sum([s.num_left for s in (*prefilling, *waiting[: max(0, num_places)])])
        return cls(running, decoding, prefilling, waiting, num_places, num_remaining, has_slo)

    @property
    def has_prompts(self) -> bool:
        return bool(self.prefilling or self.waiting)


class _Blocks:
    """Free blocks of the KV cache, less what the plan takes."""

    def __init__(self, capacity: Capacity) -> None:
        self._block_len = capacity.block_len
        self.num_free = capacity.num_free_blocks

    def held_by(self, sequence: SequenceView) -> int:
        return -(-sequence.computed_len // self._block_len)

    def needed(self, sequence: SequenceView, num_tokens: int) -> int:
        return -(-(sequence.computed_len + num_tokens) // self._block_len) - self.held_by(sequence)

    def needed_for_rest(self, sequence: SequenceView) -> int:
        """For all its committed tokens. Cached blocks of a waiting one may be among the free ones: they count as taken."""
        return self.needed(sequence, sequence.committed_len - sequence.computed_len)

    def needed_for_all(self, sequences: Iterable[SequenceView], nums_more: Iterable[int]) -> int:
        """For one token of each sequence and ``nums_more`` more."""
        block_len = self._block_len
        last = block_len - 1
        more = zip(sequences, nums_more, strict=True)
        return sum([((rounded := s.computed_len + last) + 1 + num) // block_len - rounded // block_len for s, num in more])

    def most_needed(self, num_sequences: int, num_more: int) -> int:
        """As ``needed_for_all`` at most: the tokens of a sequence begin one block more than they fill."""
        return num_sequences + num_more // self._block_len

    def fits(self, sequence: SequenceView, num_tokens: int) -> int:
        """The most of num_tokens that the free blocks still hold."""
        slack = self.held_by(sequence) * self._block_len - sequence.computed_len
        return min(num_tokens, slack + self.num_free * self._block_len)

    def take(self, sequence: SequenceView, num_tokens: int) -> None:
        self.num_free -= self.needed(sequence, num_tokens)


def _make_room(
    ready: Sequence[SequenceView], running: Sequence[SequenceView], blocks: _Blocks
) -> tuple[list[SequenceView], list[str]]:
    """Preempts the youngest sequences until one more token of every other ready one has its block."""
    survivors = list(ready)
    preempted: list[str] = []
    if len(survivors) <= blocks.num_free:  # a token takes one block at most
        return survivors, preempted
    by_age = list(running)
    while len(by_age) > 1 and blocks.needed_for_all(survivors, repeat(0, len(survivors))) > blocks.num_free:
        youngest = by_age.pop()
        preempted.append(youngest.request_id)
        blocks.num_free += blocks.held_by(youngest)
        survivors = [s for s in survivors if s is not youngest]
    return survivors, preempted


def _decode_spans(ready: Sequence[SequenceView], verify_lens: Sequence[int], blocks: _Blocks, followed: bool) -> list[Span]:
    """``followed``: spans of prompts come after these, and take of what is left."""
    needed = blocks.most_needed(len(ready), sum(verify_lens))
    if followed or needed > blocks.num_free:
        needed = blocks.needed_for_all(ready, verify_lens)
    if needed <= blocks.num_free:
        blocks.num_free -= needed
        return list(map(Span, map(_ID, ready), repeat(1), verify_lens))
    for sequence in ready:  # committed tokens come before drafts
        blocks.take(sequence, 1)
    spans = []
    for sequence, verify_len in zip(ready, verify_lens, strict=True):
        blocks.num_free += blocks.needed(sequence, 1)
        num_tokens = max(1, blocks.fits(sequence, 1 + verify_len))
        blocks.take(sequence, num_tokens)
        spans.append(Span(sequence.request_id, 1, num_tokens - 1))
    return spans


def _prefill_spans(
    prompts: Sequence[SequenceView], num_free_tokens: int, num_free_places: int, blocks: _Blocks
) -> tuple[list[Span], list[str]]:
    """Chunks of prompts in the given order. New ones are admitted while they fit whole beside what begun ones still need."""
    spans: list[Span] = []
    admitted: list[str] = []
    begun = [s for s in prompts if s.running]
    num_reserved = sum(map(blocks.needed_for_rest, begun))  # of what begun prompts have not taken yet
    num_begun, admits = len(begun), True
    for sequence in prompts:
        needed = blocks.needed_for_rest(sequence)
        if sequence.running:
            num_begun -= 1
            num_reserved -= needed
            num_tokens = blocks.fits(sequence, min(sequence.num_left, num_free_tokens))
        elif admits and num_free_places > len(admitted) and num_free_tokens > 0 and needed <= blocks.num_free - num_reserved:
            num_tokens = min(sequence.num_left, num_free_tokens)
            admitted.append(sequence.request_id)
        elif num_begun:
            admits = False  # in order: a short prompt does not starve a long one
            continue
        else:
            break
        if num_tokens > 0:
            needed -= blocks.needed(sequence, sequence.cached_len + num_tokens)
            blocks.take(sequence, sequence.cached_len + num_tokens)
            num_free_tokens -= num_tokens
            spans.append(Span(sequence.request_id, num_tokens))
        num_reserved += needed
    return spans, admitted
