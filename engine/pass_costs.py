"""What a pass computed and took, and what is learned from that: the cost model, the decode rate, the row price, and what
drafting saves and wastes."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Self

from cluster.client import DraftingEffect, DraftsByLoad
from cluster.types import Commit, record
from profiler.online_cost import OnlineCost
from router.cost_model import CostModel
from router.drafting.length import decoding
from router.drafting.value import DecodeRate, DraftingValue, row_price
from router.drafting.verification import PassContext
from router.estimates.decayed import RECENT, DecayedMean
from router.plan import SequenceView, Span
from router.planning.slo import NO_LIMITS, round_limits

_NUM_LOADS = 16  # octaves of requests in a pass


class DraftingMonitor:
    """Owned by the round; other threads may call ``effect``.

    A round lasts until the next one begins. Without drafts, ``n`` requests that commit ``c`` tokens in one pass would take
    ``c / n`` passes of ``n`` rows. The cost model predicts how much shorter such a pass is than the one that was measured:
    a busy machine slows both alike. What a round does beside its pass counts on one side only: the saving is rather
    underestimated.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._decode_s = self._plain_s = self._rejected_s = 0.0
        self._by_load = [(0, 0, 0)] * _NUM_LOADS  # rounds, draft tokens verified, accepted
        self._last: tuple[float, float, float] | None = None  # when the last round began, and its predicted times

    def note(self, began_s: float, pass_s: float, commits: Sequence[Commit], num_rows: int, num_context: int) -> None:
        """A round that began at ``began_s`` only decoded, in a pass of ``pass_s``."""
        self.interrupt(began_s)
        num_requests = len(commits)
        if not num_requests:
            return
        num_tokens = num_proposed = num_accepted = 0
        for commit in commits:
            num_tokens += len(commit.token_ids)
            num_proposed += commit.num_proposed
            num_accepted += commit.num_accepted
        load = min((num_requests - 1).bit_length(), _NUM_LOADS - 1)
        rounds, proposed, accepted = self._by_load[load]
        self._by_load[load] = rounds + num_requests, proposed + num_proposed, accepted + num_accepted
        expected_s = self._cost.step_s(num_rows, num_context)
        plain_share = 1.0  # of the pass, as is `rejected_share`
        if num_rows > num_requests:
            plain_share = self._cost.step_s(num_requests, num_context) / expected_s
        num_rejected = num_proposed - num_accepted
        rejected_share = 1.0 - self._cost.step_s(num_rows - num_rejected, num_context) / expected_s if num_rejected else 0.0
        plain_s = num_tokens / num_requests * plain_share * pass_s
        self._last = began_s, plain_s, max(0.0, rejected_share) * pass_s

    def interrupt(self, end_s: float | None = None) -> None:
        """What comes next is no decoding. ``end_s``: when the last round ended; None: it does not count."""
        if self._last is not None and end_s is not None:
            began_s, plain_s, rejected_s = self._last
            self._decode_s += end_s - began_s
            self._plain_s += plain_s
            self._rejected_s += rejected_s
        self._last = None

    def effect(self) -> DraftingEffect:
        by_load = [DraftsByLoad(2**i, *counts) for i, counts in enumerate(self._by_load) if counts[0]]
        return DraftingEffect(self._decode_s, self._plain_s, self._rejected_s, tuple(by_load))


@record
class PassCounts:
    """Sums over the spans of a pass. Context: the tokens before the rows of a span."""

    num_rows: int
    num_context: int
    num_sampled: int  # spans
    num_sampled_rows: int  # of those spans: the last committed token and the drafts
    num_sampled_context: int
    prompts: frozenset[str]  # requests that compute prompt tokens beyond the last one
    num_prompt_rows: int  # of those requests

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Self:
        num_rows = num_context = num_sampled = num_sampled_rows = num_sampled_context = num_prompt_rows = 0
        prompts = []
        for span in spans:
            base_len, num_drafts = span.base_len, span.num_drafts
            length = span.num_compute + num_drafts
            num_rows += length
            num_context += base_len
            if span.samples:
                num_sampled += 1
                num_sampled_rows += 1 + num_drafts
                num_sampled_context += base_len
                if span.num_compute == 1:
                    continue
            prompts.append(span.request_id)
            num_prompt_rows += length
        sampled = num_sampled, num_sampled_rows, num_sampled_context
        return cls(num_rows, num_context, *sampled, frozenset(prompts), num_prompt_rows)

    def num_decoded(self, commits: Sequence[Commit]) -> int:
        """Tokens committed by requests that only decoded."""
        return sum([len(commit.token_ids) for commit in commits if commit.request_id not in self.prompts])

    def prompts_s(self, cost: CostModel) -> float:
        """The part of the pass that prompts took, by the cost model."""
        if not self.prompts:
            return 0.0
        num_decode_rows = self.num_rows - self.num_prompt_rows
        return cost.step_s(self.num_rows, self.num_context) - cost.step_s(num_decode_rows, self.num_context)


@record
class PlannedBatch:
    """The requests of a plan that decode."""

    num_decoding: int
    plain_s: float  # of a plain pass of them, or of the last plan that had some
    tokens_per_s: float | None  # that they decode; None: there have been none yet


class PassCosts:
    """Corrects the cost model by the passes, if it is one that learns, and prices the rows of the next pass."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._online_cost = cost if isinstance(cost, OnlineCost) else None
        self._decode_rate = DecodeRate()
        self.planned = PlannedBatch(0, 0.0, None)
        self._row_price = DecayedMean(RECENT)
        self.drafting = DraftingMonitor(cost)

    def plan(self, num_decoding: int, num_context: int) -> None:
        """So many requests decode from now on: as fast, over plain decoding, as the last rounds did."""
        if not num_decoding:
            self.planned = replace(self.planned, num_decoding=0)
            return
        plain_s = self._cost.step_s(num_decoding, num_context)
        over_plain = self._decode_rate.over_plain
        self.planned = PlannedBatch(
            num_decoding, plain_s, num_decoding / plain_s * (1.0 if over_plain is None else over_plain)
        )

    def value(
        self, views: Sequence[SequenceView], context: PassContext, num_micro_batches: int, partition: str
    ) -> DraftingValue:
        """Of drafts for the requests of a plan, those that decode from now on. ``partition``: as of `DraftingValue`."""
        ready = decoding(views)
        self.plan(len(ready), sum([view.committed_len for view in ready]))
        has_slo = any(view.slo is not None for view in ready)
        limits = round_limits(ready, (), self._cost, context.now_s) if has_slo else NO_LIMITS
        rates = self.row_price, self.planned.tokens_per_s
        return DraftingValue(self._cost, context.drafters, *rates, num_micro_batches, limits, partition)

    def interrupt(self) -> None:
        """Nothing was wanted: the time until the next pass says nothing of decoding."""
        self._decode_rate.interrupt()
        self.drafting.interrupt()

    def note(
        self, began_s: float, pass_s: float, counts: PassCounts, commits: Sequence[Commit], best_left_out: float
    ) -> None:
        """A round that began at ``began_s`` made these commits with a pass of ``pass_s``. ``best_left_out``: of its plan,
        which was the last that ``plan`` was told of."""
        planned = self.planned
        # A pass with prompts does not correct the model, for their rows are not all sampled.
        if self._online_cost is not None and counts.num_rows and not counts.num_prompt_rows:
            self._online_cost.observe(counts.num_rows, counts.num_context, pass_s)
        if not counts.num_sampled:
            self.interrupt()
            return
        num_tokens, prompts_s = counts.num_decoded(commits), counts.prompts_s(self._cost)
        self._decode_rate.note(began_s, num_tokens, prompts_s, planned.num_decoding, planned.plain_s)
        num_rows, num_context = counts.num_sampled_rows, counts.num_sampled_context
        if counts.prompts:
            self.drafting.interrupt(began_s)
        else:
            self.drafting.note(began_s, pass_s, commits, num_rows, num_context)
        if planned.tokens_per_s is not None:
            price = row_price(planned.tokens_per_s, num_rows, num_context, self._cost, best_left_out)
            self._row_price.add(price)

    @property
    def row_price(self) -> float:
        """In tokens, a mean of the last passes. By the last one alone it would swing where the time of a pass has a knee:
        drafts beyond it make rows expensive, nobody drafts in the next pass, and in the one after it everybody does."""
        return self._row_price.value
