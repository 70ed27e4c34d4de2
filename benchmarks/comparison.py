"""Compares two runs of one request, and decides whether rounding explains a difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cluster.types import Commit, Request, TokenLogprobs
from engine.noise import gumbel, noise_keys

TIE_MARGIN = 1e-4


class Verdict(StrEnum):
    EQUAL = "equal"
    TIE = "tie"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """``position``: the output token, counted from 0, at which two runs first differ; None if they do not.

    ``gaps``: the lead of the best candidate over the second at that position, in each run; None where a run had ended.
    """

    verdict: Verdict
    position: int | None = None
    gaps: tuple[float, float] | None = None

    def __str__(self) -> str:
        where = "" if self.position is None else f" at output token {self.position}"
        by = "" if self.gaps is None else f", the best candidate ahead by {self.gaps[0]:.2g} and {self.gaps[1]:.2g}"
        return f"{self.verdict}{where}{by}"


def compare(request: Request, plain: Sequence[Commit], other: Sequence[Commit]) -> RunComparison:
    """Equal tokens and finish reason; otherwise a tie if the two best candidates lie within TIE_MARGIN at the first
    difference in both runs. The plain run must have requested ``top_logprobs``, without penalties or filters."""
    ours, theirs = _tokens(plain), _tokens(other)
    if ours == theirs and plain[-1].finish == other[-1].finish:
        return RunComparison(Verdict.EQUAL)
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if position == shorter:
        return RunComparison(Verdict.DIFFERENT, position)
    reporting = other if any(commit.logprobs for commit in other) else plain
    gaps = (_gap(request, plain, position), _gap(request, reporting, position))
    return RunComparison(Verdict.TIE if max(gaps) <= TIE_MARGIN else Verdict.DIFFERENT, position, gaps)


def _tokens(commits: Sequence[Commit]) -> list[int]:
    return [token for commit in commits for token in commit.token_ids]


def _gap(request: Request, commits: Sequence[Commit], position: int) -> float:
    """The lead of the best candidate in the score that selects tokens: log-probability at temperature 0, otherwise
    log-probability over temperature plus noise. Unreported candidates are ignored, so the gap is never understated."""
    logprobs: list[TokenLogprobs] = [entry for commit in commits for entry in commit.logprobs]
    candidates = dict(logprobs[position].top)
    candidates[_tokens(commits)[position]] = logprobs[position].logprob
    scores = np.array(list(candidates.values()))
    sampling = request.sampling
    if sampling.temperature > 0:
        at = len(request.prompt_token_ids) + position
        keys = noise_keys(np.array([sampling.seed], np.uint64), np.array([at]))
        scores = scores / sampling.temperature + gumbel(keys, np.array(list(candidates)))
    second, best = np.sort(scores)[-2:]
    return float(best - second)
