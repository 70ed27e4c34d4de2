"""Rows of the fault table: each fault many times, with streams under way."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.disturbed import (
    DEADLINE_S,
    POLL_S,
    RECOVERY_POLL_S,
    STATUS_AGE_S,
    Disturbed,
    DisturbedServer,
    FaultBenchFailed,
    Metrics,
    routes_again,
)
from benchmarks.injections import ACTORS
from benchmarks.load import LoadRequest, TimedAnswer
from benchmarks.redis_server import RedisServer
from benchmarks.report import Cell
from benchmarks.server import ServerProcess
from cluster.config import Config, Resources, StateConfig
from cluster.errors import OutriderError
from deploy.local_ray import free_port

OPEN_CALLS = "outrider_requests_in_flight"
MAX_SERVERS = 3  # one after the other, where one does not recover
NUM_ARRIVING = 2  # requests that come with a fault
REFUSED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)  # a clear answer, after which a client tries again
SHOWN = (50, 99)  # percentiles of recoveries
STALL_S = 3.0  # shorter than the silence after which a link counts as down
TARGETS = {"replicas": 2, "resources": Resources(cpus=0.25, gpus=0, threads=1)}
# Ray's pause between SIGTERM and SIGKILL, by default 5 s: a hung process does not notice the first.
ENVIRONMENT = {"RAY_kill_worker_timeout_milliseconds": "500"}


@dataclass(slots=True)
class RowResult:
    """``ends_streams``: streams may end with an error. ``complaints``: broken promises, one line each."""

    name: str
    ends_streams: bool = False
    runs: list[Disturbed] = field(default_factory=list)
    num_wrong_tokens: int = 0
    num_lost: int = 0  # streams, and those of a run from which the server did not recover
    num_leaked: int = 0
    num_resumed: int = 0
    complaints: list[str] = field(default_factory=list)

    def recovery_s(self, percent: float) -> float | None:
        """None if the server recovered from no run: JSON has no infinity."""
        return float(np.percentile([run.recovery_s for run in self.runs], percent)) if self.runs else None

    def add(self, run: Disturbed, plain: Sequence[TimedAnswer], num_resumed: int, left: Sequence[str]) -> None:
        """``plain``: the answers of a server that nothing disturbs. ``left``: what has leaked, one line each."""
        self.runs.append(run)
        self.num_resumed += num_resumed
        self.num_leaked += len(left)
        self.complaints += left
        for undisturbed, answer in zip(plain, run.answers, strict=True):
            self.judge(undisturbed, answer)
        for undisturbed, answer in zip(plain, run.arrived, strict=False):
            if answer.status not in REFUSED:
                self.judge(undisturbed, answer)

    def not_recovered(self, num_streams: int, reason: str) -> None:
        self.num_lost += num_streams
        self.complaints.append(reason)

    def judge(self, undisturbed: TimedAnswer, answer: TimedAnswer) -> None:
        if answer.error is not None and not self.ends_streams:
            self.num_lost += 1
            self.complaints.append(f"a stream ended: {answer.error}")
        is_whole = answer.error is None
        if answer.text != (undisturbed.text if is_whole else undisturbed.text[: len(answer.text)]):
            self.num_wrong_tokens += undisturbed.num_tokens
            self.complaints.append(f"{answer.text!r} instead of {undisturbed.text!r}")

    def cells(self) -> tuple[Cell, ...]:
        gap_s: Cell = "-" if self.ends_streams or not self.runs else max(run.max_gap_s for run in self.runs)
        counts = (len(self.runs), self.num_wrong_tokens, self.num_lost, self.num_leaked, self.num_resumed)
        recovery_s = (self.recovery_s(percent) for percent in SHOWN)
        return (self.name, *counts, gap_s, *("never" if one is None else one for one in recovery_s))


@dataclass(frozen=True, slots=True)
class Row:
    """``replaces``: the actor whose process is replaced; None: none is. ``ends_streams``: as of `RowResult`."""

    name: str
    injure: Callable[[], object]
    replaces: str | None = None
    ends_streams: bool = False


class Turns:
    """Each row once, then each again. A run that is cut short has each as often, give or take one. May be used from any
    thread."""

    def __init__(self, rows: Sequence[Row], num_times: int) -> None:
        self._results = [RowResult(row.name, row.ends_streams) for row in rows]
        self._left = deque((result, number + 1) for number in range(num_times) for result in self._results)

    def take(self) -> tuple[RowResult, int] | None:
        """A row, and how many times it has been taken with this one. None: it is over."""
        try:
            return self._left.popleft()
        except IndexError:
            return None

    @property
    def are_over(self) -> bool:
        return not self._left

    def end(self) -> None:
        self._left.clear()

    def results(self) -> list[RowResult]:
        """Of the rows that were measured."""
        return [result for result in self._results if result.runs or result.complaints]


@dataclass(slots=True)
class Measured:
    """``lost``: processes that ended without being killed, servers among them."""

    rows: list[RowResult] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    interrupted: bool = False


def with_two_targets(config: Config, folder: Path, redis: RedisServer | None) -> Config:
    """At a port of its own. Its processes are restarted soon, however often they end."""
    state = StateConfig(folder=folder / "rows") if redis is None else StateConfig(url=redis.url)
    supervision = {"quarantine_restarts": 1000}
    return config.model_copy(
        update={
            "target": config.target.model_copy(update=TARGETS),
            "api": config.api.model_copy(update={"port": free_port()}),
            "cluster": config.cluster.model_copy(update={"state": state}),
            "supervision": config.supervision.model_copy(update=supervision),
        }
    )


class FaultRows(DisturbedServer):
    """Measures rows on a server with two targets."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server)
        self._num_processes = {actor: len(server.workers(actor)) for actor in ACTORS}

    def table(self) -> list[Row]:
        raise NotImplementedError

    def measure(self, turns: Turns, asks: Sequence[LoadRequest]) -> None:
        """Takes turns until there are none, or until the server does not recover; another may take those that are left."""
        rows = {row.name: row for row in self.table()}
        plain = asyncio.run(self.undisturbed(asks))
        while (turn := turns.take()) is not None:
            result, number = turn
            try:
                with self.phase(f"{result.name}, number {number}"):
                    self._measure_once(rows[result.name], result, asks, plain)
            except (TimeoutError, FaultBenchFailed) as error:
                reason = f"the server has not recovered within {DEADLINE_S:g} s: {self.server.last_words()}"
                result.not_recovered(len(asks), str(error) or reason)
                return

    def _measure_once(self, row: Row, result: RowResult, asks: Sequence[LoadRequest], plain: Sequence[TimedAnswer]) -> None:
        num_resumed = self._num_resumed()
        run = asyncio.run(self._run(row, asks))
        num_resumed = max(0, self._num_resumed() - num_resumed)  # a new API counts from 0
        result.add(run, plain, num_resumed, self._leaked())

    async def _run(self, row: Row, asks: Sequence[LoadRequest]) -> Disturbed:
        before = set() if row.replaces is None else set(self.server.workers(row.replaces))
        began_s = math.inf
        routes = routes_again() if row.replaces == "RouterActor" else None

        def injure() -> None:
            nonlocal began_s
            began_s = time.monotonic()
            row.injure()

        def recovered(metrics: Metrics) -> bool:
            is_fresh = time.monotonic() > began_s + STATUS_AGE_S
            is_back = self._is_replaced(row.replaces, before) and (routes is None or routes(metrics))
            return is_fresh and is_back and self.is_linked() and self.all_ready()

        return await self.disturbed(asks, injure, recovered, asks[:NUM_ARRIVING])

    def _is_replaced(self, actor: str | None, before: set[psutil.Process]) -> bool:
        if actor is None:
            return True
        found = set(self.server.workers(actor))
        return len(found) == self._num_processes[actor] and bool(found - before)

    def is_linked(self) -> bool:
        """Whether drafters and gateways are linked to the targets, where that is known."""
        return True

    # ---- what is left

    def _num_resumed(self) -> int:
        return int(self._status().get("num_resumed", 0))

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._answer("/v1/outrider/status").json()
        return status

    def _answer(self, path: str) -> httpx.Response:
        until_s = time.monotonic() + DEADLINE_S
        with self.server.client() as client:
            while time.monotonic() < until_s:
                with suppress(httpx.TransportError):
                    answer = client.get(path)
                    if answer.status_code == httpx.codes.OK:
                        return answer
                time.sleep(POLL_S)
        raise FaultBenchFailed(f"no answer to {path} after {DEADLINE_S:g} s: {self.server.last_words()}")

    def _open_calls(self) -> float:
        families = text_string_to_metric_families(self._answer("/metrics").text)
        samples = [sample.value for family in families for sample in family.samples if sample.name == OPEN_CALLS]
        if not samples:
            raise FaultBenchFailed(f"/metrics has no {OPEN_CALLS}")
        return sum(samples)

    def left_behind(self) -> list[str]:
        """What is left when the server has recovered. Raises FaultBenchFailed: it does not."""
        end_s = time.monotonic() + DEADLINE_S
        while not (self.is_linked() and self.all_ready()):
            if time.monotonic() > end_s:
                raise FaultBenchFailed(f"the server has not recovered: {self.server.last_words()}")
            time.sleep(RECOVERY_POLL_S)
        return self._leaked()

    def _leaked(self) -> list[str]:
        """What an idle server must not have; the status is a second old, so it is asked until nothing is left."""
        left: list[str] = []
        until_s = time.monotonic() + 2 * STATUS_AGE_S + STALL_S
        while time.monotonic() < until_s:
            left = list(self._left())
            if not left:
                break
            time.sleep(POLL_S)
        return left

    def _left(self) -> Iterator[str]:
        status = self._status()
        for target in status["targets"]:
            if target["state"] != "ready":
                yield f"{target['name']} is {target['state']}, so that nobody knows what it holds"
            held, live = target["num_blocks"] - target["num_free_blocks"], target["num_running"] + target["num_waiting"]
            if held or live:
                yield f"{target['name']} idle: {held} blocks, {live} requests"
        for drafter in status["drafters"]:
            if drafter["num_requests"]:
                yield f"{drafter['name']} idle: {drafter['num_requests']} requests"
        if open_calls := self._open_calls():
            yield f"the API idle: {open_calls:g} calls in progress"
        for actor, num in self._num_processes.items():
            if (found := len(self.server.workers(actor))) != num:
                yield f"{found} processes of {actor}, not {num}"


def measure(start: Callable[[ExitStack, int], FaultRows], num_times: int, asks: Sequence[LoadRequest]) -> Measured:
    """Each row ``num_times``, on one server after the other: the next one is started when one does not recover. On SIGINT
    the row under way is the last.

    Args:
        start: starts the server of a number, and leaves its end to the stack.
    """
    found = Measured()
    turns: Turns | None = None
    for number in range(MAX_SERVERS):
        try:
            with ExitStack() as stack:
                rows = start(stack, number)
                turns = turns or Turns(rows.table(), num_times)
                found.interrupted = _measure_on(rows, turns, asks)
                found.lost += rows.lost
        except (OutriderError, TimeoutError, httpx.HTTPError) as error:  # what was measured counts
            found.lost.append(f"server number {number + 1}, which did not start or end as it should: {error}")
        except KeyboardInterrupt:  # while it started or ended
            found.interrupted = True
        if found.interrupted or (turns is not None and turns.are_over):
            break
    found.rows = [] if turns is None else turns.results()
    return found


def _measure_on(rows: FaultRows, turns: Turns, asks: Sequence[LoadRequest]) -> bool:
    """Returns whether SIGINT ended it."""
    with ThreadPoolExecutor(1, thread_name_prefix="fault rows") as executor:
        measuring = executor.submit(rows.measure, turns, asks)
        interrupted = False
        try:
            wait([measuring])
        except KeyboardInterrupt:
            interrupted = True
            turns.end()
            rows.console.print("faults: interrupted, the row under way is the last", highlight=False)
        measuring.result()
    return interrupted
