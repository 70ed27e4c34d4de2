"""What no pass needs: done at once, or where the device computes asynchronously, while it computes the next pass."""

from collections.abc import Callable, Sequence

from cluster.fast_dataclass import record
from cluster.types import Commit
from engine.colocated import ColocatedDrafters
from engine.drafter_sessions import DrafterSessions
from engine.pass_costs import PassCosts, PassCounts, PlannedBatch
from engine.target import AsynchronousEngine, TargetEngine
from engine.telemetry import Telemetry
from router.drafting.length import DraftLengths, PassFeedback


@record
class PassRecord:
    """A pass whose commits are published. ``planned``, ``best_left_out``: of its plan."""

    counts: PassCounts
    commits: Sequence[Commit]
    planned: PlannedBatch
    best_left_out: float
    prompts_wait: bool  # as of `BreakEvenGate.decide`
    began_s: float  # the round
    pass_s: float
    end_s: float
    since_s: float  # from when the draft lengths count its round


class DeferredLearning:
    """The round owns it. Learning, and what else is given to ``later``, is deferred only without drafters on the target's
    device: their gates count what was saved and what was waited for in the order of rounds."""

    def __init__(
        self,
        engine: TargetEngine,
        drafters: DrafterSessions,
        colocated: ColocatedDrafters,
        costs: PassCosts,
        telemetry: Telemetry,
        draft_lengths: DraftLengths,
    ) -> None:
        self._drafters, self._colocated, self._costs, self._telemetry = drafters, colocated, costs, telemetry
        self._draft_lengths = draft_lengths
        self._engine = engine if isinstance(engine, AsynchronousEngine) else None
        self._is_deferred = self._engine is not None and self._engine.is_asynchronous and not colocated
        self._work: list[Callable[[], None]] = []

    def begin_pass(self) -> None:
        """Before each ``execute``: another loop may have used the engine."""
        if self._engine is not None:
            self._engine.meanwhile = self.catch_up if self._is_deferred else None

    def later(self, work: Callable[[], None]) -> None:
        """Beside the next pass, in the order of the calls. It may neither end a request nor use the engine."""
        self._work.append(work)
        if not self._is_deferred:
            self.catch_up()

    def learn(self, record: PassRecord) -> None:
        self.later(lambda: self._learn(record))

    def catch_up(self) -> None:
        """What is still to be done."""
        work, self._work = self._work, []
        for one in work:
            one()

    def _learn(self, record: PassRecord) -> None:
        counts, commits = record.counts, record.commits
        observing = self._telemetry.observing
        if commits:
            with observing():
                times_s = record.pass_s, record.end_s - record.since_s
                self._draft_lengths.learn(PassFeedback(commits, self._drafters.judgements(), *times_s))
        with observing():
            self._observe(record, counts, commits)

    def _observe(self, record: PassRecord, counts: PassCounts, commits: Sequence[Commit]) -> None:
        self._drafters.learn()
        if self._colocated and counts.num_sampled:
            num_prompt_rows = counts.num_prompt_rows if record.prompts_wait else 0
            self._colocated.note_pass(commits, counts.num_sampled, counts.num_sampled_context, num_prompt_rows)
        self._costs.note(record.began_s, record.pass_s, counts, commits, record.planned, record.best_left_out)
        self._telemetry.record(counts.num_rows, commits, record.end_s - record.began_s, record.end_s)
