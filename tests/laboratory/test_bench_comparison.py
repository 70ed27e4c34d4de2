"""The verdict on two runs: equal, apart by a rounding tie, or different."""

import numpy as np
import pytest

from benchmarks.comparison import Verdict, compare
from cluster.types import Commit, FinishReason, Request, TokenLogprobs
from engine.noise import gumbel, noise_keys
from tests.support.requests import a_request

PROMPT = (1, 2, 3)


def _request(temperature: float = 0.0, seed: int = 0) -> Request:
    return a_request("r", PROMPT, max_tokens=8, temperature=temperature, seed=seed, top_logprobs=5)


def _run(
    tokens: list[int], top: dict[int, float], finish: FinishReason = FinishReason.LENGTH, split: int = 1
) -> list[Commit]:
    """A run that reports the same ``top`` at every position, in commits of ``split`` tokens."""
    entries = tuple(sorted(top.items(), key=lambda item: -item[1]))
    commits = []
    for i in range(0, len(tokens), split):
        part = tuple(tokens[i : i + split])
        logprobs = tuple(TokenLogprobs(top.get(token, -20.0), entries) for token in part)
        last = i + split >= len(tokens)
        commits.append(Commit("r", len(PROMPT) + i, part, logprobs=logprobs, finish=finish if last else None))
    return commits


CLEAR = {7: -0.1, 8: -3.0}
CLOSE = {7: -0.70000, 8: -0.70004}


def test_equal_tokens_are_equal_however_they_were_committed() -> None:
    assert compare(_request(), _run([7, 7, 8], CLEAR), _run([7, 7, 8], CLEAR, split=2)).verdict is Verdict.EQUAL


def test_another_end_is_different() -> None:
    stopped = _run([7, 8], CLEAR, FinishReason.STOP)
    assert compare(_request(), _run([7, 8], CLEAR), stopped).verdict is Verdict.DIFFERENT
    shorter = compare(_request(), _run([7, 8, 7], CLEAR), _run([7, 8], CLEAR))
    assert (shorter.verdict, shorter.position) == (Verdict.DIFFERENT, 2)


def test_a_close_race_at_the_first_difference_is_a_tie() -> None:
    comparison = compare(_request(), _run([7, 7, 8, 9], CLOSE), _run([7, 8, 1, 1], CLOSE, split=3))
    assert (comparison.verdict, comparison.position) == (Verdict.TIE, 1)


@pytest.mark.parametrize(("plain", "other"), [(CLEAR, CLOSE), (CLOSE, CLEAR), (CLEAR, CLEAR)])
def test_a_clear_race_in_either_run_is_different(plain: dict[int, float], other: dict[int, float]) -> None:
    comparison = compare(_request(), _run([7, 7], plain), _run([7, 8], other))
    assert comparison.verdict is Verdict.DIFFERENT
    assert comparison.gaps is not None
    assert max(comparison.gaps) == pytest.approx(2.9)
    assert "different at output token 1" in str(comparison)


def test_at_a_temperature_the_noise_decides_what_a_tie_is() -> None:
    """Log-probabilities are chosen so that with the noise of the position both candidates score the same."""
    request = _request(temperature=0.8, seed=5)
    noise = gumbel(noise_keys(np.array([5], np.uint64), np.array([len(PROMPT)])), np.array([7, 8]))
    tied = {7: -1.0, 8: float(-1.0 + 0.8 * (noise[0] - noise[1]))}
    assert compare(request, _run([7], tied), _run([8], tied)).verdict is Verdict.TIE
    assert compare(_request(), _run([7], tied), _run([8], tied)).verdict is Verdict.DIFFERENT
    untied = {**tied, 8: tied[8] - 0.01}
    assert compare(request, _run([7], untied), _run([8], untied)).verdict is Verdict.DIFFERENT


def test_a_chosen_token_outside_the_reported_ones_counts_as_a_candidate() -> None:
    """Token 9 was chosen with log-probability -20: far behind, so no tie, whatever the reported two do."""
    comparison = compare(_request(), _run([7], {7: -0.1, 8: -15.0}), _run([9], {7: -0.1, 8: -15.0}))
    assert comparison.verdict is Verdict.DIFFERENT
