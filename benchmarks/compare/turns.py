"""Turns of the arms over the same requests: a closed loop of so many streams, or arrivals in bursts."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.compare.arms import POOL
from benchmarks.compare.systems import RunningArm
from benchmarks.load import LoadRequest, TimedAnswer, run_arrivals, run_streams, tokens_per_s
from cluster.errors import OutriderError

AWAKE_S = 180.0  # Ray Serve may start HAProxy and its replicas anew after a pause of minutes
AWAKE_POLL_S = 0.2
AWAKE_PROMPT = (253, 260, 1002, 28) * 8
AWAKE_TOKENS = 16


class TurnFailed(OutriderError):
    """A request was not answered, so that there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one arm did with the requests of one turn."""

    tokens_per_s: float
    tpot_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    texts: tuple[str, ...]

    @property
    def mean_tpot_s(self) -> float:
        return statistics.fmean(self.tpot_s)

    @classmethod
    def of(cls, arm: str, answers: Sequence[TimedAnswer]) -> "Turn":
        for answer in answers:
            if answer.error is not None or not answer.pieces_s:
                raise TurnFailed(f"{arm}: {answer.error or 'an empty answer'}")
        return cls(
            tokens_per_s(answers),
            tuple(answer.tpot_s for answer in answers if answer.tpot_s is not None),
            tuple(answer.ttft_s for answer in answers),
            tuple(answer.text for answer in answers),
        )


@contextmanager
def awake(arm: RunningArm) -> Iterator[None]:
    """Inside, its server runs and has answered. Raises TurnFailed if it does not within AWAKE_S."""
    arm.process.resume()
    try:
        asyncio.run(_wait_answers(arm))
        yield
    finally:
        arm.process.suspend()


async def _wait_answers(arm: RunningArm) -> None:
    """Links between Outrider's processes have counted as down since nothing was heard on them, and are made anew. A prompt
    that repeats itself makes every kind of drafter draft."""
    ask = LoadRequest("awake", AWAKE_PROMPT, AWAKE_TOKENS, drafting=arm.arm.request_drafting)
    must_draft = arm.arm.drafting == POOL and arm.must_draft
    end_s = time.monotonic() + AWAKE_S
    while True:
        answer = await arm.target.ask(ask)
        if answer.error is None and (answer.num_proposed or not must_draft):
            return
        if time.monotonic() > end_s:
            raise TurnFailed(f"{arm.arm.name} does not answer {AWAKE_S:g} s after it went on: {answer.error or 'no drafts'}")
        await asyncio.sleep(AWAKE_POLL_S)


def closed_loop(arm: RunningArm, asks: Sequence[LoadRequest], num_streams: int) -> Turn:
    """``num_streams`` requests under way at a time, until all are answered."""
    own = [replace(ask, drafting=arm.arm.request_drafting) for ask in asks]
    with awake(arm):
        return Turn.of(arm.arm.name, asyncio.run(run_streams(arm.target.ask, own, num_streams)))


def open_loop(arm: RunningArm, asks: Sequence[LoadRequest], arrivals_s: Sequence[float]) -> Turn:
    """Each request is sent at its time, whatever is under way."""
    own = [(at_s, replace(ask, drafting=arm.arm.request_drafting)) for ask, at_s in zip(asks, arrivals_s, strict=True)]
    with awake(arm):
        return Turn.of(arm.arm.name, asyncio.run(run_arrivals(arm.target.ask, own)))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half of the range over it."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / 2 / median
