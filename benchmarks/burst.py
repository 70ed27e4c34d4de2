"""A burst of ten times the usual rate on a live server whose numbers of replicas follow the load.

On a machine of few cores a second target serves no more than the first: what is measured is that the cluster follows, loses
nothing, and returns to its small size.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import accumulate
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.faults import pinned, with_files
from benchmarks.host_fleet import TARGET, Fleet, fleet
from benchmarks.hosts import HostedServer
from benchmarks.load import LoadRequest, TimedAnswer, checked, run_arrivals, run_streams, tokens_per_s
from benchmarks.report import BenchOptions, BenchResult, Table
from benchmarks.serve import local_config, tokenize
from benchmarks.server import ServerProcess
from cluster.config import Config, Resources, RouterConfig, ScalingConfig, SloClass, SloConfig
from engine.models.prepare import ensure_model

IDLE_S, CALM_S, BURST_S, LONG_BURST_S = 15.0, 20.0, 60.0, 300.0
BEGIN_S = IDLE_S + CALM_S  # of the burst
TIMES = 10.0  # the rate of a burst over the calm one
LOAD = 1.2  # of a burst, over what one target serves
SMALL_S = 300.0  # longest wait for the small size after a burst
POLL_S = 0.5
NUM_PROMPTS, MAX_PROMPT_LEN, NUM_TOKENS = 12, 128, 32
NUM_SEQUENCES = 4  # that one target runs at once
MAX_TARGETS, MAX_DRAFTERS = 2, 3
DRAFTER_CAPACITY = 2  # requests, so that a full target needs more than one
TARGET_CPUS, DRAFTER_CPUS = 0.5, 0.1  # so that all of them fit two cores
DRAFTER_CPUS_OVER_HOSTS = 0.7
TTFT_MS, TPOT_MS = 4000.0, 2000.0
SEED = 1


@dataclass(frozen=True, slots=True)
class Size:
    """Ready replicas at a time, on the monotonic clock."""

    at_s: float
    num_targets: int
    num_drafters: int


@dataclass(slots=True)
class Burst:
    """What was measured; ``sent`` are the requests of the answers."""

    sent: Sequence[LoadRequest]
    answers: Sequence[TimedAnswer]
    begin_s: float
    end_s: float
    sizes: Sequence[Size]
    calm_rate: float
    events: Sequence[str]

    @property
    def lost(self) -> list[TimedAnswer]:
        return [one for one in self.answers if one.error is not None and one.status != HTTPStatus.TOO_MANY_REQUESTS]

    @property
    def rejected(self) -> list[TimedAnswer]:
        return [one for one in self.answers if one.status == HTTPStatus.TOO_MANY_REQUESTS]

    def num_wrong_tokens(self, plain: Mapping[str, TimedAnswer]) -> int:
        """Of finished streams whose text or length differs."""
        whole = [(plain[ask.id], one) for ask, one in zip(self.sent, self.answers, strict=True) if one.error is None]
        return sum(a.num_tokens for a, b in whole if (a.text, a.num_tokens) != (b.text, b.num_tokens))


def run(options: BenchOptions) -> BenchResult:
    """Figures:

    - ``num_lost``: streams that ended with anything but all their tokens or a refusal (429);
    - ``num_rejected``, and of these ``num_rejected_without_retry_after``;
    - ``num_wrong_tokens``: of answers that differ from those of a server with one target and no drafter;
    - ``max_targets``, ``max_drafters``: most that were ready at once; ``final_targets``, ``final_drafters``: at the end;
    - ``targets_grew_s``, ``drafters_grew_s``: from the burst's begin until more were ready than before it;
    - ``small_again_s``: from the burst's end until the smallest size.

    Over hosts, one joins with the burst and leaves when the server is small again; then every stream is asked for once more.

    Runs in fp32, where batch shape flips no token, with half of the streams sampled (T = 0.8). A burst lasts 60 s if quick,
    else 300 s.
    """
    folder = ensure_model(options.model)
    prompts = tokenize(folder, options.prompts, NUM_PROMPTS)
    asks = [
        LoadRequest(f"stream-{i}", prompt[-MAX_PROMPT_LEN:], NUM_TOKENS, temperature=0.8 * (i % 2), seed=1000 + i)
        for i, prompt in enumerate(prompts)
    ]
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="outrider-burst-") as temporary:
        config = scaling_config(with_files(pinned(local_config(options.model)), Path(temporary)))
        console.print("burst: the answers of one target without drafters", highlight=False)
        with ServerProcess(fixed_config(config)) as server:
            answers = asyncio.run(_plain(server, asks))
        plain = {ask.id: answer for ask, answer in zip(asks, answers, strict=True)}
        with _scaling_server(config, options.hosts) as (server, hosts):
            burst_s = BURST_S if options.quick else LONG_BURST_S
            calm_rate = LOAD / TIMES * tokens_per_s(answers) / NUM_TOKENS
            console.print(f"burst: {calm_rate:.2f} requests/s, then ten times as many for {burst_s:g} s", highlight=False)
            burst = _measure(server, asks, calm_rate, burst_s, hosts)
    return _result(burst, plain)


@contextmanager
def _scaling_server(config: Config, over_hosts: bool) -> Iterator[tuple[ServerProcess, Fleet | None]]:
    """Over hosts: the second target has room on a host alone that has not joined, and so have all drafters but one."""
    if not over_hosts:
        with ServerProcess(config) as server:
            yield server, None
        return
    with fleet(without_second=True) as hosts:
        spread = hosts.config(config)
        drafter = Resources(cpus=DRAFTER_CPUS_OVER_HOSTS, gpus=0, threads=1, node_labels=TARGET.node_labels)
        changes = {
            "target": spread.target.model_copy(update={"replicas": 1}),
            "drafters": tuple(one.model_copy(update={"resources": drafter}) for one in spread.drafters),
        }
        with HostedServer(spread.model_copy(update=changes), hosts.front, hosts.front) as server:
            yield server, hosts


def scaling_config(config: Config) -> Config:
    """One target that may become two, and no drafter that may become three."""
    (drafter,) = config.drafters
    bounds = {"replicas": 0, "min_replicas": 0, "max_replicas": MAX_DRAFTERS, "capacity": DRAFTER_CAPACITY}
    scales = drafter.model_copy(update=bounds | {"resources": Resources(cpus=DRAFTER_CPUS, gpus=0, threads=1)})
    target = config.target.model_copy(
        update={
            "max_replicas": MAX_TARGETS,
            "max_num_sequences": NUM_SEQUENCES,
            "resources": Resources(cpus=TARGET_CPUS, gpus=0, threads=1),
        }
    )
    return config.model_copy(
        update={
            "target": target,
            "drafters": (scales,),
            "slo": SloConfig(classes={"burst": SloClass(ttft_ms=TTFT_MS, tpot_ms=TPOT_MS)}, default="burst"),
            "scaling": ScalingConfig(policy="outrider", target_start_s=20),
        }
    )


def fixed_config(config: Config) -> Config:
    changes = {"drafters": (), "router": RouterConfig(), "slo": SloConfig(), "scaling": ScalingConfig()}
    return config.model_copy(update=changes | {"target": config.target.model_copy(update={"max_replicas": None})})


def schedule(asks: Sequence[LoadRequest], calm_rate: float, burst_s: float) -> list[tuple[float, LoadRequest]]:
    """Arrivals in seconds from the start: none, then evenly spaced ones, then the burst's at random (Poisson). Requests are
    taken in turn."""
    rate = TIMES * calm_rate
    gaps_s = np.random.default_rng(SEED).exponential(1.0 / rate, size=int(2 * rate * burst_s) + 10).tolist()
    found = [IDLE_S + number / calm_rate for number in range(int(CALM_S * calm_rate))]
    found += [BEGIN_S + at_s for at_s in accumulate(gaps_s) if at_s < burst_s]
    return [(at_s, asks[i % len(asks)]) for i, at_s in enumerate(found)]


async def _plain(server: ServerProcess, asks: Sequence[LoadRequest]) -> list[TimedAnswer]:
    """Twice; the second time nothing is cold."""
    target = server.target()
    await run_streams(target.ask, asks, NUM_SEQUENCES)
    return checked(await run_streams(target.ask, asks, NUM_SEQUENCES))


def _measure(
    server: ServerProcess, asks: Sequence[LoadRequest], calm_rate: float, burst_s: float, hosts: Fleet | None = None
) -> Burst:
    """``hosts``: the second host joins with the burst, and leaves when the server is small again; then all is asked once."""
    target, arrivals = server.target(), schedule(asks, calm_rate, burst_s)
    with _watched(server) as sizes:
        start_s = time.monotonic()
        if hosts is not None:
            Timer(BEGIN_S, hosts.join, (hosts.second,)).start()
        answers = asyncio.run(run_arrivals(target.ask, arrivals))
        end_s = time.monotonic()
        while not _is_small(sizes[-1]) and time.monotonic() < end_s + SMALL_S:
            time.sleep(POLL_S)
        sent = [ask for _, ask in arrivals]
        if hosts is not None:
            hosts.second.remove()
            sent += asks
            answers += asyncio.run(run_streams(target.ask, asks, NUM_SEQUENCES))
        with server.client() as client:
            events = [_event(event) for event in client.get("/v1/outrider/status").json()["scale_events"]]
    return Burst(sent, answers, start_s + BEGIN_S, end_s, sizes, calm_rate, events)


def _is_small(size: Size) -> bool:
    return (size.num_targets, size.num_drafters) == (1, 0)


@contextmanager
def _watched(server: ServerProcess) -> Iterator[list[Size]]:
    """Sizes every POLL_S, the first at once. Without an answer there is none."""
    ended, sizes = Event(), []

    def watch(client: httpx.Client) -> None:
        with suppress(httpx.TransportError):
            answer = client.get("/v1/outrider/status")
            if answer.status_code == HTTPStatus.OK:
                status: dict[str, Any] = answer.json()
                ready = [sum(one["state"] == "ready" for one in status[kind]) for kind in ("targets", "drafters")]
                sizes.append(Size(time.monotonic(), *ready))

    def watch_on() -> None:
        with server.client() as client:
            while not ended.wait(POLL_S):
                watch(client)

    with server.client() as client:
        while not sizes:
            watch(client)
    thread = Thread(target=watch_on, name="sizes")
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()


def _event(event: Mapping[str, Any]) -> str:
    return f"{event['name']}: {event['num_before']} to {event['num_after']}: {event['reason']}"


def _result(burst: Burst, plain: Mapping[str, TimedAnswer]) -> BenchResult:
    before = [size for size in burst.sizes if size.at_s <= burst.begin_s] or [burst.sizes[0]]
    last = burst.sizes[-1]
    figures: dict[str, float] = {
        "num_requests": len(burst.answers),
        "num_lost": len(burst.lost),
        "num_rejected": len(burst.rejected),
        "num_rejected_without_retry_after": sum(one.retry_after is None for one in burst.rejected),
        "num_wrong_tokens": burst.num_wrong_tokens(plain),
        "max_targets": max(size.num_targets for size in burst.sizes),
        "max_drafters": max(size.num_drafters for size in burst.sizes),
        "final_targets": last.num_targets,
        "final_drafters": last.num_drafters,
        "calm_requests_per_s": burst.calm_rate,
    }
    grown = {
        "targets_grew_s": [size.at_s for size in burst.sizes if size.num_targets > before[-1].num_targets],
        "drafters_grew_s": [size.at_s for size in burst.sizes if size.num_drafters > before[-1].num_drafters],
    }
    figures |= {name: times[0] - burst.begin_s for name, times in grown.items() if times}
    if _is_small(last):
        figures["small_again_s"] = last.at_s - burst.end_s
    changes = [burst.sizes[0]]
    changes += [b for a, b in zip(burst.sizes, burst.sizes[1:], strict=False) if replace(b, at_s=a.at_s) != a]
    rows = tuple((size.at_s - burst.begin_s, size.num_targets, size.num_drafters) for size in changes)
    errors = sorted({f"lost: {one.error}" for one in burst.lost})
    return BenchResult(
        bench="burst",
        figures=figures,
        tables=(Table("ready replicas, by seconds from the burst's begin", ("s", "targets", "drafters"), rows),),
        notes=(*errors[:8], *burst.events),
    )
