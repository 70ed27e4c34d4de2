"""What the round measures of itself and of its drafters, as it goes."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cluster.types import Commit
from engine.sequences import Judgement, LiveSequence
from profiler.online_calibration import OnlineSurvival
from router.assignment import Observation
from router.plan import UNKNOWN_DRAFTER, DrafterView

# Weight of the newest sample in running means: about the last twenty count.
SMOOTHING = 0.1
MAX_OBSERVATIONS = 65536
MIN_RECORDS = 64  # verified drafts before a drafter's confidences are believed, as they turned out


def _mean(old: float, new: float, weight: float = SMOOTHING) -> float:
    return old + weight * (new - old)


@dataclass(slots=True)
class DrafterStats:
    """Totals and running means of one drafter."""

    num_proposed: int = 0
    num_accepted: int = 0
    num_stale: int = 0
    num_late: int = 0  # holds that ran out before the proposal came
    num_resyncs: int = 0
    reply_s: float | None = None
    view: DrafterView = UNKNOWN_DRAFTER
    calibration: OnlineSurvival = field(default_factory=OnlineSurvival)

    def foresee(self, sequences: Sequence[LiveSequence]) -> None:
        """Tells those whose proposal has just come how far it will be right, as far as can be known."""
        if self.calibration.num_records < MIN_RECORDS:
            return
        proposals = [(sequence, sequence.proposal) for sequence in sequences if sequence.proposal is not None]
        found = self.calibration.survival([proposal.confidences for _, proposal in proposals])
        for (sequence, _), survival in zip(proposals, found, strict=True):
            sequence.survival = survival

    def replied(self, reply_s: float) -> None:
        self.reply_s = reply_s if self.reply_s is None else _mean(self.reply_s, reply_s)
        self.view = replace(self.view, reply_s=self.reply_s)

    def restarted(self) -> None:
        """A new process answers under the name: how fast is not known yet."""
        self.reply_s = None
        self.view = replace(self.view, reply_s=UNKNOWN_DRAFTER.reply_s)

    def late(self, waited_s: float) -> None:
        """No reply within ``waited_s``: all that is known of the reply time is that it is longer."""
        self.num_late += 1
        known = self.reply_s if self.reply_s is not None else 0.0
        if known < 2 * waited_s:
            self.reply_s = _mean(known, 2 * waited_s, 0.5)
            self.view = replace(self.view, reply_s=self.reply_s)

    def judged(self, judgement: Judgement, num_verified: int) -> None:
        """A proposal was held against what was committed. Tokens that were not verified teach, too: else a drafter that is
        not worth verifying would never be found to have become so."""
        view = self.view
        acceptance = view.acceptance
        # Given that those before it were right: num_right successes, and one failure unless all were right.
        for _ in range(judgement.num_right):
            acceptance = _mean(acceptance, 1.0, SMOOTHING / 4)
        if judgement.num_right < judgement.num_judged:
            acceptance = _mean(acceptance, 0.0, SMOOTHING / 4)
        accepted_per_round = view.accepted_per_round
        if num_verified or not judgement.num_judged:  # of one that was not verified it is not known how far it was right
            accepted_per_round = _mean(accepted_per_round, float(min(judgement.num_right, num_verified)))
        self.view = replace(view, accepted_per_round=accepted_per_round, acceptance=acceptance)
        self.calibration.record(judgement.confidences, judgement.num_right)


@dataclass(slots=True)
class Telemetry:
    """The round owns it. Other threads may read single fields, and take observations."""

    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    num_passes: int = 0
    num_rows: int = 0
    num_committed: int = 0
    num_preempted: int = 0
    step_s: float | None = None
    tokens_per_s: float = 0.0
    _window_start_s: float | None = None
    _window_tokens: int = 0
    _committed_s: dict[str, float] = field(default_factory=dict)  # when a live request last committed
    _observations: dict[tuple[str, str], Observation] = field(default_factory=dict)
    _taking: threading.Lock = field(default_factory=threading.Lock)  # guards _observations

    def drafter(self, name: str) -> DrafterStats:
        return self.drafters.setdefault(name, DrafterStats())

    def record(self, num_rows: int, commits: Iterable[Commit], step_s: float, now_s: float) -> None:
        self.num_passes += 1
        self.num_rows += num_rows
        self.step_s = step_s if self.step_s is None else _mean(self.step_s, step_s)
        for commit in commits:
            self.num_committed += len(commit.token_ids)
            self._window_tokens += len(commit.token_ids)
            if commit.drafter is not None:
                stats = self.drafter(commit.drafter)
                stats.num_proposed += commit.num_proposed
                stats.num_accepted += commit.num_accepted
        if self._window_start_s is None:
            self._window_start_s, self._window_tokens = now_s, 0
        elif now_s - self._window_start_s >= 1.0:
            self.tokens_per_s = self._window_tokens / (now_s - self._window_start_s)
            self._window_start_s, self._window_tokens = now_s, 0

    def forget(self, request_id: str) -> None:
        """A request ended, or is to be computed anew: the time until it commits again says nothing of its drafter."""
        self._committed_s.pop(request_id, None)

    def idle(self) -> None:
        self.tokens_per_s = 0.0
        self._window_start_s = None

    def take_observations(self) -> tuple[Observation, ...]:
        with self._taking:
            taken, self._observations = self._observations, {}
        return tuple(taken.values())

    def observe(self, commit: Commit, drafter: str, now_s: float) -> None:
        """A round of a request that ``drafter`` follows, whether its proposal came in time or not."""
        elapsed_s = now_s - self._committed_s.get(commit.request_id, now_s - (self.step_s or 0.0))
        self._committed_s[commit.request_id] = now_s
        with self._taking:
            self._add(commit, drafter, elapsed_s)

    def _add(self, commit: Commit, drafter: str, elapsed_s: float) -> None:
        key = (commit.request_id, drafter)
        known = self._observations.get(key)
        if known is None:
            if len(self._observations) >= MAX_OBSERVATIONS:  # nobody collects: the oldest are the least missed
                self._observations.pop(next(iter(self._observations)))
            known = Observation(commit.request_id, drafter, 0, 0, 0, 0, 0.0)
        self._observations[key] = Observation(
            commit.request_id,
            drafter,
            known.num_rounds + 1,
            known.num_proposed + commit.num_proposed,
            known.num_accepted + commit.num_accepted,
            known.num_committed + len(commit.token_ids),
            known.elapsed_s + elapsed_s,
        )
