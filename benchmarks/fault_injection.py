"""Faults that drafters and schedulers may cause without changing a request's tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.sampling_params import SamplingParams
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from router.drafting.verification import PassContext
from router.plan import SequenceView, StepPlan
from router.planning.planner import Planner

KEPT_RESIDUES = 3


class TruncatedDrafter:
    """Passes on the first ``num_kept(token_ids)`` tokens of each draft."""

    capabilities = Capabilities()

    def __init__(self, drafter: Drafter, num_kept: Callable[[Sequence[int]], int]) -> None:
        self._drafter = drafter
        self._num_kept = num_kept

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._drafter.open(request_id, token_ids, prompt_len, sampling, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._drafter.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [self._cut(draft) for draft in self._drafter.propose(demands)]

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)

    def check_integrity(self) -> None:
        self._drafter.check_integrity()

    def _cut(self, draft: Draft) -> Draft:
        num_kept = self._num_kept(draft.token_ids)
        return Draft(draft.request_id, draft.token_ids[:num_kept], draft.confidences[:num_kept])


def truncate_by_content(token_ids: Sequence[int]) -> int:
    """Drops a draft from its first token that is a multiple of three. If acceptance were random, the output would contain
    fewer such tokens."""
    return next((i for i, token in enumerate(token_ids) if token % KEPT_RESIDUES == 0), len(token_ids))


class MidRequest(Planner):
    """Wraps a planner and calls ``happen`` once, when a request has at most ``num_left`` tokens left.

    ``happen`` gets the running sequences and returns those to preempt.
    """

    def __init__(
        self, planner: Planner, num_left: int, happen: Callable[[Sequence[SequenceView]], Sequence[SequenceView]]
    ) -> None:
        self._planner = planner
        self._num_left = num_left
        self._happen = happen
        self.has_happened = False

    def plan(self, sequences: Sequence[SequenceView], context: PassContext) -> StepPlan:
        running = [s for s in sequences if s.running]
        if self.has_happened or all(s.max_new_tokens > self._num_left for s in running):
            return self._planner.plan(sequences, context)
        self.has_happened = True
        victims = {s.request_id for s in self._happen(running)}
        others = [s for s in sequences if s.request_id not in victims]
        plan = self._planner.plan(others, context)
        return replace(plan, preempted=(*plan.preempted, *victims))


def every_second(running: Sequence[SequenceView]) -> Sequence[SequenceView]:
    """Selects half of the batch."""
    return running[::2]
