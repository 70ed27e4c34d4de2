"""Turns of the arms over the same requests: a closed loop of so many streams, or arrivals in bursts."""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.compare.systems import RunningArm
from benchmarks.load import LoadRequest, TimedAnswer, run_streams, tokens_per_s
from cluster.errors import OutriderError

BURST_S, CALM_S = 3.0, 6.0  # of the made-up trace, in turns
BURST_OVER_CALM = 8.0  # rate of arrivals


class TurnFailed(OutriderError):
    """A request was not answered, so that there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one arm did with the requests of one turn."""

    tokens_per_s: float
    tpot_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    texts: tuple[str, ...]

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
def _awake(arm: RunningArm) -> Iterator[None]:
    if arm.process is not None:
        arm.process.resume()
    try:
        yield
    finally:
        if arm.process is not None:
            arm.process.suspend()


def closed_loop(arm: RunningArm, asks: Sequence[LoadRequest], num_streams: int) -> Turn:
    """``num_streams`` requests under way at a time, until all are answered."""
    own = [replace(ask, drafting=arm.arm.drafting) for ask in asks]
    with _awake(arm):
        return Turn.of(arm.arm.name, asyncio.run(run_streams(arm.target.ask, own, num_streams)))


def open_loop(arm: RunningArm, asks: Sequence[LoadRequest], arrivals_s: Sequence[float]) -> Turn:
    """Each request is sent at its time, whatever is under way."""

    async def play() -> list[TimedAnswer]:
        start_s = time.monotonic()

        async def one(ask: LoadRequest, at_s: float) -> TimedAnswer:
            await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
            return await arm.target.ask(replace(ask, drafting=arm.arm.drafting))

        return list(await asyncio.gather(*(one(ask, at_s) for ask, at_s in zip(asks, arrivals_s, strict=True))))

    with _awake(arm):
        return Turn.of(arm.arm.name, asyncio.run(play()))


def bursty_arrivals(num_requests: int, mean_rate: float, seed: int) -> list[float]:
    """Poisson arrivals whose rate is high for BURST_S and low for CALM_S, in turns; on average ``mean_rate`` a second."""
    rng = random.Random(seed)
    calm_rate = mean_rate * (BURST_S + CALM_S) / (BURST_OVER_CALM * BURST_S + CALM_S)
    at_s, arrivals = 0.0, list[float]()
    while len(arrivals) < num_requests:
        phase_s = at_s % (BURST_S + CALM_S)
        in_burst = phase_s < BURST_S
        gap_s = rng.expovariate(calm_rate * (BURST_OVER_CALM if in_burst else 1.0))
        left_s = (BURST_S if in_burst else BURST_S + CALM_S) - phase_s
        if gap_s > left_s:  # the rate changes before the next one comes: begin anew there, which a Poisson process allows
            at_s += left_s
            continue
        at_s += gap_s
        arrivals.append(at_s)
    return arrivals


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half of the range over it."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / 2 / median
