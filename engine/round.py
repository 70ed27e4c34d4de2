"""The round: the one loop in which a target serves all of its requests."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from cluster.client import DraftingEffect
from cluster.errors import OutOfBlocks
from cluster.transport.base import Link, Mailbox
from cluster.types import Commit, DraftTerms, FinishReason, ModelInfo, Request, RoutingTable
from engine.admission import Admission, AdmissionRules
from engine.colocated import ColocatedDrafters, InlineDrafters
from engine.deferred_work import DeferredWork
from engine.drafter_sessions import DrafterSessions
from engine.feature_feed import Feeds
from engine.gateway_sessions import GatewaySessions
from engine.inbox import TargetInbox
from engine.lanes import Lanes
from engine.loop_status import LoopStatus, PendingPass, StepReport
from engine.partition import Partition
from engine.pass_costs import PassCosts
from engine.round_observer import RoundObserver
from engine.sequences import LiveSequence, Sequences
from engine.slo_monitor import SloMonitor
from engine.target import TargetEngine
from engine.telemetry import Telemetry
from router.assignment import RequestView
from router.cost_model import CostModel
from router.drafting.frontiers import in_chunks
from router.drafting.length import DraftLengths
from router.drafting.partition_choice import WHOLE, PartitionChoice
from router.drafting.verification import PassContext
from router.plan import Capacity, SequenceView, StepPlan
from router.planning.ahead import PlanAhead
from router.planning.planner import Planner, StepPlanner

Clock = Callable[[], float]

IDLE_WAIT_S = 1.0  # until an idle loop looks at its stop event again; mail ends the wait


@dataclass(frozen=True, slots=True)
class Policies:
    """What decides a pass, and how far drafters draft."""

    planner: Planner = field(default_factory=StepPlanner)
    draft_lengths: DraftLengths = field(default_factory=DraftLengths)


@dataclass(frozen=True, slots=True)
class DrafterPool:
    """The drafters of a target.

    Args:
        table: until the router publishes one.
        colocated: names of drafters in this process. They are linked to the mailbox as any others, but they share the
            target's device: one is queried only while that pays. They have threads of their own, or are ``inline``.
        proposers: for each drafter, those that may ride ahead of it in its process; it may report on them.
        feeds: of drafters in other processes that read hidden states.
    """

    table: RoutingTable = field(default_factory=lambda: RoutingTable(version=0))
    colocated: Collection[str] = ()
    proposers: Mapping[str, Collection[str]] = field(default_factory=dict)
    feeds: Feeds | None = None


class TargetLoop:
    """Owns a target, its sequences, and its ends of the links to drafters and gateways.

    One thread calls ``step`` (``run`` does); any thread may call the methods before ``run``, and the ``take_`` methods of
    ``telemetry``. A simulation on a virtual clock
    calls the parts of ``step`` itself: ``begin`` and ``execute`` when a round begins, ``finish`` when its pass has taken its
    time.

    Args:
        clock: monotonic, in seconds; read when a pass begins and ends, and at the end of a round.
    """

    def __init__(
        self,
        engine: TargetEngine,
        model: ModelInfo,
        mailbox: Mailbox,
        cost: CostModel,
        clock: Clock,
        policies: Policies | None = None,
        pool: DrafterPool | None = None,
        rules: AdmissionRules | None = None,
    ) -> None:
        policies, pool = policies or Policies(), pool or DrafterPool()
        self.mailbox = mailbox
        mailbox.clock = clock
        self.telemetry = Telemetry()
        self.inline = InlineDrafters(clock)
        self.partition = WHOLE  # of drafters on the target's device
        self._lanes: Lanes | None = None
        self._engine, self._cost, self._clock = engine, cost, clock
        self._planner, self._draft_lengths = PlanAhead(policies.planner), policies.draft_lengths
        self._newest_table = pool.table
        self._sequences = Sequences(model)
        companions = self._companions = ColocatedDrafters(pool.colocated, cost)
        slo = SloMonitor(cost, self.telemetry)
        # Gates of drafters on the target's device count what was saved and what was waited for in the order of rounds.
        self._deferred = DeferredWork(engine, waits=bool(companions))
        follow = pool.table, companions, pool.proposers, self._deferred.later
        self._drafters = DrafterSessions(self._sequences, self.telemetry, *follow)
        self._drafters.feeds = pool.feeds
        self._pass_costs = PassCosts(cost)
        learns = companions, self._pass_costs, self._draft_lengths, slo
        self.observer = RoundObserver(self.telemetry, self._drafters, *learns)
        self._gateways = GatewaySessions(self._sequences, self._end)
        self._admission = Admission(rules or AdmissionRules(), engine, self._sequences, slo, self._refuse, mailbox.wake)
        self._inbox = TargetInbox(mailbox, model.vocab_size, self._gateways, self._drafters, self._submit)
        self._after_pass = False  # the last step had one
        self._status = LoopStatus(num_free_blocks=engine.capacity().num_free_blocks)

    # ---- called from any thread

    def publish_table(self, table: RoutingTable) -> None:
        """A routing table newer than the last is taken up by the next step; an older one is ignored."""
        if table.version > self._newest_table.version:
            self._newest_table = table
            self.mailbox.wake()

    def drain(self, drains: bool = True) -> None:
        """Refuses new requests from now on, but those of a lost target; live ones run to their end. False: accepts all."""
        self._admission.draining = drains
        self.mailbox.wake()

    def status(self) -> LoopStatus:
        return replace(self._status, followed=self._drafters.num_followed())

    def requests(self) -> tuple[RequestView, ...]:
        """The live requests whose chain the router may choose."""
        routed = [s for s in self._sequences.snapshot() if s.request.chain is None]
        return tuple([RequestView(s.request.id, s.prompt_len, len(s.token_ids), s.draft.chain) for s in routed])

    def drafting(self) -> DraftingEffect:
        return self._pass_costs.drafting.effect()

    def named(self) -> dict[str, int]:
        """How many live requests chose each drafter themselves, linked or not."""
        drafters = [s.draft.drafter for s in self._sequences.snapshot() if s.request.chain]
        return Counter(drafter for drafter in drafters if drafter is not None)

    def divide(self, partition: Partition, choice: PartitionChoice) -> None:
        """Before ``run``: drafters that are ``inline`` have a lane, or take turns with passes, as ``choice`` decides."""
        self._lanes = Lanes(partition, choice, self.inline, self._companions, self._cost)

    # ---- the loop's own thread

    def run(self, stop: threading.Event) -> None:
        """Steps until stopped. An error of the engine gives every request up and is raised on."""
        try:
            while not stop.is_set():
                self.work()
        except BaseException as error:
            self.fail_all(f"the target failed: {type(error).__name__}: {error}")
            raise
        finally:
            if self._lanes is not None:
                self._lanes.leave()
        self.fail_all("the target stops")

    def work(self) -> None:
        """A round, then the drafts of drafters on this thread; waits for mail where there was nothing to do."""
        if self._lanes is not None:
            self.partition = self._lanes.follow(self._sequences)
        report = self.step(self._clock())
        drafted_s = self.inline.step()
        if drafted_s:
            self.observer.drafted_inline(drafted_s)
        elif not report.executed:
            if not self._sequences:
                self._engine.check_integrity()
            wait_s = IDLE_WAIT_S if report.wake_s is None else max(0.0, report.wake_s - self._clock())
            self.mailbox.wait(min(wait_s, IDLE_WAIT_S))

    def fail_all(self, reason: str) -> None:
        """Ends every live request: another target may continue it. While no other thread runs the loop."""
        self._deferred.catch_up()
        for sequence in self._sequences.snapshot():
            self._refuse(sequence, FinishReason.ABORT, reason)
        self._flush()

    def step(self, now_s: float) -> StepReport:
        """One round."""
        begun = self.begin(now_s)
        if isinstance(begun, StepReport):
            return begun
        self.execute(begun)
        self.finish(begun, self._clock())
        return StepReport(executed=True)

    def begin(self, now_s: float) -> PendingPass | StepReport:
        """The first half of a round: mail and plan. A report instead of a pass: there is nothing to compute now."""
        self._read_mail(now_s)
        plan = self._plan(now_s)
        self.observer.planned(plan, {self._sequences[request_id].draft.drafter for request_id in plan.held}, now_s)
        if plan.is_empty:
            self._deferred.catch_up()
            self._flush()
            return StepReport(executed=False, wake_s=plan.wake_s)
        self._after_pass = True
        return PendingPass(plan, now_s)

    def execute(self, begun: PendingPass) -> None:
        """Preempts, admits and computes as planned. Raises OutOfBlocks: one request alone does not fit."""
        begun.pass_began_s = self._clock()
        for request_id in begun.plan.preempted:
            self._preempt(self._sequences[request_id])
        for request_id in begun.plan.admitted:
            sequence = self._sequences[request_id]
            sequence.admit(self._engine.open(sequence.request, sequence.token_ids), begun.pass_began_s)
        begun.spans = begun.plan.spans
        self._sequences.bind(begun.spans)
        while begun.spans:
            self._deferred.begin_pass()
            begun.pass_began_s = self._clock()
            try:
                self._engine.execute(begun.spans)
                return
            except OutOfBlocks:
                # Blocks that preempted sequences shared did not fall free, so the plan was too hopeful.
                running = [sequence for sequence in self._sequences if sequence.running]
                if len(running) == 1:
                    raise
                last_span = begun.spans[0].request_id if len(begun.spans) == 1 else None
                victim = running[-2] if running[-1].request.id == last_span else running[-1]
                self._preempt(victim)
                begun.spans = [span for span in begun.spans if span.request_id != victim.request.id]

    def finish(self, begun: PendingPass, end_s: float) -> None:
        """The second half of a round: commit, publish to drafters and gateways, learn; on an asynchronous device later."""
        begun.end_s = end_s
        self._deferred.catch_up()  # with the pass before, unless that was done while this one was computed
        self.observer.computed(begun)
        committed = self._commit(begun, end_s)
        self._drafters.flush()  # they draft while this thread publishes and learns
        is_last = not self._sequences
        self._deferred.later(lambda: self._publish(begun, committed, is_last))
        if is_last:
            self._deferred.catch_up()  # no pass follows
            self._engine.check_integrity()
        self._note_status()
        self.observer.round_ended(begun, self._clock(), is_last)

    # ---- mail

    def _read_mail(self, now_s: float) -> None:
        self._gateways.end_lost()
        self._drafters.follow(self._newest_table)
        self._inbox.read(now_s, self._after_pass)
        self._after_pass = False
        self._admission.follow(now_s)

    def _submit(self, link: Link, request: Request, now_s: float) -> None:
        self.observer.arrived(len(request.prompt_token_ids))
        self._gateways.displace(link, request.id)
        decided = self._admission.decide(request, now_s)
        if isinstance(decided, Commit):
            self._gateways.outbox(link).publish(decided)
            return
        sequence = self._sequences.add(request, now_s)
        sequence.cached_len, sequence.gateway = decided, self._gateways.outbox(link)
        self._drafters.assign(sequence)
        self._admission.prepare(sequence, now_s)

    # ---- the plan

    def _plan(self, now_s: float) -> StepPlan:
        if not self._sequences:
            return StepPlan(spans=())
        capacity = self._engine.capacity()
        known = cache(lambda: self._known(capacity, now_s))
        drafts = self._sequences.drafts_at_hand(capacity.max_verify_len) if self._planner.expects else None
        plan = None if drafts is None else self._planner.correct(drafts, capacity)
        if plan is None:
            self._note_cached(capacity)
            plan = planned = self._planner.plan(*known())
        else:
            planned = plan
        self._drafters.note_plan(plan, now_s)
        self._deferred.later(lambda: self._set_budgets(planned, *known()))
        self._deferred.ahead(lambda: self._expect(planned, *known()))
        return plan

    def _known(self, capacity: Capacity, now_s: float) -> tuple[Sequence[SequenceView], PassContext]:
        """What a plan is made of. The same until the pass is committed, for what is done beside it."""
        return self._sequences.views(), PassContext(self._drafters.views(), capacity, self._cost, now_s)

    def _expect(self, plan: StepPlan, views: Sequence[SequenceView], context: PassContext) -> None:
        """Plans ahead of the pass. Where that fails, the next pass is planned after it."""
        with self.telemetry.observing:
            self._planner.expect(plan, views, context)

    def _set_budgets(self, plan: StepPlan, views: Sequence[SequenceView], context: PassContext) -> None:
        """Of the drafts that answer what is committed next."""
        budgets: Mapping[str, DraftTerms] = {}
        with self.telemetry.observing:
            value = self._pass_costs.value(views, context, plan.num_micro_batches, self.partition)
            budgets = in_chunks(self._draft_lengths.budgets(views, value), plan.frontiers, views)
        self._drafters.set_budgets(budgets)

    def _note_cached(self, capacity: Capacity) -> None:
        """Of the first waiting requests, as many as a pass has places and rows for. Of others what was known last stays."""
        waiting = self._sequences.waiting()
        if not waiting:
            return
        num_rows = capacity.max_pass_tokens
        for sequence in waiting[: max(0, capacity.max_num_sequences - self._sequences.num_running)]:
            sequence.cached_len = self._engine.num_cached(sequence.request, sequence.token_ids)
            num_rows -= len(sequence.token_ids) - sequence.cached_len
            if num_rows <= 0:
                break

    def _preempt(self, sequence: LiveSequence) -> None:
        """Gives up the blocks. The committed tokens stay, and are recomputed to the same continuation."""
        self._engine.release(sequence.request.id)
        sequence.preempt()
        self.observer.preempted(sequence.request.id)

    # ---- the commit

    def _commit(self, begun: PendingPass, now_s: float) -> list[LiveSequence]:
        """Commits the outcomes, and ends requests that are finished. Drafters' messages are queued."""
        committed = []
        for span in begun.spans:
            if span.prompt_logprobs:
                sequence = self._sequences[span.request_id]
                self._gateways.publish([(sequence, commit) for commit in self._sequences.prompt_commits(span)])
            if (taken := self._sequences.commit(span, now_s)) is not None:
                committed.append(taken)
        self._drafters.publish(committed, now_s)
        self.observer.committed(committed, now_s)
        for sequence in committed:
            if sequence.finish is not None:
                self._end(sequence.request.id)
            elif sequence.draft.has_free_drafts:
                self._drafters.offer_free(sequence)
        return committed

    def _publish(self, ended: PendingPass, committed: Sequence[LiveSequence], is_last: bool) -> None:
        """To what learns of a pass, and to gateways."""
        commits = [(sequence, sequence.committed()) for sequence in committed]
        self.observer.published(ended, commits, is_last)
        for sequence in committed:
            sequence.forget_pass()
        self._gateways.publish(commits)
        self._gateways.flush()

    def _refuse(self, sequence: LiveSequence, finish: FinishReason, reason: str) -> None:
        """Ends a live request, and tells its caller why."""
        commit = Commit(sequence.request.id, len(sequence.token_ids), (), finish=finish, error=reason)
        self._gateways.publish([(sequence, commit)])
        self._end(sequence.request.id)

    def _end(self, request_id: str) -> None:
        sequence = self._sequences.remove(request_id)
        if sequence is not None:
            self._admission.forget(request_id)
            self._engine.release(request_id)
            self._drafters.release(sequence)
            self.observer.ended(sequence, self._clock())

    def _flush(self) -> None:
        self._drafters.flush()
        self._gateways.flush()
        self._gateways.end_lost()
        self._note_status()

    def _note_status(self) -> None:
        num_running = self._sequences.num_running
        num_waiting = len(self._sequences) - num_running
        num_free, version = self._engine.capacity().num_free_blocks, self._drafters.table.version
        self._status = LoopStatus(num_running, num_waiting, num_free, version, self._admission.draining)
