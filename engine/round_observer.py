"""What a target measures, traces and learns of its rounds."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from cluster.types import Commit
from engine.colocated import ColocatedDrafters
from engine.deferred_work import observed
from engine.drafter_sessions import DrafterSessions
from engine.loop_status import PendingPass
from engine.pass_costs import PassCosts, PassCounts
from engine.request_spans import RequestSpans
from engine.sequences import LiveSequence
from engine.slo_monitor import SloMonitor
from engine.telemetry import Telemetry
from router.drafting.length import DraftLengths, PassFeedback
from router.plan import StepPlan


class RoundObserver:
    """The round owns it. Its methods raise nothing (`Observing`), and change no token."""

    def __init__(
        self,
        telemetry: Telemetry,
        drafters: DrafterSessions,
        colocated: ColocatedDrafters,
        costs: PassCosts,
        lengths: DraftLengths,
        slo: SloMonitor,
    ) -> None:
        self.spans: RequestSpans | None = None  # of traced requests; None: nothing is traced
        self.observing = telemetry.observing
        self._telemetry = telemetry
        self._drafters, self._colocated, self._costs, self._lengths, self._slo = drafters, colocated, costs, lengths, slo
        self._last_end_s: float | None = None  # of the last pass; None: no request has been live since

    # ---- requests

    @observed
    def arrived(self, prompt_len: int) -> None:
        self._telemetry.arrived(prompt_len)

    @observed
    def preempted(self, request_id: str) -> None:
        self._telemetry.num_preempted += 1
        self._drafters.learning.forget(request_id)

    @observed
    def committed(self, committed: Iterable[LiveSequence], now_s: float) -> None:
        """Before requests that these tokens finish have ended."""
        if (spans := self.spans) is not None:
            for sequence in committed:
                spans.note(sequence, sequence.committed(), now_s)

    def ended(self, sequence: LiveSequence, now_s: float) -> None:
        with self.observing:
            self._slo.note_end(sequence, now_s)
            self._telemetry.ended(len(sequence.token_ids) - sequence.prompt_len)
        with self.observing:
            if self.spans is not None:
                self.spans.end(sequence, now_s)

    # ---- rounds

    @observed
    def planned(self, plan: StepPlan, awaited: Collection[str | None], now_s: float) -> None:
        """``awaited``: drafters of the requests that the plan holds."""
        if plan.is_empty and not plan.held:  # else the wait for proposals is part of the round
            self._costs.interrupt()
        if self._colocated:
            self._colocated.note_plan(awaited, not plan.is_empty, now_s)

    @observed
    def computed(self, ended: PendingPass) -> None:
        """Before the commits of a pass: decides which drafters on the target's device are queried for its requests."""
        if self._colocated and (counts := PassCounts.of(ended.spans)).num_sampled:
            sampled = counts.num_sampled, counts.num_sampled_context
            wanted, num_unsent = self._drafters.wanted(ended.spans), self._drafters.num_unsent
            self._colocated.choose(*sampled, wanted, prompts_wait=_prompts_wait(ended, counts), num_missed=num_unsent)

    @observed
    def published(self, ended: PendingPass, committed: Sequence[tuple[LiveSequence, Commit]], is_last: bool) -> None:
        """Before gateways are sent the commits of a pass. ``is_last``: no request is live, so that no pass follows."""
        ended.since_s = ended.pass_began_s if self._last_end_s is None else self._last_end_s
        self._last_end_s = None if is_last else ended.end_s
        judgements, counts = self._drafters.learn(committed, ended.end_s), PassCounts.of(ended.spans)
        commits = [commit for _, commit in committed]
        with self.observing:
            self._slo.note_pass(counts.num_sampled_rows, ended.end_s, is_last)
        with self.observing:
            if commits:
                self._lengths.learn(PassFeedback(commits, judgements, ended.pass_s, ended.end_s - ended.since_s))
        with self.observing:
            if self._colocated and counts.num_sampled:
                num_prompt_rows = counts.num_prompt_rows if _prompts_wait(ended, counts) else 0
                self._colocated.note_pass(commits, counts.num_sampled, counts.num_sampled_context, num_prompt_rows)
        with self.observing:
            self._costs.note(ended.began_s, ended.pass_s, counts, commits, ended.plan.best_left_out)
        with self.observing:
            self._telemetry.record(counts.num_rows, commits, ended.end_s - ended.began_s, ended.end_s)

    @observed
    def round_ended(self, ended: PendingPass, now_s: float, is_last: bool) -> None:
        if is_last:
            self._telemetry.idle()
        self._colocated.note_overhead(now_s - ended.began_s - ended.pass_s)

    @observed
    def drafted_inline(self, seconds: Mapping[str, float]) -> None:
        """Drafters that are stepped between passes took so long since the last one, by name."""
        self._colocated.note_inline(seconds)


def _prompts_wait(ended: PendingPass, counts: PassCounts) -> bool:
    """As of `ColocatedGate.decide`: prompts fill the next pass as they filled this one."""
    return 0 < counts.num_prompt_rows <= ended.plan.num_prompt_tokens_left
