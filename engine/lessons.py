"""What is learned from passes: at once, or while a device that computes asynchronously computes the next one."""

from collections.abc import Sequence

from cluster.fast_dataclass import record
from cluster.types import Commit
from engine.colocated import ColocatedDrafters
from engine.drafter_sessions import DrafterSessions
from engine.pass_costs import PassCosts, PassCounts, PlannedBatch
from engine.target import AsynchronousEngine, TargetEngine
from engine.telemetry import Telemetry


@record
class Lesson:
    """A pass whose commits are published. ``planned``, ``best_left_out``: of its plan."""

    counts: PassCounts
    commits: Sequence[Commit]
    planned: PlannedBatch
    best_left_out: float
    prompts_wait: bool  # as of `BreakEvenGate.decide`
    began_s: float  # the round
    pass_s: float
    end_s: float


class Lessons:
    """The round owns it. The next plan may be made before a lesson is learned. Not beside drafters on the target's device,
    whose gates count what is saved and what is waited for in the order of rounds."""

    def __init__(
        self,
        engine: TargetEngine,
        drafters: DrafterSessions,
        colocated: ColocatedDrafters,
        costs: PassCosts,
        telemetry: Telemetry,
    ) -> None:
        self._drafters, self._colocated, self._costs, self._telemetry = drafters, colocated, costs, telemetry
        self._waits = False
        self._newest: Lesson | None = None
        if isinstance(engine, AsynchronousEngine) and engine.is_asynchronous and not colocated:
            self._waits, engine.meanwhile = True, self.learn

    def add(self, lesson: Lesson, is_last: bool) -> None:
        """``is_last``: no request is live, so that no pass follows."""
        self._newest = lesson
        if is_last or not self._waits:
            self.learn()

    def learn(self) -> None:
        """From the last pass, if that is still to be done."""
        lesson, self._newest = self._newest, None
        if lesson is None:
            return
        counts, commits = lesson.counts, lesson.commits
        self._drafters.learn()
        if self._colocated and counts.num_sampled:
            num_prompt_rows = counts.num_prompt_rows if lesson.prompts_wait else 0
            self._colocated.note_pass(commits, counts.num_sampled, counts.num_sampled_context, num_prompt_rows)
        self._costs.note(lesson.began_s, lesson.pass_s, counts, commits, lesson.planned, lesson.best_left_out)
        self._telemetry.record(counts.num_rows, commits, lesson.end_s - lesson.began_s, lesson.end_s)
