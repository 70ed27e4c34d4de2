"""The cluster's recent past: a sample of its status every few seconds."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.client import ClusterStatus
from cluster.errors import LinkClosed
from cluster.slo import summed
from cluster.types import Commit, FinishReason
from deploy.api.choice import Choice

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
MAX_SAMPLES = 600  # 20 minutes

RATIO = 1.1  # of the bounds of one bucket of times, so that a percentile is right within 5%
_LEAST_S = 1e-4

Sample = dict[str, Any]  # as the page reads it
Times = dict[int, int]  # number of answers by bucket; bucket i holds times around RATIO ** (i + 0.5) seconds


@dataclass(slots=True)
class AnswerCounts:
    """Of the answers that end in a period. An answer cut off by its client has no end-to-end time. Used from one event
    loop."""

    ttft: Times = field(default_factory=dict)
    tpot: Times = field(default_factory=dict)
    e2e: Times = field(default_factory=dict)
    num_complete: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0  # looked up in the prefix cache
    num_cached_tokens: int = 0

    def note(self, commit: Commit) -> None:
        """The first commit of a request tells how much of its prompt was cached."""
        if commit.prefill is not None:
            self.num_prompt_tokens += commit.base_len
            self.num_cached_tokens += commit.prefill.num_cached_tokens

    def end(self, choice: Choice) -> None:
        """A choice has ended, complete or not."""
        if choice.is_counted:
            self.num_failed += choice.outcome is FinishReason.ERROR
            self.num_aborted += choice.outcome is FinishReason.ABORT
            self.num_complete += choice.outcome not in (FinishReason.ERROR, FinishReason.ABORT)
        for times, seconds in ((self.ttft, choice.ttft_s), (self.tpot, choice.tpot_s), (self.e2e, choice.e2e_s)):
            if seconds is not None:
                bucket = _bucket(seconds)
                times[bucket] = times.get(bucket, 0) + 1


def _bucket(seconds: float) -> int:
    return math.floor(math.log(max(seconds, _LEAST_S)) / math.log(RATIO))


class History:
    """``status`` and ``num_queued`` are asked for each sample. A cluster that does not answer leaves a gap."""

    def __init__(self, status: Callable[[], Awaitable[ClusterStatus]], num_queued: Callable[[], int]) -> None:
        self.answers = AnswerCounts()  # since the newest sample
        self._status = status
        self._num_queued = num_queued
        self._num_taken = 0
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            try:
                self.take(await self._status(), time.monotonic())
            except LinkClosed as error:
                logger.debug("no sample of the cluster's status: %s", error)
            except Exception:
                # No caller awaits this task; without it the dashboard would lose its plots.
                logger.exception("the dashboard could not sample the cluster's status")
            await asyncio.sleep(INTERVAL_S)

    def take(self, status: ClusterStatus, now_s: float) -> None:
        """Samples gauges, and counters since the targets' start, which fall when a target restarts."""
        self._num_taken += 1
        targets, drafters = status.targets, status.drafters
        num_blocks = sum(one.num_blocks for one in targets)
        num_free = sum(one.num_free_blocks for one in targets)
        counts = summed(tuple(one for target in targets for one in target.slo))
        self._samples.append(
            {
                "number": self._num_taken,
                "at_s": now_s,
                "policy": status.policy,
                "num_running": sum(one.num_running for one in targets),
                "num_waiting": sum(one.num_waiting for one in targets),
                "num_queued": self._num_queued(),  # calls, in this process
                "tokens_per_s": sum(one.tokens_per_s for one in targets),
                "kv_usage": 1 - num_free / num_blocks if num_blocks else 0.0,
                "num_targets": len(targets),
                "num_ready_targets": sum(one.state == "ready" for one in targets),
                "num_drafters": len(drafters),
                "num_ready_drafters": sum(one.state == "ready" for one in drafters),
                "num_proposed": sum(one.num_proposed for one in drafters),
                "num_accepted": sum(one.num_accepted for one in drafters),
                # Of rounds that only decoded.
                "num_rounds": sum(one.num_rounds for target in targets for one in target.drafting.by_load),
                "decode_s": sum(one.drafting.decode_s for one in targets),
                "plain_s": sum(one.drafting.plain_s for one in targets),
                "rejected_s": sum(one.drafting.rejected_s for one in targets),
                "slo": {one.name: (one.num_answers, one.num_met, one.num_refused) for one in counts},
                "answers": asdict(self.answers),  # of this process, since the sample before
            }
        )
        self.answers = AnswerCounts()

    def samples(self, after: int) -> list[Sample]:
        """Those with a number above ``after``, in order."""
        return [one for one in self._samples if one["number"] > after]
