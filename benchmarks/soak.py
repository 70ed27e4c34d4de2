"""A server at saturation for a long time: its memory must not grow, and no call may fail. Then many streams at once; over
hosts instead a fault of a host or of the network each minute."""

import asyncio
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, cycle
from pathlib import Path

import httpx
import numpy as np

from benchmarks.fault_rows import REFUSED, FaultRows, Row, RowResult
from benchmarks.faults import pinned, with_files
from benchmarks.host_rows import start_host_rows
from benchmarks.load import LoadRequest, TimedAnswer, run_streams, sum_tokens
from benchmarks.process_usage import HELD, tree_pss_bytes
from benchmarks.report import BenchOptions, BenchResult, Table
from benchmarks.serve import local_config
from benchmarks.server import ServerProcess
from cluster.config import Config
from cluster.errors import OutriderError

DURATION_S, QUICK_S = 3600.0, 120.0
NUM_STREAMS = 32
WARM_SHARE = 0.4  # of the time, in which caches and pools fill
PERIOD_S = 2.0  # of memory samples
MAX_PROMPT_LEN, MAX_TOKENS = 200, 64
NUM_HELD = 1000
HELD_LEN = 8  # tokens of each of their prompts and answers
HELD_S = 1200.0  # in which they must end
TOKEN_IDS = (1000, 3000)  # of prompts: ordinary text in any vocabulary of this size
QUICK_HOSTS_S, FAULT_PERIOD_S = 360.0, 60.0
NUM_HOST_STREAMS, NUM_KNOWN = 6, 16  # callers over hosts, and requests that they repeat
KEPT = ("ray::PoolSupervisor", "ray::ServeReplica")  # processes that no fault replaces


def run(options: BenchOptions) -> BenchResult:
    """Figures:

    - ``memory_growth``: of the server's processes (PSS without pages of files), as a share of their memory, over the time
      after warming up, by a line through the samples;
    - ``num_errors``, of all calls;
    - ``num_streams_held``: streams that were open at once, and ended with all their tokens.

    SIGINT ends the saturation early; ``duration_s`` says how long it was.

    Over hosts: as of the rows of `benchmarks.host_rows` in which no stream may end, ``num_faults``, ``num_wrong_tokens``,
    ``num_lost`` and ``num_leaked``; ``num_refused`` and ``refused_fraction``: answers 429 or 503; ``memory_growth`` of
    processes that no fault replaces. In fp32, half of the streams sampled (T = 0.8). A fault that does not pass ends it
    early.
    """
    if options.hosts:
        with tempfile.TemporaryDirectory(prefix="outrider-soak-") as folder, ExitStack() as stack:
            rows = start_host_rows(stack, with_files(pinned(local_config(options.model)), Path(folder)))
            return with_faults(rows, stack, QUICK_HOSTS_S if options.quick else DURATION_S)
    config, duration_s = of_many_streams(local_config(options.model)), QUICK_S if options.quick else DURATION_S
    _allow_sockets(2 * NUM_HELD)
    with ServerProcess(config) as server:
        target, rng = server.target(), random.Random(1)
        samples: list[tuple[float, dict[str, int]]] = []
        began_s = time.monotonic()
        answers = asyncio.run(saturated(server.pid, lambda i: target.ask(_ask(rng, i)), duration_s, samples))
        duration_s = time.monotonic() - began_s
        asks = [LoadRequest(f"held-{i}", _prompt(rng, HELD_LEN), HELD_LEN) for i in range(NUM_HELD)]
        held = asyncio.run(run_streams(target.ask, asks, NUM_HELD, HELD_S))
    return _result(duration_s, samples, answers, held)


def of_many_streams(config: Config) -> Config:
    limits = {"max_concurrent_requests": 2 * NUM_HELD, "request_deadline_s": HELD_S}
    return config.model_copy(update={"api": config.api.model_copy(update=limits)})


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """Of a line through two or more (seconds, value): its rise over its start."""
    times, values = np.array(samples).T
    slope, _ = np.polyfit(times - times[0], values, 1)
    rise = float(slope * (times[-1] - times[0]))
    start = float(values.mean()) - rise / 2
    return rise / start if start else 0.0


def num_at_once(answers: Sequence[TimedAnswer]) -> int:
    """The most that were open at a time, of those that ended well."""
    good = [answer for answer in answers if answer.error is None and answer.num_tokens]
    events = sorted([(answer.sent_s, 1) for answer in good] + [(answer.end_s, -1) for answer in good])
    return int(max(np.cumsum([change for _, change in events]), default=0))


async def saturated(
    pid: int,
    ask_one: Callable[[int], Awaitable[TimedAnswer]],
    duration_s: float,
    samples: list[tuple[float, dict[str, int]]],
    num_streams: int = NUM_STREAMS,
    stopped: threading.Event | None = None,
) -> list[TimedAnswer]:
    """Answers of callers who ask again and again, until the time is over, SIGINT comes, or ``stopped`` is set. ``ask_one``
    gets the number of a request, ``samples`` (seconds, memory by process, of ``pid`` and its descendants)."""
    answers: list[TimedAnswer] = []
    numbers, ended = count(), threading.Event()
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.call_later(duration_s, is_over.set)
    loop.add_signal_handler(signal.SIGINT, is_over.set)

    def sample() -> None:  # twice at least, so that a line goes through the samples
        is_last = False
        while not is_last:
            is_last = ended.is_set()
            samples.append((time.monotonic(), tree_pss_bytes(pid, HELD)))
            ended.wait(PERIOD_S)

    async def caller() -> None:
        while not (is_over.is_set() or (stopped is not None and stopped.is_set())):
            answers.append(await ask_one(next(numbers)))

    sampling = asyncio.create_task(asyncio.to_thread(sample))
    try:
        await asyncio.gather(*(caller() for _ in range(num_streams)))
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
            "tokens_per_s": sum_tokens(answers) / duration_s,
            "num_streams_held": num_at_once(held),
        },
        tables=(
            Table("memory in MiB (PSS without pages of files)", ("process", "after warming up", "at the end"), tuple(rows)),
        ),
        notes=tuple(sorted({f"an error: {error}" for error in errors})[:8]),
    )


def with_faults(rows: FaultRows, server: ExitStack, duration_s: float, period_s: float = FAULT_PERIOD_S) -> BenchResult:
    """As ``run`` over hosts, which ``server`` ends. ``period_s``: of faults."""
    rng, result, injured = random.Random(1), RowResult("soak"), Counter[str]()
    asks = [_ask(rng, i) for i in range(NUM_KNOWN)]
    num_refused, samples, ended = 0, list[tuple[float, dict[str, int]]](), threading.Event()
    plain = asyncio.run(rows.undisturbed(asks))

    async def ask_one(number: int) -> TimedAnswer:
        nonlocal num_refused
        answer = await rows.target.ask(asks[number % NUM_KNOWN])
        if answer.status in REFUSED:
            num_refused += 1
        else:
            result.judge(plain[number % NUM_KNOWN], answer)
        return answer

    injuring = threading.Thread(target=injure, args=(rows.table(), ended, injured, result, period_s))
    began_s = time.monotonic()
    injuring.start()
    try:
        answers = asyncio.run(saturated(os.getpid(), ask_one, duration_s, samples, NUM_HOST_STREAMS, ended))
    finally:
        duration_s = time.monotonic() - began_s
        ended.set()
        injuring.join()
    left: list[str] = []
    with _recorded(result):
        left = rows.left_behind()
    with _recorded(result):
        server.close()
    kept = [(at_s, float(sum(num for name, num in held.items() if name.startswith(KEPT)))) for at_s, held in samples]
    return BenchResult(
        bench="soak",
        figures={
            "duration_s": duration_s,
            "memory_growth": growth(kept[int(WARM_SHARE * len(kept)) :]),
            "num_faults": injured.total(),
            "num_wrong_tokens": result.num_wrong_tokens,
            "num_lost": result.num_lost,
            "num_leaked": len(left),
            "num_refused": num_refused,
            "refused_fraction": num_refused / max(1, len(answers)),
            "num_answers": len(answers),
            "tokens_per_s": sum_tokens(answers) / duration_s,
        },
        tables=(Table("faults", ("fault", "times"), tuple(injured.items())),),
        notes=tuple(sorted({*result.complaints, *left})[:8]),
    )


@contextmanager
def _recorded(result: RowResult) -> Iterator[None]:
    """For a server that has not recovered, or does not end: the figures count nevertheless."""
    try:
        yield
    except (OutriderError, TimeoutError, httpx.HTTPError) as error:
        result.not_recovered(NUM_HOST_STREAMS, repr(error))


def injure(rows: Sequence[Row], ended: threading.Event, injured: Counter[str], result: RowResult, period_s: float) -> None:
    """Faults that end no stream, one in each period, until ``ended`` is set, which the first that does not pass does, too.
    ``injured`` gets those that did."""
    next_s = time.monotonic()
    for row in cycle(row for row in rows if not row.ends_streams):
        next_s = max(time.monotonic(), next_s + period_s)
        if ended.wait(next_s - time.monotonic()):
            return
        try:
            row.injure()
        except Exception as error:  # noqa: BLE001 -- whatever it is, it must not end unseen with its thread
            result.not_recovered(NUM_HOST_STREAMS, f"{row.name}: {error!r}")
            ended.set()
            return
        injured[row.name] += 1


def _ask(rng: random.Random, number: int) -> LoadRequest:
    prompt, num_tokens = _prompt(rng, rng.randint(4, MAX_PROMPT_LEN)), rng.randint(1, MAX_TOKENS)
    return LoadRequest(f"soak-{number}", prompt, num_tokens, 0.8 * (number % 2), number)


def _prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(*TOKEN_IDS) for _ in range(length))


def _allow_sockets(num: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num:
        most = num if hard == resource.RLIM_INFINITY else min(num, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
