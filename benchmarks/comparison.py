"""Whether two runs of one request are the same, and if not, whether rounding is to blame."""

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
class Comparison:
    """``position`` counts output tokens from 0 and is where two runs first differ; None where they do not.

    ``gaps``: by how much the best candidate led the second there, in either run; None where a run had already ended.
    """

    verdict: Verdict
    position: int | None = None
    gaps: tuple[float, float] | None = None

    def __str__(self) -> str:
        where = "" if self.position is None else f" at output token {self.position}"
        by = "" if self.gaps is None else f", the best candidate ahead by {self.gaps[0]:.2g} and {self.gaps[1]:.2g}"
        return f"{self.verdict}{where}{by}"


def compare(request: Request, plain: Sequence[Commit], other: Sequence[Commit]) -> Comparison:
    """Equal tokens and the same end; else a tie if, where they first differ, the two best candidates lie within TIE_MARGIN
    of each other in both runs. Both must have asked for ``top_logprobs`` and for neither penalties nor filters."""
    ours, theirs = _tokens(plain), _tokens(other)
    if ours == theirs and plain[-1].finish == other[-1].finish:
        return Comparison(Verdict.EQUAL)
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if position == shorter:
        return Comparison(Verdict.DIFFERENT, position)
    gaps = (_gap(request, plain, position), _gap(request, other, position))
    return Comparison(Verdict.TIE if max(gaps) <= TIE_MARGIN else Verdict.DIFFERENT, position, gaps)


def _tokens(commits: Sequence[Commit]) -> list[int]:
    return [token for commit in commits for token in commit.token_ids]


def _gap(request: Request, commits: Sequence[Commit], position: int) -> float:
    """The lead of the best candidate, in what the token was chosen by: log-probability at temperature 0, else that over the
    temperature plus the noise. Candidates beyond those reported are not seen, so the gap is never understated."""
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
