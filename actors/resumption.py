"""What a gateway needs to continue a request at another target when the first one is lost.

The output depends on target, prompt, parameters and seed alone (docs/architecture.md#principles), so another replica
continues it from the tokens delivered so far, which count as its output for max_tokens, min_tokens, penalties and grammar.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from cluster.types import Commit, FinishReason, Request, Slo

MAX_DEATHS = 4  # of targets under one request, or losses in a row without a token; it may itself be what ends them


class Resumption:
    """One per request. ``note_death`` of each target that failed under it, then see whether it ``is_suspect``."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._output: list[int] = []
        self._num_scored = 0  # prompt tokens whose log-probabilities were delivered
        self._num_scored_again = 0  # by the present target
        self._earlier: list[str] = []  # instances of the targets that failed under it before its last token
        self._fruitless: list[str] = []  # and since
        self._num_discounted = 0  # of the latter, whose links alone had failed
        self._suspicion = 0  # deaths since its last token, more than any other request that the last target ran has

    def deliver(self, commit: Commit) -> Commit | None:
        """Notes a commit. Returns what the caller has not had of it; None: all is known."""
        self._output += commit.token_ids
        if commit.token_ids:
            self._earlier += self._fruitless
            self._fruitless, self._num_discounted = [], 0
        if not commit.prompt_logprobs:
            return commit
        new = commit.prompt_logprobs[max(0, self._num_scored - self._num_scored_again) :]
        self._num_scored_again += len(commit.prompt_logprobs)
        self._num_scored += len(new)
        if not (new or commit.token_ids or commit.finish):
            return None
        return replace(commit, prompt_logprobs=new)

    @property
    def num_fruitless(self) -> int:
        """Losses of its target since its last token."""
        return len(self._fruitless)

    def note_death(self, suspects: Mapping[str, int], instance: str) -> None:
        """Its target failed.

        Args:
            instance: of the target's process, as of its Hello.
            suspects: requests that had no token of that target, but had lost others before, and ``num_fruitless`` of each.
        """
        self._fruitless.append(instance)
        others = [num for key, num in suspects.items() if key != self._request.id]
        self._suspicion = suspects.get(self._request.id, 0) - max(others, default=0)

    @property
    def is_suspect(self) -> bool:
        """It is probably what makes its targets fail, or it was lost so often without a token, whatever the cause."""
        return max(self._num_deaths, self.num_fruitless) >= MAX_DEATHS or self._suspicion > 0

    def discount(self, alive: Collection[str]) -> bool:
        """Removes the deaths of targets whose processes are linked again: their links alone had failed. Since its last token
        at most MAX_DEATHS of them, as it may be what breaks links. Returns whether it is no suspect any more."""
        self._earlier = [instance for instance in self._earlier if instance not in alive]
        for number in reversed(range(len(self._fruitless))):
            if self._fruitless[number] in alive and self._num_discounted < MAX_DEATHS:
                is_last = number == len(self._fruitless) - 1
                del self._fruitless[number]
                self._num_discounted += 1
                self._suspicion = 0 if is_last else self._suspicion - 1  # without the last loss there is no new evidence
        return not self.is_suspect

    def error(self, reason: str) -> Commit:
        """Its last commit. ``reason``: why the last target failed."""
        committed_len = len(self._request.prompt_token_ids) + len(self._output)
        num_losses = len(self._earlier) + len(self._fruitless) + self._num_discounted
        error = f"its targets were lost {num_losses} times while they ran it, so it is not sent again; the last: {reason}"
        return Commit(self._request.id, committed_len, (), finish=FinishReason.ERROR, error=error)

    @property
    def _num_deaths(self) -> int:
        """A process that was lost several times has failed once at most."""
        known = [instance for instance in (*self._earlier, *self._fruitless) if instance]
        return len(self._earlier) + len(self._fruitless) - len(known) + len(set(known))

    def resume(self) -> Request:
        """What to submit to another target. Its first token and prompt log-probabilities were delivered if it has output."""
        self._num_scored_again = 0
        request = replace(self._request, was_admitted=True)
        if not self._output:
            return request
        slo = Slo(None, request.slo.tpot_s, request.slo.name)
        sampling = replace(request.sampling, prompt_logprobs=None)
        return replace(request, sampling=sampling, slo=slo, output_token_ids=tuple(self._output))


def aged(request: Request) -> Request:
    """With what is left of its TTFT objective: targets count from when it reaches them."""
    slo = request.slo
    if slo.ttft_s is None:
        return request
    left_s = max(0.0, request.arrival_s + slo.ttft_s - time.monotonic())
    return replace(request, slo=replace(slo, ttft_s=min(left_s, slo.ttft_s)))
