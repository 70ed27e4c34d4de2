"""A target replica as the simulator sees it: the round of `engine.round.TargetLoop` with lengths in the place of tokens.

Mail, plan, one pass, and the word spread of what it committed. The planner, whom it takes (`router.admission`) and what it
learns of drafters (`router.estimates.drafter_stats`) are those of the live round.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.types import FinishReason, RoutingTable
from router.admission import refusal
from router.assignment import Chain, RequestView
from router.cost_model import CostModel
from router.estimates.decayed import ema
from router.estimates.drafter_stats import DrafterStats
from router.plan import Capacity, Span, StepPlan
from router.planner import Planner
from simulator.agreement import SimulatedRequest
from simulator.drafter import News, SimulatedDrafter, SimulatedProposal
from simulator.events import STEP, Events
from simulator.sequence import Finished, SimulatedSequence, SlotCounts
from simulator.timing import Jitter, PassTimer, Rows


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """As `router.plan.Capacity`, and the requests that may wait."""

    block_len: int
    num_blocks: int
    max_num_sequences: int
    max_pass_tokens: int
    max_model_len: int
    max_waiting: int = 1024


class SimulatedTarget:
    """Owns its time: while it computes, mail waits.

    Args:
        cost: what its planner believes.
        timer: what its passes take.
        ended: is told of every request that ends.
        planned: is told of every plan.
    """

    def __init__(
        self,
        events: Events,
        name: str,
        planner: Planner,
        cost: CostModel,
        timer: PassTimer,
        jitter: Jitter,
        limits: TargetLimits,
        drafters: Mapping[str, SimulatedDrafter],
        table: RoutingTable,
        ended: Callable[[Finished], None],
        planned: Callable[[float, StepPlan], None] | None = None,
    ) -> None:
        self.name = name
        self.table = table
        self.num_passes = self.num_rows = self.num_committed = self.num_preempted = 0
        self.busy_s = 0.0
        self._events = events
        self._planner = planner
        self._cost = cost
        self._timer = timer
        self._jitter = jitter
        self._limits = limits
        self._drafters = drafters
        self._companions = [drafter for drafter in drafters.values() if drafter.companion]
        self._ended = ended
        self._planned = planned
        self._live: dict[str, SimulatedSequence] = {}
        self._num_blocks_held = 0
        self._num_running = 0
        self._num_routed = 0
        self._newest = table
        self._stats = {name: DrafterStats() for name in drafters}
        self._news: dict[str, News] = {}
        self._submits: list[SimulatedRequest] = []
        self._proposals: list[SimulatedProposal] = []
        self._slots: dict[tuple[str, str], SlotCounts] = {}
        self._step_s: float | None = None
        self._unread_since_s: float | None = None  # as in the live round
        self._busy = False
        self._woken = False

    # ---- what others do

    def __len__(self) -> int:
        return len(self._live) + len(self._submits)

    @property
    def num_open_tokens(self) -> int:
        """Committed, of requests that have not ended."""
        return sum(sequence.position for sequence in self._live.values())

    @property
    def open_chains(self) -> list[Chain]:
        return [sequence.chain for sequence in self._live.values()]

    def open_tokens_per_s(self, now_s: float) -> dict[str, float]:
        """Of each request that has not ended, after its first token."""
        return {
            request_id: (sequence.position - 1) / (now_s - sequence.first_token_s)
            for request_id, sequence in self._live.items()
            if sequence.first_token_s is not None and now_s > sequence.first_token_s
        }

    def submit(self, request: SimulatedRequest) -> None:
        self._submits.append(request)
        self._wake()

    def hear(self, proposals: list[SimulatedProposal]) -> None:
        self._proposals.extend(proposals)
        self._wake()

    def publish(self, table: RoutingTable) -> None:
        if table.version > self._newest.version:
            self._newest = table
            self._wake()

    def requests(self) -> list[RequestView]:
        """Those whose chain the router may choose."""
        return [
            RequestView(
                s.request.id,
                s.request.prompt_len,
                s.committed_len,
                s.chain,
                s.request.features,
            )
            for s in self._live.values()
            if s.request.chain is None
        ]

    def take_slots(self) -> dict[tuple[str, str], SlotCounts]:
        """What drafters did since this was last asked, by request and drafter."""
        slots, self._slots = self._slots, {}
        return slots

    # ---- the round

    def _wake(self) -> None:
        if not self._busy and not self._woken:
            self._woken = True
            self._events.at(self._events.now_s, STEP, self._step)

    def _wake_again(self, now_s: float) -> None:
        self._wake()

    def _step(self, now_s: float) -> None:
        self._woken = False
        if self._busy:
            return
        self._follow()
        self._take_mail(now_s)
        self._unread_since_s = None
        if not self._live:
            self._finish_step()
            return
        views = [sequence.view() for sequence in self._live.values()]
        wanted = {sequence.drafter for sequence in self._live.values()}
        drafters = {name: self._stats[name].view for name in wanted if name in self._stats}
        plan = self._planner.plan(views, drafters, self._capacity(), self._cost, now_s)
        if self._planned is not None:
            self._planned(now_s, plan)
        self._note_holds(plan, now_s)
        if plan.is_empty:
            self._finish_step()
            if plan.wake_s is not None and not self._busy:
                self._events.at(plan.wake_s, STEP, self._wake_again)
            return
        seconds, spans = self._begin(plan)
        self.busy_s += seconds
        self._busy = True
        self._events.at(now_s + seconds, STEP, lambda end_s: self._end(spans, now_s, end_s))

    def _end(self, spans: list[tuple[Span, int, int]], start_s: float, now_s: float) -> None:
        self._busy = False
        self._unread_since_s = start_s
        num_rows = self._apply(spans, now_s)
        self.num_passes += 1
        self.num_rows += num_rows
        step_s = now_s - start_s
        self._step_s = ema(self._step_s, step_s)
        self._finish_step()
        if not self._busy:
            self._step(now_s)

    def _finish_step(self) -> None:
        """Says what there is to say; companions draft, and the round waits for them."""
        news, self._news = self._news, {}
        for name, message in news.items():
            self._drafters[name].tell(self, message)
        if self._companions:
            self._busy = True  # what they say is mail, and wakes nobody before they are done
            seconds = sum(companion.step_as_companion() for companion in self._companions)
            self._busy = False
            if seconds > 0.0 or self._proposals:
                self._busy = True
                self.busy_s += seconds
                self._events.at(self._events.now_s + seconds, STEP, self._resume)

    def _resume(self, now_s: float) -> None:
        self._busy = False
        self._step(now_s)

    def _capacity(self) -> Capacity:
        limits = self._limits
        return Capacity(
            limits.block_len,
            limits.num_blocks,
            limits.num_blocks - self._num_blocks_held,
            limits.max_num_sequences,
            limits.max_pass_tokens,
            limits.max_model_len,
        )

    # ---- mail

    def _take_mail(self, now_s: float) -> None:
        submits, self._submits = self._submits, []
        for request in submits:
            refused = refusal(
                request.prompt_len,
                request.max_tokens,
                self._capacity(),
                len(self._live) - self._num_running,
                self._limits.max_waiting,
                draining=False,
            )
            if refused is not None:
                self._ended(Finished(request, refused[0], now_s, now_s, 0, 0, 0))
                continue
            sequence = self._live[request.id] = SimulatedSequence(request)
            self._seat(sequence)
        proposals, self._proposals = self._proposals, []
        if proposals:
            self._take_proposals(proposals, now_s)

    def _take_proposals(self, proposals: list[SimulatedProposal], now_s: float) -> None:
        for proposal in proposals:
            sequence = self._live.get(proposal.request_id)
            if sequence is None or sequence.drafter != proposal.drafter:
                continue
            stats = self._stats[proposal.drafter]
            told_s = sequence.told_s.get(proposal.base)
            if told_s is not None and proposal.num_tokens:
                since_s = self._unread_since_s
                stats.replied(now_s - told_s, None if since_s is None else max(0.0, since_s - told_s))
            if sequence.offer(proposal):
                sequence.survival = stats.foresee((sequence.confidences,))[0]
            else:
                stats.num_stale += 1

    # ---- who follows whom

    def _follow(self) -> None:
        table = self._newest
        if table is self.table:
            return
        self.table = table
        for sequence in self._live.values():
            if sequence.request.chain is None:
                chain = table.chains.get(sequence.request.id)
                if chain is not None and chain != sequence.chain:
                    sequence.num_switches += 1
                    self._switch(sequence, chain)

    def _seat(self, sequence: SimulatedSequence) -> None:
        chain = sequence.request.chain
        if chain is None:
            defaults = self.table.defaults
            chain = self.table.chains.get(sequence.request.id, defaults[self._num_routed % len(defaults)])
            self._num_routed += 1
        self._switch(sequence, chain)

    def _switch(self, sequence: SimulatedSequence, chain: Chain) -> None:
        drafter = chain[-1] if chain else None
        sequence.lead = chain[:-1]
        if drafter is not None and drafter == sequence.drafter and drafter in self._drafters:
            self._news_of(drafter).leads[sequence.request.id] = sequence.lead
            return
        self._release(sequence)
        sequence.drafter = drafter
        sequence.drop_proposal()
        sequence.expect_nothing()
        if drafter is not None and drafter in self._drafters:
            news = self._news_of(drafter)
            news.releases.discard(sequence.request.id)
            news.extends.pop(sequence.request.id, None)
            news.opens[sequence.request.id] = (sequence.request, sequence.position)
            if sequence.lead:
                news.leads[sequence.request.id] = sequence.lead

    def _release(self, sequence: SimulatedSequence) -> None:
        sequence.committed_s = None
        if sequence.drafter is not None and sequence.drafter in self._drafters:
            news = self._news_of(sequence.drafter)
            news.opens.pop(sequence.request.id, None)
            news.extends.pop(sequence.request.id, None)
            news.releases.add(sequence.request.id)

    def _news_of(self, drafter: str) -> News:
        news = self._news.get(drafter)
        if news is None:
            news = self._news[drafter] = News({}, {}, {}, set(), self._drafters[drafter].max_draft_len)
        return news

    # ---- the pass

    def _note_holds(self, plan: StepPlan, now_s: float) -> None:
        for span in plan.spans:
            sequence = self._live[span.request_id]
            if sequence.held and sequence.awaiting_since_s is not None and sequence.drafter is not None:
                self._stats[sequence.drafter].late(now_s - sequence.awaiting_since_s)
            sequence.held = False
        for request_id in plan.held:
            self._live[request_id].held = True

    def _begin(self, plan: StepPlan) -> tuple[float, list[tuple[Span, int, int]]]:
        """Returns how long the pass takes, and of each span its committed and its draft tokens."""
        for request_id in plan.preempted:
            self._preempt(self._live[request_id])
        for request_id in plan.admitted:
            self._live[request_id].running = True
            self._num_running += 1
        spans: list[tuple[Span, int, int]] = []
        decoding: list[Rows] = []
        prefilling: list[Rows] = []
        for span in plan.spans:
            sequence = self._live[span.request_id]
            num_drafts = min(span.num_verify, sequence.num_drafted or 0)
            rows = span.num_compute + num_drafts
            context = sequence.computed_len + span.num_compute
            (decoding if span.num_compute == 1 else prefilling).append((rows, context))
            spans.append((span, span.num_compute, num_drafts))
        return self._jitter(self._timer.seconds(decoding, prefilling)) if spans else 0.0, spans

    def _preempt(self, sequence: SimulatedSequence) -> None:
        self._set_computed(sequence, 0)
        sequence.running = sequence.held = False
        self._num_running -= 1
        sequence.awaiting_since_s = None
        sequence.committed_s = None
        self.num_preempted += 1

    def _set_computed(self, sequence: SimulatedSequence, computed_len: int) -> None:
        block_len = self._limits.block_len
        self._num_blocks_held += -(-computed_len // block_len) + (-sequence.computed_len // block_len)
        sequence.computed_len = computed_len

    def _apply(self, spans: list[tuple[Span, int, int]], now_s: float) -> int:
        num_rows = 0
        for span, num_compute, num_drafts in spans:
            num_rows += num_compute + num_drafts
            sequence = self._live.get(span.request_id)
            if sequence is None:
                continue
            if sequence.computed_len + num_compute < sequence.committed_len:
                self._set_computed(sequence, sequence.computed_len + num_compute)
                continue
            self._commit(sequence, num_drafts, now_s)
        return num_rows

    def _commit(self, sequence: SimulatedSequence, num_verified: int, now_s: float) -> None:
        request = sequence.request
        base = sequence.position
        # Of the drafts that were verified, and the target's own token.
        num_accepted = min(num_verified, sequence.num_right)
        num_new = min(num_accepted + 1, request.output_len - base)
        num_accepted = min(num_accepted, num_new)
        sequence.committed_len += num_new
        self._set_computed(sequence, sequence.committed_len - 1)
        self.num_committed += num_new
        sequence.num_rounds += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        judgement = sequence.judge(num_new)
        if judgement is not None:
            self._stats[judgement.drafter].judged(judgement, num_verified)
        finished = sequence.position >= request.output_len
        drafter = sequence.drafter
        if drafter is not None and drafter in self._drafters:
            elapsed_s = now_s - (sequence.committed_s if sequence.committed_s is not None else now_s - (self._step_s or 0.0))
            sequence.committed_s = now_s
            slot = self._slots.get((request.id, drafter))
            if slot is None:
                slot = self._slots[request.id, drafter] = SlotCounts(request)
            slot.num_rounds += 1
            slot.num_proposed += num_verified
            slot.num_accepted += num_accepted
            slot.num_committed += num_new
            slot.elapsed_s += elapsed_s
            slot.num_missed += judgement is None and sequence.can_have_draft
            slot.bases.append(base)
            if judgement is not None:
                failed = judgement.failed(num_new, self._drafters[drafter].max_draft_len, finished)
                slot.positions = slot.positions.plus(judgement.num_right, failed)
            sequence.expect_nothing()
            if not finished and request.max_tokens - sequence.position > 1:
                self._extend(sequence, drafter)
                sequence.await_proposal(now_s)
        if finished:
            self._finish(sequence, now_s)

    def _extend(self, sequence: SimulatedSequence, drafter: str) -> None:
        news = self._news_of(drafter)
        if sequence.request.id in news.opens:
            news.opens[sequence.request.id] = (sequence.request, sequence.position)
        else:
            news.extends[sequence.request.id] = sequence.position

    def _finish(self, sequence: SimulatedSequence, now_s: float) -> None:
        request = sequence.request
        del self._live[request.id]
        self._num_running -= 1
        self._set_computed(sequence, 0)
        self._release(sequence)
        first_s = sequence.first_token_s if sequence.first_token_s is not None else now_s
        self._ended(
            Finished(
                request,
                FinishReason.LENGTH,
                first_s,
                now_s,
                sequence.position,
                sequence.num_rounds,
                sequence.num_switches,
                sequence.chain,
            )
        )
