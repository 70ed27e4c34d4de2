"""How long answers of this process took, how they ended, and what of their prompts was cached: sums between two samples."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.types import Commit, FinishReason
from deploy.api.choice import Choice

RATIO = 1.1  # of the bounds of one bucket of times, so that a percentile is right within 5%
_LEAST_S = 1e-4

Times = Mapping[int, int]  # number of answers by bucket; bucket i holds times around RATIO ** (i + 0.5) seconds


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Of the answers that ended in a period. An answer cut off by its client has no end-to-end time."""

    ttft: Times = field(default_factory=dict)
    tpot: Times = field(default_factory=dict)
    e2e: Times = field(default_factory=dict)
    num_complete: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0  # looked up in the prefix cache
    num_cached_tokens: int = 0


class Answers:
    """Counts until ``take``. Used from one event loop."""

    def __init__(self) -> None:
        self._begin()

    def note(self, commit: Commit) -> None:
        """The first commit of a request tells how much of its prompt was cached."""
        if commit.prefill is not None:
            self._num_prompt_tokens += commit.base_len
            self._num_cached_tokens += commit.prefill.num_cached_tokens

    def end(self, choice: Choice) -> None:
        """A choice has ended, complete or not. One that was refused before its first token is counted by its outcome."""
        arrival_s, first_s, last_s = choice.request.arrival_s, choice.first_token_s, choice.last_token_s
        if choice.finish is not None or choice.failed or first_s is not None:
            self._outcomes[choice.outcome] += 1
        if first_s is None or last_s is None:
            return
        self._ttft[_bucket(first_s - arrival_s)] += 1
        if choice.num_tokens > 1:
            self._tpot[_bucket((last_s - first_s) / (choice.num_tokens - 1))] += 1
        if choice.finish is not None:
            self._e2e[_bucket(last_s - arrival_s)] += 1

    def take(self) -> AnswerCounts:
        """What was counted since the last call."""
        outcomes = self._outcomes
        num_failed, num_aborted = outcomes[FinishReason.ERROR], outcomes[FinishReason.ABORT]
        counts = AnswerCounts(
            ttft=dict(self._ttft),
            tpot=dict(self._tpot),
            e2e=dict(self._e2e),
            num_complete=outcomes.total() - num_failed - num_aborted,
            num_failed=num_failed,
            num_aborted=num_aborted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )
        self._begin()
        return counts

    def _begin(self) -> None:
        self._ttft, self._tpot, self._e2e = Counter[int](), Counter[int](), Counter[int]()
        self._outcomes = Counter[FinishReason]()
        self._num_prompt_tokens = self._num_cached_tokens = 0


def _bucket(seconds: float) -> int:
    return math.floor(math.log(max(seconds, _LEAST_S)) / math.log(RATIO))
