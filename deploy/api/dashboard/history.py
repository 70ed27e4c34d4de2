"""The cluster's recent past: a sample of its status every few seconds."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.client import ClusterStatus
from cluster.errors import LinkClosed
from cluster.slo import summed
from deploy.api.dashboard.answers import AnswerCounts, Answers

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
MAX_SAMPLES = 600  # 20 minutes


@dataclass(frozen=True, slots=True)
class Sample:
    """Gauges, and counters since the targets' start, which fall when a target restarts."""

    number: int
    at_s: float
    policy: str
    num_running: int
    num_waiting: int
    num_queued: int  # calls, in this process
    tokens_per_s: float
    kv_usage: float  # share of the KV cache's blocks in use
    num_targets: int
    num_ready_targets: int
    num_drafters: int
    num_ready_drafters: int
    num_proposed: int
    num_accepted: int
    num_rounds: int  # of requests that only decoded
    decode_s: float
    plain_s: float
    rejected_s: float
    slo: dict[str, tuple[int, int, int]]  # by class: answers, those that met their objectives, refused requests
    answers: AnswerCounts  # of this process, since the sample before it


class History:
    """``status`` and ``num_queued`` are asked for each sample. A cluster that does not answer leaves a gap."""

    def __init__(self, status: Callable[[], Awaitable[ClusterStatus]], num_queued: Callable[[], int]) -> None:
        self.answers = Answers()
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
        self._num_taken += 1
        targets, drafters = status.targets, status.drafters
        num_blocks = sum(one.num_blocks for one in targets)
        num_free = sum(one.num_free_blocks for one in targets)
        counts = summed(tuple(one for target in targets for one in target.slo))
        self._samples.append(
            Sample(
                number=self._num_taken,
                at_s=now_s,
                policy=status.policy,
                num_running=sum(one.num_running for one in targets),
                num_waiting=sum(one.num_waiting for one in targets),
                num_queued=self._num_queued(),
                tokens_per_s=sum(one.tokens_per_s for one in targets),
                kv_usage=1 - num_free / num_blocks if num_blocks else 0.0,
                num_targets=len(targets),
                num_ready_targets=sum(one.state == "ready" for one in targets),
                num_drafters=len(drafters),
                num_ready_drafters=sum(one.state == "ready" for one in drafters),
                num_proposed=sum(one.num_proposed for one in drafters),
                num_accepted=sum(one.num_accepted for one in drafters),
                num_rounds=sum(one.num_rounds for target in targets for one in target.drafting.by_load),
                decode_s=sum(one.drafting.decode_s for one in targets),
                plain_s=sum(one.drafting.plain_s for one in targets),
                rejected_s=sum(one.drafting.rejected_s for one in targets),
                slo={one.name: (one.num_answers, one.num_met, one.num_refused) for one in counts},
                answers=self.answers.take(),
            )
        )

    def samples(self, after: int) -> list[Sample]:
        """Those with a number above ``after``, in order."""
        return [one for one in self._samples if one.number > after]
