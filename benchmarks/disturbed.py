"""A running server under load, some of whose processes are disturbed meanwhile."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.injections import lost, running
from benchmarks.load import LoadRequest, TimedAnswer, checked, run_streams
from benchmarks.server import ServerProcess
from cluster.errors import OutriderError

# Pieces per stream before a fault is injected.
NUM_PIECES = 8
POLL_S = 0.05
RECOVERY_POLL_S = 0.2  # finding a server's processes takes some 20 ms of a core, which the server could use
STATUS_AGE_S = 1.5  # the API's status is up to a second old
DEADLINE_S = 300.0


# A figure of the cluster by its name and member ("": none).
Metrics = Mapping[tuple[str, str], float]


class FaultBenchFailed(OutriderError):
    """A measurement was not possible."""


@dataclass(slots=True)
class Disturbed:
    """A run in which a process was killed. Times are monotonic."""

    killed_s: float
    answers: list[TimedAnswer] = field(default_factory=list)
    recovery_s: float = 0.0
    arrived: list[TimedAnswer] = field(default_factory=list)  # to requests that came with the fault

    @property
    def max_gap_s(self) -> float:
        """Longest time between consecutive pieces of a stream, the second of which came after the kill."""
        gaps_s = [
            later - earlier
            for answer in self.answers
            for earlier, later in zip(answer.pieces_s, answer.pieces_s[1:], strict=False)
            if answer.sent_s + later > self.killed_s
        ]
        if not gaps_s:
            raise FaultBenchFailed("every stream had ended before the kill: ask for more tokens")
        return max(gaps_s)

    def identical_fraction(self, plain: Sequence[TimedAnswer]) -> float:
        pairs = list(zip(plain, self.answers, strict=True))
        same = sum(a.error is None and a.text == b.text and a.num_tokens == b.num_tokens for a, b in pairs)
        return same / len(pairs)

    @property
    def clear_error_fraction(self) -> float:
        """Share of the open streams that ended with an error that says what to do."""
        cut_off = [answer for answer in self.answers if answer.error is not None]
        return sum("again" in (answer.error or "") for answer in cut_off) / len(cut_off) if cut_off else 0.0


class DisturbedServer:
    """Runs streams on a server and injects faults. ``lost``: processes that ended without being killed, and when."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.target = server.target()
        self.console = Console(stderr=True)
        self.killed: set[psutil.Process] = set()
        self.lost: list[str] = []

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Records processes that ended in this phase without being killed."""
        self.console.print(f"faults: {what}", highlight=False)
        before, num_words = running(self.server), self.server.num_words()
        yield
        if ended := lost(before, self.killed):
            reasons = "; ".join(self.server.words_with(" is down: ", num_words))
            self.lost += [f"{name} ({what}; the log: {reasons or 'says nothing of it'})" for name in ended]

    def kill(self, actor: str) -> psutil.Process:
        processes = self.server.workers(actor)
        if not processes:
            raise FaultBenchFailed(f"there is no {actor} to kill: {self.server.last_words()}")
        self.killed.add(processes[0])
        processes[0].kill()
        return processes[0]

    def all_ready(self) -> bool:
        with self.server.client() as client:
            try:
                status = client.get("/v1/outrider/status")
            except httpx.TransportError:
                return False
        if status.status_code != httpx.codes.OK:
            return False
        members = (*status.json()["targets"], *status.json()["drafters"])
        return bool(members) and all(member["state"] == "ready" for member in members)

    async def undisturbed(self, asks: Sequence[LoadRequest]) -> list[TimedAnswer]:
        return checked(await run_streams(self.target.ask, asks, len(asks)))

    async def disturbed(
        self,
        asks: Sequence[LoadRequest],
        injure: Callable[[], object],
        recovered: Callable[[Metrics], bool],
        arriving: Sequence[LoadRequest] = (),
    ) -> Disturbed:
        """Runs streams, injects the fault once all of them flow, and sends further requests until ``recovered``.

        Args:
            arriving: of two requests the first is sent when the fault begins, the second when it has been injected.
        """
        async with self._http() as client, asyncio.timeout(DEADLINE_S):
            flowing = {ask.id: asyncio.Event() for ask in asks}

            def ask_one(ask: LoadRequest) -> Awaitable[TimedAnswer]:
                flows = flowing[ask.id]
                return self.target.ask(ask, lambda number: flows.set() if number >= NUM_PIECES else None)

            streams = asyncio.create_task(run_streams(ask_one, asks, len(asks)))
            tasks: list[asyncio.Task[Any]] = [streams]
            try:
                await asyncio.gather(*(flows.wait() for flows in flowing.values()))
                outcome = Disturbed(killed_s=time.monotonic())
                arrived = [asyncio.create_task(self.target.ask(ask)) for ask in arriving[:1]]
                tasks += arrived
                await asyncio.to_thread(injure)
                arrived += [asyncio.create_task(self.target.ask(ask)) for ask in arriving[1:]]
                tasks += arrived[1:]
                tasks.append(asyncio.create_task(self._further_requests(asks, streams)))
                while not await asyncio.to_thread(recovered, await self._metrics(client)):  # noqa: ASYNC110 - HTTP has no event for it
                    await asyncio.sleep(RECOVERY_POLL_S)
                outcome.recovery_s = time.monotonic() - outcome.killed_s
                outcome.answers = await streams
                outcome.arrived = [await one for one in arrived]
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            if failed := [end for end in ends if isinstance(end, Exception)]:
                raise failed[0]
            return outcome

    async def until_answered(self, ask: LoadRequest) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self.target.ask(ask)).error is not None:  # noqa: ASYNC110 - HTTP has no event for it
                await asyncio.sleep(POLL_S)

    async def _further_requests(self, asks: Sequence[LoadRequest], after: asyncio.Task[list[TimedAnswer]]) -> None:
        """Sends requests one by one, so that there is drafting. Starts after the streams, whose gaps their prefill would
        widen."""
        await asyncio.wait({after})
        while True:
            for ask in asks:
                await self.target.ask(LoadRequest("further", ask.prompt_token_ids, 32))
                await asyncio.sleep(POLL_S)

    async def _metrics(self, client: httpx.AsyncClient) -> Metrics:
        try:
            answer = await client.get("/metrics")
        except httpx.TransportError:
            return {}
        if answer.status_code != httpx.codes.OK:
            return {}
        return {
            (sample.name, sample.labels.get("drafter") or sample.labels.get("target") or ""): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=DEADLINE_S, trust_env=False)


def routes_again() -> Callable[[Metrics], bool]:
    """A new table was published after the kill."""
    first: float | None = None

    def recovered(metrics: Metrics) -> bool:
        nonlocal first
        version = metrics.get(("outrider_routing_table_version", ""))
        if version is None:
            return False
        first = version if first is None else first
        return version > first

    return recovered


def target_is_ready() -> Callable[[Metrics], bool]:
    """It was down and is ready."""
    seen_down = False

    def recovered(metrics: Metrics) -> bool:
        nonlocal seen_down
        ready = any(value for (name, _), value in metrics.items() if name == "outrider_target_ready")
        seen_down = seen_down or not ready
        return seen_down and ready

    return recovered
