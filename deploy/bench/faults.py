"""Streams while a drafter, the router and the target are killed: the same tokens, small gaps, quick recovery."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from cluster.config import Config, FixedPolicy, RouterConfig
from cluster.errors import OutriderError
from deploy.bench.load import Answer, Ask, HttpTarget, run_streams
from deploy.bench.report import BenchOptions, BenchResult, Table
from deploy.bench.serve import checked, local_config, tokenize
from deploy.bench.server import ServerProcess
from engine.models.prepare import ensure_model

NUM_STREAMS = 8
MAX_PROMPT_LEN = 256
# Pieces that every stream must have sent before something is killed: all are in full swing then.
NUM_PIECES = 8
POLL_S = 0.05
DEADLINE_S = 120.0

# A figure of the cluster's, by its name and the member that it tells of ("" where there is none).
Metrics = Mapping[tuple[str, str], float]


class FaultBenchFailed(OutriderError):
    """What was to be measured did not happen."""


def run(options: BenchOptions) -> BenchResult:
    """Figures: ``identical_fraction``, ``max_gap_s`` and ``recovery_s`` of a killed drafter; ``router.identical_fraction``
    and ``router.max_gap_s``; ``target.clear_error_fraction`` and ``target_recovery_s``.

    In fp32, where a batch of another shape does not flip a token, and with half of the streams sampled (T = 0.8).
    """
    num_tokens = 96 if options.quick else 192
    console = Console(stderr=True)
    config = pinned(local_config(options.model))
    prompts = asyncio.run(tokenize(ensure_model(options.model), options.prompts, NUM_STREAMS))
    asks = [
        Ask(f"stream-{i}", prompt[-MAX_PROMPT_LEN:], num_tokens, temperature=0.8 * (i % 2), seed=1000 + i)
        for i, prompt in enumerate(prompts)
    ]
    with ServerProcess(config) as server:
        bench = _Bench(server)
        console.print("faults: undisturbed", highlight=False)
        plain = asyncio.run(bench.undisturbed(asks))
        console.print("faults: a drafter is killed", highlight=False)
        drafter = asyncio.run(bench.disturbed(asks, "DrafterActor", drafts_again(config.drafters[0].name)))
        console.print("faults: the router is killed", highlight=False)
        router = asyncio.run(bench.disturbed(asks, "RouterActor", routes_again()))
        console.print("faults: the target is killed", highlight=False)
        target = asyncio.run(bench.disturbed(asks, "TargetActor", target_is_ready()))
        asyncio.run(bench.until_answered(asks[0]))
        target.recovery_s = time.monotonic() - target.killed_s
    return _result(plain, drafter, router, target)


def pinned(config: Config) -> Config:
    """One drafter with a process of its own, which every request is sent to: whoever is killed was drafting."""
    drafter = next(drafter for drafter in config.drafters if not drafter.is_companion)
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"dtype": "float32"}),
            "drafters": (drafter,),
            "router": RouterConfig(policy=FixedPolicy(chain=(drafter.name,))),
        }
    )


@dataclass(slots=True)
class Disturbed:
    """A run in which a process was killed. Times are monotonic."""

    killed_s: float
    answers: list[Answer] = field(default_factory=list)
    recovery_s: float = 0.0

    @property
    def max_gap_s(self) -> float:
        """The longest time between two pieces of a stream of which the second came after the kill."""
        gaps_s = [
            later - earlier
            for answer in self.answers
            for earlier, later in zip(answer.pieces_s, answer.pieces_s[1:], strict=False)
            if answer.sent_s + later > self.killed_s
        ]
        if not gaps_s:
            raise FaultBenchFailed("every stream had ended before the kill: ask for more tokens")
        return max(gaps_s)

    def identical_fraction(self, plain: Sequence[Answer]) -> float:
        pairs = list(zip(plain, self.answers, strict=True))
        same = sum(a.error is None and a.text == b.text and a.num_tokens == b.num_tokens for a, b in pairs)
        return same / len(pairs)

    @property
    def clear_error_fraction(self) -> float:
        """Of the streams that were under way: how many ended with an error that says what to do."""
        cut_off = [answer for answer in self.answers if answer.error is not None]
        return sum("again" in (answer.error or "") for answer in cut_off) / len(cut_off) if cut_off else 0.0


class _Bench:
    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        with server.client() as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
        self._target = HttpTarget(server.config.api.host, server.config.api.port, model)

    async def undisturbed(self, asks: Sequence[Ask]) -> list[Answer]:
        return checked(await run_streams(self._target.ask, asks, NUM_STREAMS))

    async def disturbed(self, asks: Sequence[Ask], actor: str, recovered: Callable[[Metrics], bool]) -> Disturbed:
        """Streams; the kill, once all of them flow; and the wait until ``recovered``, for which further requests run."""
        async with self._http() as client, asyncio.timeout(DEADLINE_S):
            flowing = {ask.id: asyncio.Event() for ask in asks}

            def ask_one(ask: Ask) -> Awaitable[Answer]:
                flows = flowing[ask.id]
                return self._target.ask(ask, lambda number: flows.set() if number >= NUM_PIECES else None)

            streams = asyncio.create_task(run_streams(ask_one, asks, NUM_STREAMS))
            await asyncio.gather(*(flows.wait() for flows in flowing.values()))
            self._server.workers(actor)[0].kill()
            outcome = Disturbed(killed_s=time.monotonic())
            load = asyncio.create_task(self._further_requests(asks, streams))
            try:
                while not recovered(await self._metrics(client)):  # noqa: ASYNC110 - HTTP has no event for it
                    await asyncio.sleep(POLL_S)
                outcome.recovery_s = time.monotonic() - outcome.killed_s
                outcome.answers = await streams
            finally:
                load.cancel()
                with suppress(asyncio.CancelledError):
                    await load
            return outcome

    async def until_answered(self, ask: Ask) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self._target.ask(ask)).error is not None:  # noqa: ASYNC110 - HTTP has no event for it
                await asyncio.sleep(POLL_S)

    async def _further_requests(self, asks: Sequence[Ask], after: asyncio.Task[list[Answer]]) -> None:
        """One after the other, so that there is something to draft for. Not before the streams have ended: reading their
        prompts would tear gaps into those."""
        await asyncio.wait({after})
        while True:
            for ask in asks:
                await self._target.ask(Ask("further", ask.prompt_token_ids, 32))
                await asyncio.sleep(POLL_S)

    async def _metrics(self, client: httpx.AsyncClient) -> Metrics:
        try:
            text = (await client.get("/metrics")).text
        except httpx.TransportError:
            return {}
        return {
            (sample.name, sample.labels.get("drafter") or sample.labels.get("target") or ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._server.url, timeout=DEADLINE_S, trust_env=False)


def drafts_again(drafter: str) -> Callable[[Metrics], bool]:
    """Draft tokens were verified after the restart was counted: the new process has proposed."""
    first: float | None = None

    def recovered(metrics: Metrics) -> bool:
        nonlocal first
        if (
            metrics.get(("outrider_drafter_restarts_total", drafter), 0.0) < 1
            or not metrics["outrider_drafter_ready", drafter]
        ):
            return False
        verified = metrics["outrider_drafter_verified_total", drafter]
        first = verified if first is None else first
        return verified > first

    return recovered


def routes_again() -> Callable[[Metrics], bool]:
    """Another table was published since the first look after the kill."""
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
    """It was seen to be down, and is ready."""
    seen_down = False

    def recovered(metrics: Metrics) -> bool:
        nonlocal seen_down
        ready = any(value for (name, _), value in metrics.items() if name == "outrider_target_ready")
        seen_down = seen_down or not ready
        return seen_down and ready

    return recovered


def _result(plain: Sequence[Answer], drafter: Disturbed, router: Disturbed, target: Disturbed) -> BenchResult:
    drafted = sum(answer.num_proposed for answer in plain)
    return BenchResult(
        bench="faults",
        figures={
            "identical_fraction": drafter.identical_fraction(plain),
            "max_gap_s": drafter.max_gap_s,
            "recovery_s": drafter.recovery_s,
            "router.identical_fraction": router.identical_fraction(plain),
            "router.max_gap_s": router.max_gap_s,
            "router.recovery_s": router.recovery_s,
            "target.clear_error_fraction": target.clear_error_fraction,
            "target_recovery_s": target.recovery_s,
            "undisturbed.max_gap_s": Disturbed(0.0, list(plain)).max_gap_s,
            "undisturbed.num_proposed": drafted,
        },
        tables=(
            Table(
                "killed with SIGKILL, with 8 streams under way",
                ("process", "streams as undisturbed", "longest gap s", "recovery s"),
                (
                    ("nothing", 1.0, Disturbed(0.0, list(plain)).max_gap_s, 0.0),
                    ("drafter", drafter.identical_fraction(plain), drafter.max_gap_s, drafter.recovery_s),
                    ("router", router.identical_fraction(plain), router.max_gap_s, router.recovery_s),
                    ("target", target.identical_fraction(plain), "-", target.recovery_s),
                ),
            ),
        ),
        notes=tuple(f"a stream whose target was killed ends with: {text}" for text in _errors(target)[:1]),
    )


def _errors(run: Disturbed) -> list[str]:
    return [answer.error for answer in run.answers if answer.error is not None]
