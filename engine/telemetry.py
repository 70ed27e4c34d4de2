"""What the round measures of itself and of its drafters."""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from cluster import messages
from cluster.counts import Attainment, Histogram
from cluster.messages import LevelReport
from cluster.types import Commit
from router.assignment import NO_POSITIONS, Observation, Positions, ScoreCounts, count_draft
from router.estimates.decayed import RECENT, DecayedMean
from router.estimates.drafter_stats import DrafterStats, Judgement
from router.scaling.report import NOTHING_SERVED, ServedCounts

logger = logging.getLogger(__name__)

MAX_OBSERVATIONS = 65536
MAX_LEVELS = 1024  # reports, each a sum over a period
LONGEST_ROUND = 32.0  # steps that a round of a request counts for at most: the machine may have been suspended
# Upper bounds of histograms.
ROUND_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
OCTAVES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


class Observing:
    """A context in which an error is counted and logged, each time that their number has doubled, and suppressed: what a
    target measures, traces and learns changes no token. What decides tokens, blocks or commits lies outside."""

    def __init__(self) -> None:
        self.num_failed = 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.num_failed += 1
        if self.num_failed & (self.num_failed - 1) == 0:
            text = "a defect: an observation of a round has failed (%d failures since the start)"
            logger.error(text, self.num_failed, exc_info=error)
        return True


@dataclass(slots=True)
class _Tally:
    """An observation of one request and drafter while it grows."""

    num_rounds: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    elapsed_s: float = 0.0
    num_missed: int = 0
    num_reached: list[int] = field(default_factory=list)
    num_right: list[int] = field(default_factory=list)

    def observation(self, request_id: str, drafter: str) -> Observation:
        counts = self.num_rounds, self.num_proposed, self.num_accepted, self.num_committed
        positions = Positions(tuple(self.num_reached), tuple(self.num_right))
        return Observation(request_id, drafter, *counts, self.elapsed_s, positions, self.num_missed)


@dataclass(slots=True)
class Telemetry:
    """The round owns it, and calls it ``observing``. Other threads may read single fields and call the ``take_`` methods."""

    observing: Observing = field(default_factory=Observing)
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    num_passes: int = 0
    num_rows: int = 0
    num_committed: int = 0
    num_preempted: int = 0
    num_prompt_tokens: int = 0  # of requests with a first token
    num_cached_tokens: int = 0  # of them, found in the prefix cache
    served: ServedCounts = NOTHING_SERVED  # replaced as a whole
    attainment: Attainment = field(default_factory=Attainment)
    step_s: DecayedMean = field(default_factory=lambda: DecayedMean(RECENT))
    tokens_per_s: float = 0.0
    rounds_s: Histogram = field(default_factory=lambda: Histogram(ROUND_S))
    rows: Histogram = field(default_factory=lambda: Histogram(OCTAVES))  # of a pass
    batch: Histogram = field(default_factory=lambda: Histogram(OCTAVES))  # requests with a commit in a round
    _window_start_s: float | None = None
    _window_tokens: int = 0
    _committed_s: dict[str, float] = field(default_factory=dict)  # when each live request last committed
    _observations: dict[tuple[str, str], _Tally] = field(default_factory=dict)
    _scores: dict[tuple[str, str], Positions] = field(default_factory=dict)
    _levels: deque[LevelReport] = field(default_factory=lambda: deque(maxlen=MAX_LEVELS))
    _taking: threading.Lock = field(default_factory=threading.Lock)  # guards the three above

    @property
    def num_failed_observations(self) -> int:
        return self.observing.num_failed

    def drafter(self, name: str) -> DrafterStats:
        stats = self.drafters.get(name)
        if stats is None:  # not setdefault: making one is costly
            stats = self.drafters[name] = DrafterStats()
        return stats

    def record(self, num_rows: int, commits: Sequence[Commit], step_s: float, now_s: float) -> None:
        self.num_passes += 1
        self.num_rows += num_rows
        self.rows.note(num_rows)
        self.batch.note(len(commits))
        self.step_s.add(step_s)
        self.rounds_s.note(step_s)
        num_tokens = sum([len(commit.token_ids) for commit in commits])
        self.num_committed += num_tokens
        self._window_tokens += num_tokens
        for commit in commits:
            if commit.prefill is not None:
                self.num_prompt_tokens += commit.base_len
                self.num_cached_tokens += commit.prefill.num_cached_tokens
            if commit.drafter is not None:
                stats = self.drafter(commit.drafter)
                stats.num_proposed += commit.num_proposed
                stats.num_accepted += commit.num_accepted
                if commit.num_proposed:
                    stats.tally.note_verified(commit.num_proposed, commit.num_accepted)
        if self._window_start_s is None:
            self._window_start_s, self._window_tokens = now_s, 0
        elif now_s - self._window_start_s >= 1.0:
            self.tokens_per_s = self._window_tokens / (now_s - self._window_start_s)
            self._window_start_s, self._window_tokens = now_s, 0

    def forget(self, request_id: str) -> None:
        """The time until the next commit of this request is not counted: it ended, moved or was preempted."""
        self._committed_s.pop(request_id, None)

    def arrived(self, prompt_len: int) -> None:
        counts = self.served
        num_arrived, num_tokens = counts.num_arrived + 1, counts.num_prompt_tokens + prompt_len
        self.served = replace(counts, num_arrived=num_arrived, num_prompt_tokens=num_tokens)

    def ended(self, output_len: int) -> None:
        counts = self.served
        num_ended, num_tokens = counts.num_ended + 1, counts.num_output_tokens + output_len
        self.served = replace(counts, num_ended=num_ended, num_output_tokens=num_tokens)

    def idle(self) -> None:
        self.tokens_per_s = 0.0
        self._window_start_s = None

    def note_scores(self, drafter: str, scores: Iterable[messages.DraftScore]) -> None:
        """Counterfactual scores of a drafter, for requests that others draft for."""
        with self._taking:
            for score in scores:
                key = (score.request_id, drafter)
                if key not in self._scores and len(self._scores) >= MAX_OBSERVATIONS:
                    self._scores.pop(next(iter(self._scores)))
                positions = self._scores.get(key, NO_POSITIONS)
                self._scores[key] = positions.plus(score.num_matched, score.num_scored > score.num_matched)

    def take_scores(self) -> tuple[ScoreCounts, ...]:
        with self._taking:
            taken, self._scores = self._scores, {}
        return tuple(ScoreCounts(request_id, drafter, positions) for (request_id, drafter), positions in taken.items())

    def note_levels(self, reports: Iterable[LevelReport]) -> None:
        """Reports of the models in a drafter's chains."""
        with self._taking:
            self._levels.extend(reports)

    def take_levels(self) -> tuple[LevelReport, ...]:
        with self._taking:
            taken = tuple(self._levels)
            self._levels.clear()
        return taken

    def take_observations(self) -> tuple[Observation, ...]:
        with self._taking:
            taken, self._observations = self._observations, {}
        return tuple(tally.observation(*key) for key, tally in taken.items())

    def count_round(
        self,
        commit: Commit,
        drafter: str,
        judgement: Judgement | None = None,
        draft_len: int = 0,
        expected: bool = False,
        now_s: float = 0.0,
    ) -> None:
        """A round of a request that ``drafter`` follows, and may propose ``draft_len`` tokens for. ``judgement``: of the
        proposal that was at hand, if one was. ``expected``: one should have been."""
        before_s = self._committed_s.get(commit.request_id)
        self._committed_s[commit.request_id] = now_s
        key = (commit.request_id, drafter)
        with self._taking:
            observations = self._observations
            tally = observations.get(key)
            if tally is None:
                if len(observations) >= MAX_OBSERVATIONS:  # no router collects them: drop the oldest
                    observations.pop(next(iter(observations)))
                tally = observations[key] = _Tally()
            num_committed = len(commit.token_ids)
            tally.num_rounds += 1
            tally.num_proposed += commit.num_proposed
            tally.num_accepted += commit.num_accepted
            tally.num_committed += num_committed
            step_s, round_s = self.step_s.value, 0.0 if before_s is None else now_s - before_s
            tally.elapsed_s += step_s if before_s is None else min(round_s, LONGEST_ROUND * step_s or round_s)
            if judgement is not None:
                failed = judgement.failed(num_committed, draft_len, ended=commit.finish is not None)
                count_draft(tally.num_reached, tally.num_right, judgement.num_right, failed)
            elif expected:
                tally.num_missed += 1
