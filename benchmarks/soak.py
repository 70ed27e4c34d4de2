"""A server at saturation for a long time: its memory must not grow, and no call may fail. Then many streams at once."""

import asyncio
import random
import resource
import signal
import threading
import time
from collections.abc import Sequence
from itertools import count

import numpy as np

from benchmarks.load import HttpTarget, LoadRequest, TimedAnswer, run_streams
from benchmarks.process_usage import HELD, tree_pss_bytes
from benchmarks.report import BenchOptions, BenchResult, Table
from benchmarks.serve import local_config
from benchmarks.server import ServerProcess
from cluster.config import Config

DURATION_S, QUICK_S = 3600.0, 120.0
NUM_STREAMS = 32
WARM_SHARE = 0.4  # of the time, in which caches and pools fill
PERIOD_S = 2.0  # of memory samples
MAX_PROMPT_LEN, MAX_TOKENS = 200, 64
NUM_HELD = 1000
HELD_LEN = 8  # tokens of each of their prompts and answers
HELD_S = 1200.0  # in which they must end
TOKEN_IDS = (1000, 3000)  # of prompts: ordinary text in any vocabulary of this size


def run(options: BenchOptions) -> BenchResult:
    """Figures:

    - ``memory_growth``: of the server's processes (PSS without pages of files), as a share of their memory, over the time
      after warming up, by a line through the samples;
    - ``num_errors``, of all calls;
    - ``num_streams_held``: streams that were open at once, and ended with all their tokens.

    SIGINT ends the saturation early; ``duration_s`` says how long it was.
    """
    config, duration_s = of_many_streams(local_config(options.model)), QUICK_S if options.quick else DURATION_S
    _allow_sockets(2 * NUM_HELD)
    with ServerProcess(config) as server:
        target = server.target()
        samples: list[tuple[float, dict[str, int]]] = []
        began_s = time.monotonic()
        answers = asyncio.run(saturated(server, target, duration_s, samples))
        duration_s = time.monotonic() - began_s
        rng = random.Random(2)
        asks = [LoadRequest(f"held-{i}", _prompt(rng, HELD_LEN), HELD_LEN) for i in range(NUM_HELD)]
        held = asyncio.run(run_streams(target.ask, asks, NUM_HELD, HELD_S))
    return _result(duration_s, samples, answers, held)


def of_many_streams(config: Config) -> Config:
    limits = {"max_concurrent_requests": 2 * NUM_HELD, "request_deadline_s": HELD_S}
    return config.model_copy(update={"api": config.api.model_copy(update=limits)})


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """Of a line through (seconds, value): its rise over its start."""
    times, values = np.array(samples).T
    slope, _ = np.polyfit(times - times[0], values, 1)
    rise = float(slope * (times[-1] - times[0]))
    return rise / (float(values.mean()) - rise / 2)


def num_at_once(answers: Sequence[TimedAnswer]) -> int:
    """The most that were open at a time, of those that ended well."""
    good = [answer for answer in answers if answer.error is None and answer.num_tokens]
    events = sorted([(answer.sent_s, 1) for answer in good] + [(answer.end_s, -1) for answer in good])
    return int(max(np.cumsum([change for _, change in events]), default=0))


async def saturated(
    server: ServerProcess, target: HttpTarget, duration_s: float, samples: list[tuple[float, dict[str, int]]]
) -> list[TimedAnswer]:
    """Answers of callers who ask again and again, until the time is over or SIGINT comes. ``samples`` gets
    (seconds, memory by process)."""
    answers: list[TimedAnswer] = []
    rng, numbers, ended = random.Random(1), count(), threading.Event()
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.call_later(duration_s, is_over.set)
    loop.add_signal_handler(signal.SIGINT, is_over.set)

    def sample() -> None:
        while not ended.wait(PERIOD_S):
            samples.append((time.monotonic(), tree_pss_bytes(server.pid, HELD)))

    async def caller() -> None:
        while not is_over.is_set():
            number = next(numbers)
            prompt, num_tokens = _prompt(rng, rng.randint(4, MAX_PROMPT_LEN)), rng.randint(1, MAX_TOKENS)
            answers.append(await target.ask(LoadRequest(f"soak-{number}", prompt, num_tokens, 0.8 * (number % 2), number)))

    sampling = asyncio.create_task(asyncio.to_thread(sample))
    try:
        await asyncio.gather(*(caller() for _ in range(NUM_STREAMS)))
    finally:
        ended.set()
        await sampling
    return answers


def _result(
    duration_s: float,
    samples: Sequence[tuple[float, dict[str, int]]],
    answers: Sequence[TimedAnswer],
    held: Sequence[TimedAnswer],
) -> BenchResult:
    warm = samples[int(WARM_SHARE * len(samples)) :]
    totals = [(at_s, float(sum(by_name.values()))) for at_s, by_name in warm]
    errors = [answer.error for answer in (*answers, *held) if answer.error is not None]
    rows = [
        (name, warm[0][1].get(name, 0) / 2**20, warm[-1][1].get(name, 0) / 2**20)
        for name in sorted(warm[-1][1], key=lambda name: -warm[-1][1][name])
    ]
    return BenchResult(
        bench="soak",
        figures={
            "duration_s": duration_s,
            "memory_growth": growth(totals),
            "memory_gb": totals[-1][1] / 2**30,
            "num_errors": len(errors),
            "num_answers": len(answers),
            "tokens_per_s": sum(answer.num_tokens for answer in answers) / duration_s,
            "num_streams_held": num_at_once(held),
        },
        tables=(
            Table("memory in MiB (PSS without pages of files)", ("process", "after warming up", "at the end"), tuple(rows)),
        ),
        notes=tuple(sorted({f"an error: {error}" for error in errors})[:8]),
    )


def _prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(*TOKEN_IDS) for _ in range(length))


def _allow_sockets(num: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num:
        most = num if hard == resource.RLIM_INFINITY else min(num, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
