"""Which requests a target refuses because their first token would come too late."""

from collections.abc import Sequence
from math import ceil

from cluster.types import record
from router.cost_model import CostModel
from router.drafting.verification import MIN_CHUNK_LEN
from router.estimates.decayed import DecayedMean
from router.plan import Capacity, SequenceView
from router.planning.planner import MAX_CHUNK_S
from router.planning.slo import by_deadline, round_limits


@record
class Load:
    """What a target decodes now."""

    num_decode_rows: int  # of the last pass, drafts included
    departure_s: float | None  # mean time between ends of requests; None: not known yet


@record
class PredictedTtft:
    """Of a new request, in seconds."""

    queue_s: float  # until the pass with its first prompt token
    prefill_s: float  # from then on


def predicted_ttft(
    request: SequenceView, sequences: Sequence[SequenceView], load: Load, capacity: Capacity, cost: CostModel, now_s: float
) -> PredictedTtft:
    """When the first token of ``request`` comes, by the cost model.

    Prompts that are due before it are computed before it, but for what is cached; each pass also decodes. A request that
    finds no free place or too few free blocks waits for as many requests to end as must be admitted up to it. Cached blocks
    count as blocks of its own.

    Args:
        sequences: the live requests, without this one.
    """
    running = [s for s in sequences if s.running]
    decoding = [s for s in running if s.committed_len - s.computed_len == 1]
    order = by_deadline([*(s for s in sequences if s.num_left > 1 or not s.running), request], now_s)
    before = order[: order.index(request)]
    num_context = sum(s.computed_len for s in running)
    decode_s = cost.step_s(max(len(decoding), load.num_decode_rows), num_context) if decoding else 0.0
    max_s = MAX_CHUNK_S
    if decoding:
        limits = round_limits(decoding, (), cost, now_s, 0)
        max_s = min(max_s, max(limits.chunk_s, _added_s(MIN_CHUNK_LEN, cost)))
    num_free_rows = max(1, capacity.max_pass_tokens - len(decoding))

    def passes_s(num_tokens: int) -> float:
        added_s = _added_s(num_tokens, cost)
        num_full = ceil(num_tokens / MIN_CHUNK_LEN)  # a pass computes as many at any price
        num_passes = max(ceil(num_tokens / num_free_rows), min(num_full, ceil(added_s / max_s)) if max_s > 0.0 else num_full)
        return added_s + num_passes * decode_s

    queue_s = passes_s(sum(s.num_left for s in before)) if before else 0.0
    waiting = [*(s for s in before if not s.running), request]
    num_free_places = capacity.max_num_sequences - len(running)
    num_needed = sum(-(-s.committed_len // capacity.block_len) for s in waiting)
    num_awaited = max(len(waiting) - num_free_places, int(num_needed > capacity.num_free_blocks and bool(running)))
    if num_awaited > 0 and load.departure_s is not None:
        queue_s = max(queue_s, num_awaited * load.departure_s)
    return PredictedTtft(queue_s, passes_s(request.num_left))


def exceeds_objective(request: SequenceView, predicted: PredictedTtft, cost: CostModel) -> bool:
    """Whether to refuse: the objective would be missed now, and could be met later. One that even an idle target would miss
    is no reason, since to try again would not help."""
    slo = request.slo
    if slo is None or slo.first_due_s is None:
        return False
    ttft_s = slo.first_due_s - request.arrived_s
    alone_s = cost.prefill_s(request.num_left, 0)
    return alone_s <= ttft_s < predicted.queue_s + predicted.prefill_s


def _added_s(num_tokens: int, cost: CostModel) -> float:
    """By so many prompt tokens to passes."""
    return cost.prefill_s(num_tokens + 1, 0) - cost.prefill_s(1, 0)


class Departures:
    """How often a busy target ends requests."""

    def __init__(self) -> None:
        self._interval = DecayedMean()
        self._last_s: float | None = None

    @property
    def interval_s(self) -> float | None:
        return self._interval.value if self._interval.is_known else None

    def note(self, now_s: float, num_ended: int) -> None:
        if self._last_s is not None:
            for _ in range(num_ended):
                self._interval.add(self._interval.clipped((now_s - self._last_s) / num_ended))
        self._last_s = now_s

    def idle(self) -> None:
        """The time until the next end says nothing."""
        self._last_s = None
