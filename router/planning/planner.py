"""Plans a target pass: which sequences are computed, how much of each proposal is verified, which requests are held.

Which requests a pass takes, and which wait for their proposals, is a policy of `router/drafting/overlap.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter
from typing import Protocol, Self

from cluster.config import Config
from router.cost_model import CostModel
from router.drafting.policies import OVERLAP_POLICIES, VERIFICATION_POLICIES
from router.drafting.verification import MIN_CHUNK_LEN, VerifyContext
from router.plan import NO_PROMPTS, Capacity, DrafterView, PromptRows, SequenceView, Span, StepPlan
from router.planning.slo import NO_LIMITS, RoundLimits, by_deadline, round_limits

MAX_CHUNK_S = 2.0  # that the prompt tokens of a pass may add, by the cost model: streams must not stall
_ID, _SLO, _SURVIVAL = attrgetter("request_id"), attrgetter("slo"), attrgetter("survival")


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """``max_chunk_len``: prompt tokens of a pass that also decodes; a long prompt must not stall streams."""

    verification: str = "outrider"
    max_hold_s: float = 0.05
    max_chunk_len: int = 256
    overlap: str = "gain"


class Planner(Protocol):
    def plan(
        self,
        sequences: Sequence[SequenceView],
        drafters: Mapping[str, DrafterView],
        capacity: Capacity,
        cost: CostModel,
        now_s: float,
    ) -> StepPlan:
        """The next plan. ``sequences`` in order of arrival."""


class StepPlanner:
    """Holds by expected gain, decodes before it prefills, and preempts the youngest when blocks run out."""

    def __init__(self, settings: PlannerSettings | None = None) -> None:
        self._settings = settings or PlannerSettings()
        self.ranks_drafts = self._settings.verification == "outrider"  # the likeliest of all requests are verified
        self._verification = VERIFICATION_POLICIES[self._settings.verification]()
        self._overlap = OVERLAP_POLICIES[self._settings.overlap](self._settings.max_hold_s)

    @classmethod
    def of(cls, config: Config) -> "StepPlanner":
        planner = config.planner
        return cls(PlannerSettings(planner.verify, planner.max_hold_ms / 1e3, config.target.longest_chunk, planner.overlap))

    def plan(
        self,
        sequences: Sequence[SequenceView],
        drafters: Mapping[str, DrafterView],
        capacity: Capacity,
        cost: CostModel,
        now_s: float,
    ) -> StepPlan:
        running = [s for s in sequences if s.running]
        decoding = [s for s in running if s.committed_len - s.computed_len == 1]
        # Usually every sequence decodes: then there is nothing to sort.
        prefilling = [s for s in running if s.num_left > 1] if len(decoding) < len(running) else []
        waiting = [s for s in sequences if not s.running] if len(running) < len(sequences) else []
        has_slo = any(map(_SLO, sequences))
        if has_slo:
            waiting = by_deadline(waiting, now_s)
        admissible = waiting[: max(0, capacity.max_num_sequences - len(running))]
        num_remaining = sum([s.num_left for s in (*prefilling, *admissible)])
        # A pass that prompts fill is long: who misses it for a late draft may miss the objective. Then every pass waits.
        prompt_rows = NO_PROMPTS if has_slo else self._prompt_rows(num_remaining, capacity)
        start = self._overlap.start(decoding, drafters, cost, now_s, prompt_rows)
        ready, held = start.ready, start.held
        none = StepPlan(spans=(), held=held, frontiers=start.frontiers, num_micro_batches=start.num_micro_batches)
        if held and not ready and not prefilling and not waiting:
            return replace(none, wake_s=min(held.values()))
        if start.wake_s is not None:
            return replace(none, wake_s=start.wake_s)
        blocks = _Blocks(capacity)
        survivors, preempted = _make_room(ready, running, blocks)
        limits = NO_LIMITS
        prompts = prefilling + waiting
        if has_slo:
            prompts = by_deadline(prompts, now_s)
            limits = self.limits(decoding, prompts, cost, now_s)
        num_context = prompts[0].computed_len + prompts[0].cached_len if prompts else 0  # that the next chunk attends to
        num_prompt_tokens = capacity.max_pass_tokens - len(survivors)
        if survivors or held:  # streams are live
            num_prompt_tokens = min(num_prompt_tokens, max(self._settings.max_chunk_len, limits.num_due_tokens))
        if prompts:
            num_prompt_tokens = min(num_prompt_tokens, num_remaining)
            num_prompt_tokens = max_chunk_len(num_prompt_tokens, num_context, cost, min(MAX_CHUNK_S, limits.chunk_s))
        else:
            num_prompt_tokens = 0
        rows = self._verification.rows(
            survivors,
            VerifyContext(
                drafters, capacity, cost, now_s, num_prompt_tokens, *limits.of_pass(), num_prompt_context=num_context
            ),
        )
        decode = _decode_spans(survivors, rows.verify_lens, blocks, followed=bool(prompts))
        verified = [span.num_drafts for span in decode]
        num_rows = len(decode) + sum(verified)
        num_prompt_tokens = min(capacity.max_pass_tokens - num_rows, rows.num_prompt_tokens)
        if num_prompt_tokens and decode and limits.limit_s is not None:  # not every policy regards both together
            left_s = limits.limit_s - cost.step_s(num_rows, sum(s.committed_len for s in survivors))
            num_prompt_tokens = max_chunk_len(num_prompt_tokens, num_context, cost, max(0.0, left_s))
        if preempted:
            prompts = [s for s in prompts if s.running and s.request_id not in preempted]
        prefill, admitted = _prefill_spans(
            prompts, num_prompt_tokens, capacity.max_num_sequences - len(running) + len(preempted), blocks
        )
        if not decode and not prefill and not preempted and not held and len(running) > 1:
            preempted = [running[-1].request_id]  # half-computed prompts hold all blocks
        held = {request_id: until_s for request_id, until_s in held.items() if request_id not in preempted}
        spans = (*decode, *prefill)
        proposals = map(_SURVIVAL, survivors)
        left_out = [survival[num] for survival, num in zip(proposals, verified, strict=True) if len(survival) > num]
        return replace(
            none,
            spans=spans,
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            held=held,
            num_prompt_tokens_left=num_remaining - sum([span.num_compute for span in prefill]),
            best_left_out=max(left_out, default=0.0),
        )

    def fork(self) -> Self:
        """A planner whose policies know the same, and then learn for themselves."""
        other = copy(self)
        other._verification, other._overlap = copy(self._verification), copy(self._overlap)
        return other

    def limits(
        self,
        decoding: Sequence[SequenceView],
        prompts: Sequence[SequenceView],
        cost: CostModel,
        now_s: float,
    ) -> RoundLimits:
        """What objectives leave a pass: arguments as of `round_limits`."""
        return round_limits(decoding, prompts, cost, now_s)

    def _prompt_rows(self, num_remaining: int, capacity: Capacity) -> PromptRows:
        if not num_remaining:
            return NO_PROMPTS
        longest = min(self._settings.max_chunk_len, capacity.max_pass_tokens)
        now = min(longest, num_remaining)
        return PromptRows(now, min(longest, num_remaining - now))


def max_chunk_len(num_tokens: int, num_context: int, cost: CostModel, max_s: float = MAX_CHUNK_S) -> int:
    """The most of ``num_tokens`` prompt tokens that add at most ``max_s`` to a pass of one row; at least MIN_CHUNK_LEN.
    ``num_context``: tokens of the prompt before them."""
    low, high = min(MIN_CHUNK_LEN, num_tokens), num_tokens
    limit_s = cost.prefill_s(1, num_context) + max_s
    while low < high:  # more rows never make a pass faster
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.prefill_s(middle, num_context) <= limit_s else (low, middle - 1)
    return low


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
