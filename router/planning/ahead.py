"""The plan of the next pass, made from expected lengths beside the present pass, and corrected by what that commits."""

from collections.abc import Sequence
from dataclasses import replace

from cluster.types import record
from router.drafting.ranking import DraftsAtHand
from router.drafting.verification import PassContext
from router.plan import Capacity, SequenceView, Span, StepPlan
from router.planning.planner import Planner

FEWEST = 16  # requests: with fewer, drafts differ too much from those of the pass before, and a plan takes little time


@record
class _Expected:
    """A pass in which all of these requests decode. ``num_verify`` of their ``num_drafted`` draft tokens are verified.
    ``planner``: in the state behind the plan."""

    spans: dict[str, Span]  # by request
    num_drafted: int
    num_verify: int
    planner: Planner


class PlanAhead:
    """Plans passes by a planner. ``expect`` is called beside a pass. A plan that is corrected verifies as many draft tokens
    as the expected one, the likeliest of those at hand. It is made anew, from the planner's state before the expected one,
    where more has changed than lengths and proposals: a request arrived or waits for its proposal, blocks are short, or the
    drafts are half as many or twice as many; and where the planner does not fork."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._expected: _Expected | None = None

    def expect(self, plan: StepPlan, sequences: Sequence[SequenceView], context: PassContext) -> None:
        """``plan``: of the present pass, made of the other arguments."""
        self._planner.search()
        if plan.is_empty:  # requests are held, and the pass that was expected is still to come
            return
        self._expected = None
        if not FEWEST <= len(plan.spans) == len(sequences):
            return
        if any(s.slo is not None or s.num_left > 1 for s in sequences):
            return
        planner = self._planner.fork()
        if planner is None:
            return
        num_verified = {span.request_id: span.num_drafts for span in plan.spans}
        expected = [_after(s, num_verified[s.request_id]) for s in sequences]
        ahead = planner.plan(expected, context)
        if len(ahead.spans) == len(expected) and not ahead.frontiers and ahead.num_micro_batches == 1:
            num_verify = sum([span.num_drafts for span in ahead.spans])
            num_drafted = sum([s.num_drafted for s in sequences])
            spans = {span.request_id: span for span in ahead.spans}
            self._expected = _Expected(spans, num_drafted, num_verify, planner)

    @property
    def expects(self) -> bool:
        return self._expected is not None

    def correct(self, drafts: DraftsAtHand, capacity: Capacity) -> StepPlan | None:
        """The expected plan, corrected. None: it must be made anew."""
        expected, num = self._expected, len(drafts.request_ids)
        if expected is None or not num:
            return None
        try:
            spans = tuple([expected.spans[request_id] for request_id in drafts.request_ids])
        except KeyError:
            return None
        num_drafted, usual = sum(drafts.lens), expected.num_drafted * num / len(expected.spans)
        if not usual <= 2 * num_drafted <= 4 * usual:
            return None
        # Requests that have ended take their share along.
        share = expected.num_verify * num // len(expected.spans)
        num_verify = min(share, num_drafted, max(0, capacity.max_pass_tokens - num))
        if num + num_verify // capacity.block_len > capacity.num_free_blocks:
            return None
        self._planner, self._expected = expected.planner, None
        lens, best_left_out = drafts.likeliest(num_verify)
        for span, num_drafts in zip(spans, lens, strict=True):
            span.num_drafts = num_drafts
        return StepPlan(spans, best_left_out=best_left_out)

    def plan(self, sequences: Sequence[SequenceView], context: PassContext) -> StepPlan:
        """A new plan."""
        return self._planner.plan(sequences, context)


def _after(sequence: SequenceView, num_verified: int) -> SequenceView:
    """The request behind a pass that verifies so many draft tokens, with as likely ones at hand."""
    num = min(sequence.max_new_tokens - 1, 1 + round(sum(sequence.survival[:num_verified])))
    length = sequence.committed_len + num
    left = sequence.max_new_tokens - num
    behind = replace(sequence, committed_len=length, computed_len=length - 1, max_new_tokens=left, awaiting_since_s=None)
    return behind if behind.running else replace(behind, running=True, cached_len=0)  # admitted: its prompt was cached
