"""vLLM's scheduler, told by a plan which requests to compute, how many tokens in all, and which drafts to verify."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from router.plan import Span


class PlannedScheduler(Scheduler):
    """Schedules the spans of ``plan``. Blocks, prefix cache and preemption stay vLLM's own."""

    running: list[Any]
    waiting: Any
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan: Mapping[str, Span] = {}
        self.num_spec_tokens = 0  # else a resumed request is padded with placeholders of draft tokens
        self._max_tokens = self.max_num_scheduled_tokens

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        plan, before = self.plan, list(self.running)
        by_name = {request.request_id: request for request in before}
        planned = [by_name[name] for name in plan if name in by_name]  # decodes first, as planned
        self._set_drafts()
        self.running = list(planned)  # vLLM knows no hold of a running request: it does not see the others
        unplanned = [request for request in self.waiting if request.request_id not in plan]
        self.waiting.remove_requests(unplanned)  # a token of theirs would be lost
        num_tokens = sum(len(span.token_ids) for span in plan.values())
        self.max_num_scheduled_tokens = min(num_tokens, self._max_tokens)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = self._max_tokens
            for request in unplanned:
                self.waiting.add_request(request)
            left, known = set(map(id, self.running)), set(map(id, before))
            admitted = [request for request in self.running if id(request) not in known]
            hidden = set(map(id, before)) - set(map(id, planned))
            self.running = [r for r in before if id(r) in hidden or id(r) in left] + admitted
        return output

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *cached: int) -> int:
        """Less than a block: vLLM waits for a pass with room for one, but the next plan may give the prompt no more."""
        planned, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, num_new_tokens
        split: int = super()._mamba_block_aligned_split(request, num_new_tokens, *cached)
        self.max_num_scheduled_tokens = planned
        return split

    def _set_drafts(self) -> None:
        """Every planned request gets the drafts of its span, or none: those of an earlier plan would be stale."""
        decoding = [r.request_id for r in self.running if r.request_id in self.plan]
        drafts = [list(self.plan[request_id].drafts) for request_id in decoding]
        self.update_draft_token_ids(DraftTokenIds(decoding, drafts))
