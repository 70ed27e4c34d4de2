"""What a gateway needs to continue a request at another target when the first one is lost.

The output depends on target, prompt, parameters and seed alone (DESIGN idea 1), so another replica continues it from the
tokens delivered so far: they count as its output for max_tokens, min_tokens, penalties and the grammar.
"""

from dataclasses import replace

from cluster.types import Commit, Request, Slo

MAX_RESUMPTIONS = 3  # of one request; it may itself be what ends targets


class Resumption:
    """One per request. ``num`` counts its resumptions."""

    def __init__(self, request: Request) -> None:
        self.num = 0
        self._request = request
        self._output: list[int] = []
        self._num_scored = 0  # prompt tokens whose log-probabilities were delivered
        self._num_scored_again = 0  # by the present target

    def deliver(self, commit: Commit) -> Commit | None:
        """Notes a commit. Returns what the caller has not had of it; None: all is known."""
        self._output += commit.token_ids
        if not commit.prompt_logprobs:
            return commit
        new = commit.prompt_logprobs[max(0, self._num_scored - self._num_scored_again) :]
        self._num_scored_again += len(commit.prompt_logprobs)
        self._num_scored += len(new)
        if not (new or commit.token_ids or commit.finish):
            return None
        return replace(commit, prompt_logprobs=new)

    @property
    def is_possible(self) -> bool:
        return self.num < MAX_RESUMPTIONS

    def resume(self) -> Request:
        """What to submit to another target. Its first token and prompt log-probabilities were delivered if it has output."""
        self.num += 1
        self._num_scored_again = 0
        request = self._request
        if not self._output:
            return request
        slo = Slo(None, request.slo.tpot_s, request.slo.name)
        sampling = replace(request.sampling, prompt_logprobs=None)
        return replace(request, sampling=sampling, slo=slo, output_token_ids=tuple(self._output))
