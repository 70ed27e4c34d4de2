"""What a gateway needs to continue a request at another target when the first one is lost.

The output depends on target, prompt, parameters and seed alone (DESIGN idea 1), so another replica continues it from the
tokens delivered so far: they count as its output for max_tokens, min_tokens, penalties and the grammar.
"""

from collections.abc import Mapping
from dataclasses import replace

from cluster.types import Commit, FinishReason, Request, Slo

MAX_DEATHS = 4  # of targets under one request; it may itself be what ends them


class Resumption:
    """One per request. ``num_deaths``: targets that failed under it; ``num_fruitless``: those since its last token."""

    def __init__(self, request: Request) -> None:
        self.num_deaths = self.num_fruitless = 0
        self._request = request
        self._output: list[int] = []
        self._num_scored = 0  # prompt tokens whose log-probabilities were delivered
        self._num_scored_again = 0  # by the present target

    def deliver(self, commit: Commit) -> Commit | None:
        """Notes a commit. Returns what the caller has not had of it; None: all is known."""
        self._output += commit.token_ids
        if commit.token_ids:
            self.num_fruitless = 0
        if not commit.prompt_logprobs:
            return commit
        new = commit.prompt_logprobs[max(0, self._num_scored - self._num_scored_again) :]
        self._num_scored_again += len(commit.prompt_logprobs)
        self._num_scored += len(new)
        if not (new or commit.token_ids or commit.finish):
            return None
        return replace(commit, prompt_logprobs=new)

    def note_death(self, reason: str, suspects: Mapping[str, int]) -> Commit | None:
        """Its target failed. Returns its last commit if it is probably the cause.

        Args:
            suspects: requests that had no token of that target, but had lost others before, and ``num_fruitless`` of each.
        """
        self.num_deaths += 1
        self.num_fruitless += 1
        request_id, committed_len = self._request.id, len(self._request.prompt_token_ids) + len(self._output)
        others = [num for key, num in suspects.items() if key != request_id]
        if self.num_deaths < MAX_DEATHS and suspects.get(request_id, 0) <= max(others, default=0):
            return None
        error = f"{self.num_deaths} targets failed while they ran it, so it is not sent to another; the last: {reason}"
        return Commit(request_id, committed_len, (), finish=FinishReason.ERROR, error=error)

    def resume(self) -> Request:
        """What to submit to another target. Its first token and prompt log-probabilities were delivered if it has output."""
        self._num_scored_again = 0
        request = replace(self._request, was_admitted=True)
        if not self._output:
            return request
        slo = Slo(None, request.slo.tpot_s, request.slo.name)
        sampling = replace(request.sampling, prompt_logprobs=None)
        return replace(request, sampling=sampling, slo=slo, output_token_ids=tuple(self._output))
