"""The round: the one loop in which a target serves all of its requests (DESIGN, One round)."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.errors import OutOfBlocks
from cluster.messages import LevelReport, Message, ProposalRound, Role, SubmitRound
from cluster.soundness import Inspection
from cluster.transport.base import Link, LinkDown, LinkUp, Mailbox, Received
from cluster.types import Commit, FinishReason, ModelInfo, Request, RoutingTable
from engine.drafter_sessions import Pool
from engine.gateway_sessions import Callers
from engine.loop_status import LoopStatus, StepReport
from engine.refusal import refusal
from engine.sequences import LiveSequence, Sequences
from engine.target import SpanInput, SpanOutcome, TargetEngine
from engine.telemetry import Telemetry
from profiler.online_cost import OnlineCost
from router.assignment import Observation, RequestView, Score
from router.colocation_gate import Pace
from router.cost_model import CostModel
from router.plan import StepPlan
from router.planner import Planner, StepPlanner

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

# How long an idle round sleeps between looks at its stop event; whatever comes in ends the sleep.
IDLE_WAIT_S = 1.0


class Companion(Protocol):
    """The loop of a drafter that reads the target's own hidden states, and so lives in its process and thread."""

    row_price: float  # in tokens: a draft token less likely to survive is not worth verifying

    @property
    def name(self) -> str: ...

    def step(self, now_s: float) -> bool:
        """Returns whether there was anything to do: if so, it is called again at once."""


@dataclass(slots=True)
class PendingPass:
    """A round between its two halves. ``execute`` fills in what the engine computes, and since when."""

    plan: StepPlan
    began_s: float
    spans: list[SpanInput] = field(default_factory=list)
    pass_began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Of a round: when it began, the tokens that it decoded, and the seconds that prompts took in its pass."""

    began_s: float
    num_tokens: int
    prompts_s: float


class TargetLoop:
    """Owns a target, its sequences, and its ends of the links to drafters and gateways.

    One thread calls ``step`` (``run`` does); any thread may call ``publish_table``, ``drain``, ``status``, ``requests``,
    ``take_observations``, ``take_scores`` and ``take_levels``. A simulation on a virtual clock calls the parts of ``step``
    itself: ``begin`` and ``execute`` when a round begins, ``finish`` and ``draft`` when its pass has taken its time.

    Args:
        clock: monotonic, in seconds; read when a pass begins and ends, and around what colocated drafters do.
        companions: drafters linked to ``mailbox`` as any others, stepped at the end of each round on this thread, when what
            was committed has been sent to them: what they read of the engine is then exactly what is committed, and their
            proposals are there before the next round. One whose drafts save less time than making them takes is told
            nothing, and asked nothing, but now and then.
        proposers: for each drafter, those that may ride ahead of it in its process; it may report on them.
    """

    def __init__(
        self,
        engine: TargetEngine,
        model: ModelInfo,
        mailbox: Mailbox,
        cost: CostModel,
        clock: Clock,
        planner: Planner | None = None,
        table: RoutingTable | None = None,
        max_waiting: int = 1024,
        companions: Sequence[Companion] = (),
        proposers: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.telemetry = Telemetry()
        self._engine = engine
        self._model = model
        self._cost = cost
        self._learning = cost if isinstance(cost, OnlineCost) else None
        self._planner = planner or StepPlanner()
        self._max_waiting = max_waiting
        self._clock = clock
        self._companions = list(companions)
        self._pace = Pace()
        self._last_round: _Decoded | None = None  # if it decoded
        self._pass_s = 0.0  # of the last pass
        self._sequences = Sequences(model)
        self._newest_table = table or RoutingTable(version=0)
        names = [one.name for one in companions]
        self._pool = Pool(self._sequences, self.telemetry, self._newest_table, names, proposers)
        self._callers = Callers(self._end)
        self._inspection = Inspection("the target")
        self._draining = False
        self._unread_since_s: float | None = None  # when the last pass began, if the last step had one
        self._status = LoopStatus()

    # ---- called from any thread

    def publish_table(self, table: RoutingTable) -> None:
        """A newer routing table; taken up by the next step. An older one than the last is ignored."""
        if table.version > self._newest_table.version:
            self._newest_table = table
            self.mailbox.wake()

    def drain(self) -> None:
        """Take no more requests; those under way run to their end."""
        self._draining = True
        self.mailbox.wake()

    def status(self) -> LoopStatus:
        return self._status

    def requests(self) -> tuple[RequestView, ...]:
        """The live requests whose chain the router may choose."""
        return tuple(
            RequestView(
                s.request.id,
                s.prompt_len,
                len(s.token_ids),
                s.chain,
                s.features,
            )
            for s in self._sequences.snapshot()
            if s.request.chain is None
        )

    def named(self) -> dict[str, int]:
        """How many live requests are with each drafter by their own choice, be it there or not."""
        return Counter(s.drafter for s in self._sequences.snapshot() if s.request.chain and s.drafter is not None)

    def take_observations(self) -> tuple[Observation, ...]:
        return self.telemetry.take_observations()

    def take_scores(self) -> tuple[Score, ...]:
        return self.telemetry.take_scores()

    def take_levels(self) -> tuple[LevelReport, ...]:
        return self.telemetry.take_levels()

    # ---- the loop's own thread

    def run(self, stop: threading.Event) -> None:
        """Steps until stopped. Whatever the engine raises ends every request with an error and is raised on."""
        self.run_resumably(stop)
        self.fail_all("the target stops")

    def run_resumably(self, stop: threading.Event) -> None:
        """As ``run``, but requests under way stay as they are, for a thread that runs the loop later."""
        self._last_round = None
        try:
            while not stop.is_set():
                report = self.step(self._clock())
                if not report.executed:
                    wait_s = IDLE_WAIT_S if report.wake_s is None else max(0.0, report.wake_s - self._clock())
                    self.mailbox.wait(min(wait_s, IDLE_WAIT_S))
        except BaseException as error:
            self.fail_all(f"the target failed: {type(error).__name__}: {error}")
            raise

    def fail_all(self, reason: str) -> None:
        """Ends requests under way with an error. While no other thread runs the loop."""
        sequences = self._sequences.snapshot()
        self._callers.tell(
            Commit(s.request.id, len(s.token_ids), (), finish=FinishReason.ERROR, error=reason) for s in sequences
        )
        for sequence in sequences:
            self._end(sequence.request.id)
        self._flush()

    def step(self, now_s: float) -> StepReport:
        """One round: take mail, plan, execute one pass, publish the commits, let colocated drafters draft on top of them."""
        begun = self.begin(now_s)
        if isinstance(begun, StepReport):
            self.draft(None, now_s)
            return begun
        outcomes = self.execute(begun)
        self.finish(begun, outcomes, self._clock())
        self.draft(begun, now_s)
        return StepReport(executed=True)

    def begin(self, now_s: float) -> PendingPass | StepReport:
        """The first half of a round: mail and plan. A report instead of a pass: there is nothing to compute now."""
        self._pool.follow(self._newest_table)
        self._take_mail(now_s)
        self._unread_since_s = None
        if not self._sequences:
            self._last_round = None
            self._flush()
            return StepReport(executed=False)
        capacity = self._engine.capacity()
        plan = self._planner.plan(self._sequences.views(), self._pool.views(), capacity, self._cost, now_s)
        self._note_holds(plan, now_s)
        if plan.is_empty:
            self._last_round = None
            self._flush()
            return StepReport(executed=False, wake_s=plan.wake_s)
        self._unread_since_s = now_s
        return PendingPass(plan, began_s=now_s)

    def finish(self, begun: PendingPass, outcomes: Sequence[SpanOutcome], end_s: float) -> None:
        """The second half of a round, after its pass: commit, tell drafters and gateways, record what the pass took."""
        spans = begun.spans
        pass_s = self._pass_s = end_s - begun.pass_began_s
        if self._learning is not None and spans:
            self._learn(self._learning, spans, pass_s)
        last_round, self._last_round = self._last_round, None
        num_sampled = sum(span.samples for span in spans) if self._companions else 0
        if num_sampled:
            self._pool.choose(num_sampled)
        commits = self._apply(spans, outcomes, end_s)
        if num_sampled:
            if last_round is not None:
                self._pace.note(last_round.num_tokens, begun.began_s - last_round.began_s - last_round.prompts_s)
            self._weigh(spans, commits)
            self._last_round = self._decoded(spans, commits, begun.began_s)
        self.telemetry.record(sum(len(s.token_ids) for s in spans), commits, end_s - begun.began_s, end_s)
        self._flush()
        if not self._sequences:
            self._engine.check_integrity()
            self.telemetry.idle()

    def draft(self, finished: PendingPass | None, now_s: float) -> None:
        """Lets each colocated drafter follow the commits and draft. ``finished``: the pass of this round, if it had one."""
        drafting_s = 0.0
        for companion in tuple(self._companions):
            if not self._pool.is_asked(companion.name):
                continue
            start_s = self._clock()
            try:
                while companion.step(now_s):
                    pass
            except Exception as error:  # this loop is its owner, and a drafter's fault costs speed alone
                logger.exception("drafter %s failed, and is left out from now on", companion.name)
                self._companions.remove(companion)
                self._pool.leave_out(companion.name, f"{type(error).__name__}: {error}")
            if finished is not None:
                seconds = self._clock() - start_s
                self._pool.drafted(companion.name, seconds)
                drafting_s += seconds
        if self._companions and finished is not None:
            self._pool.handled(self._clock() - finished.began_s - self._pass_s - drafting_s)

    # ---- mail

    def _take_mail(self, now_s: float) -> None:
        for event in self.mailbox.drain():
            match event:
                case LinkUp(link) if link.peer.role is Role.GATEWAY:
                    self._callers.link_up(link)
                case LinkUp(link):
                    self._pool.link_up(link)
                case LinkDown(link, reason):
                    self._link_down(link, reason)
                case Received(link, message):
                    self._hear(link, message, now_s)

    def _hear(self, link: Link, message: Message, now_s: float) -> None:
        if not (self._callers.knows(link) or self._pool.knows(link)):
            return  # it went before its mail was read
        num_unsound = self._inspection.num_unsound
        message = self._inspection.sound_part(link, message, self._model.vocab_size)
        match message, link.peer.role:
            case SubmitRound(), Role.GATEWAY:
                for request in message.submits:
                    self._submit(link, request, now_s)
                for request_id in message.aborts:
                    self._callers.abort(link, request_id)
            case ProposalRound(), Role.DRAFTER:
                faults = self._pool.hear(link, message, now_s, self._unread_since_s)
                if faults:
                    self._inspection.note(link, faults)
                self.telemetry.drafter(link.peer.name).num_unsound += self._inspection.num_unsound - num_unsound
            case _:
                self._unlink(link, f"it sent a {type(message).__name__}, which no {link.peer.role} sends to a target")
        if self._inspection.must_go(link):
            self._unlink(link, "it sent too many unsound messages")

    def _unlink(self, link: Link, reason: str) -> None:
        link.close()
        self._link_down(link, reason)

    def _link_down(self, link: Link, reason: str) -> None:
        self._inspection.forget(link)
        if link.peer.role is Role.GATEWAY:
            self._callers.link_down(link)
        else:
            self._pool.link_down(link, reason)

    def _submit(self, link: Link, request: Request, now_s: float) -> None:
        refused = refusal(request, self._sequences, self._model, self._engine.capacity(), self._max_waiting, self._draining)
        if refused is not None:
            self._callers.refuse(link, refused)
            return
        sequence = self._sequences.add(request, now_s)
        self._callers.own(link, request.id)
        self._pool.seat(sequence)

    # ---- the pass

    def _note_holds(self, plan: StepPlan, now_s: float) -> None:
        """A hold that ran out tells of its drafter's slowness; the request is decoded plainly and waits for nobody."""
        for span in plan.spans:
            sequence = self._sequences[span.request_id]
            if sequence.held and sequence.awaiting_since_s is not None and sequence.drafter is not None:
                self.telemetry.drafter(sequence.drafter).late(now_s - sequence.awaiting_since_s)
            sequence.held = False
        for request_id in plan.held:
            self._sequences[request_id].held = True

    def execute(self, begun: PendingPass) -> Sequence[SpanOutcome]:
        """Preempts, admits and computes as planned.

        Raises:
            OutOfBlocks: one request alone does not fit.
        """
        plan = begun.plan
        for request_id in plan.preempted:
            self._preempt(self._sequences[request_id])
        begun.pass_began_s = self._clock()
        for request_id in plan.admitted:
            sequence = self._sequences[request_id]
            sequence.admit(self._engine.open(sequence.request, sequence.token_ids), begun.pass_began_s)
        begun.spans = [self._sequences.span_input(span) for span in plan.spans]
        while begun.spans:
            begun.pass_began_s = self._clock()
            try:
                return self._engine.execute(begun.spans)
            except OutOfBlocks:
                # Blocks that preempted sequences shared did not fall free, so the plan was too hopeful.
                running = [sequence for sequence in self._sequences if sequence.running]
                if len(running) == 1:
                    raise
                last_span = begun.spans[0].request_id if len(begun.spans) == 1 else None
                victim = running[-2] if running[-1].request.id == last_span else running[-1]
                self._preempt(victim)
                begun.spans = [span for span in begun.spans if span.request_id != victim.request.id]
        return ()

    @staticmethod
    def _learn(cost: OnlineCost, spans: Sequence[SpanInput], pass_s: float) -> None:
        """What a pass took corrects the cost model. One with prompts does not, for their rows are not all sampled."""
        if all(span.is_decode for span in spans):
            num_rows, context = sum(len(span.token_ids) for span in spans), sum(span.base_len for span in spans)
            drift = cost.observe(num_rows, context, pass_s)
            if drift is not None:
                logger.info("passes of about %d rows now take %.2f times what was measured", drift.num_rows, drift.ratio)

    def _weigh(self, spans: Sequence[SpanInput], commits: Sequence[Commit]) -> None:
        """What the companions' drafts have saved in this pass, and what a row costs at the pace of the last rounds."""
        sampled = [span for span in spans if span.samples]
        num_rows, context = sum(1 + span.num_drafts for span in sampled), sum(span.base_len for span in sampled)
        self._pool.weigh(commits, len(sampled), context, self._cost)
        price = self._pace.row_price(num_rows, context, self._cost)
        for companion in self._companions:
            companion.row_price = price

    def _decoded(self, spans: Sequence[SpanInput], commits: Sequence[Commit], began_s: float) -> "_Decoded | None":
        """A row is worth what decoding forgoes for it: prompts, and their time as the cost model has it, do not count."""
        decoding = {span.request_id: len(span.token_ids) for span in spans if span.is_decode}
        num_tokens = sum(len(commit.token_ids) for commit in commits if commit.request_id in decoding)
        if not num_tokens:
            return None
        context, num_rows = sum(span.base_len for span in spans), sum(len(span.token_ids) for span in spans)
        decoding_s = self._cost.step_s(sum(decoding.values()), context)
        return _Decoded(began_s, num_tokens, self._cost.step_s(num_rows, context) - decoding_s)

    def _preempt(self, sequence: LiveSequence) -> None:
        """Gives up the blocks; what was committed stays, and is recomputed later to the same tokens (DESIGN idea 1)."""
        self._engine.release(sequence.request.id)
        sequence.computed_len = 0
        sequence.running = sequence.held = False
        sequence.awaiting_since_s = None
        self.telemetry.forget(sequence.request.id)
        self.telemetry.num_preempted += 1

    def _apply(self, spans: Iterable[SpanInput], outcomes: Iterable[SpanOutcome], now_s: float) -> list[Commit]:
        commits = []
        for span, outcome in zip(spans, outcomes, strict=True):
            commit = self._sequences.apply(span, outcome)
            if commit is None:
                continue
            sequence = self._sequences[commit.request_id]
            if commit.base_len == sequence.prompt_len and commit.token_ids:
                commit = replace(commit, prefill=sequence.prefill(now_s))
            commits.append(commit)
            if sequence.judgement is not None and sequence.teaches:
                self.telemetry.drafter(sequence.judgement.drafter).judged(sequence.judgement, span.num_drafts)
            self._pool.tell(sequence, commit, now_s)
            if commit.finish is not None:
                self._end(commit.request_id)
        self._callers.tell(commits)
        return commits

    def _end(self, request_id: str) -> None:
        sequence = self._sequences.remove(request_id)
        if sequence is not None:
            self._engine.release(request_id)
            self._pool.release(sequence)

    def _flush(self) -> None:
        self._pool.flush()
        self._callers.flush()
        num_running = self._sequences.num_running
        self._status = LoopStatus(
            num_running=num_running,
            num_waiting=len(self._sequences) - num_running,
            table_version=self._pool.table.version,
            draining=self._draining,
            followed=self._pool.followed(),
        )
