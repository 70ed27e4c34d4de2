"""What is learned from passes: at once, or where the device computes asynchronously, while it computes the next pass."""

from collections.abc import Sequence

from cluster.fast_dataclass import record
from cluster.types import Commit
from engine.colocated import ColocatedDrafters
from engine.drafter_sessions import DrafterSessions
from engine.pass_costs import PassCosts, PassCounts, PlannedBatch
from engine.target import AsynchronousEngine, TargetEngine
from engine.telemetry import Telemetry


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


class DeferredLearning:
    """The round owns it. Learning is deferred only without drafters on the target's device: their gates count what was saved
    and what was waited for in the order of rounds."""

    def __init__(
        self,
        engine: TargetEngine,
        drafters: DrafterSessions,
        colocated: ColocatedDrafters,
        costs: PassCosts,
        telemetry: Telemetry,
    ) -> None:
        self._drafters, self._colocated, self._costs, self._telemetry = drafters, colocated, costs, telemetry
        self._engine = engine if isinstance(engine, AsynchronousEngine) else None
        self._is_deferred = self._engine is not None and self._engine.is_asynchronous and not colocated
        self._newest: PassRecord | None = None

    def begin_pass(self) -> None:
        """Before each ``execute``: another loop may have used the engine."""
        if self._engine is not None:
            self._engine.meanwhile = self.learn if self._is_deferred else None

    def add(self, record: PassRecord, is_last: bool) -> None:
        """``is_last``: no request is live, so that no pass follows."""
        self._newest = record
        if is_last or not self._is_deferred:
            self.learn()

    def learn(self) -> None:
        """From the last pass, if that is still to be done."""
        record, self._newest = self._newest, None
        if record is not None:
            with self._telemetry.observing():
                self._learn(record)

    def _learn(self, record: PassRecord) -> None:
        counts, commits = record.counts, record.commits
        self._drafters.learn()
        if self._colocated and counts.num_sampled:
            num_prompt_rows = counts.num_prompt_rows if record.prompts_wait else 0
            self._colocated.note_pass(commits, counts.num_sampled, counts.num_sampled_context, num_prompt_rows)
        self._costs.note(record.began_s, record.pass_s, counts, commits, record.planned, record.best_left_out)
        self._telemetry.record(counts.num_rows, commits, record.end_s - record.began_s, record.end_s)
