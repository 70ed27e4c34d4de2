"""Faults of a running server: killed processes, faulty peers, a long pass, missing resources.

Streams must keep their tokens, no other process may end, and killed processes must return soon.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.injections import (
    is_refused,
    locked_state,
    lost,
    overheard,
    running,
    slowed,
    target_address,
    unlinked_peers,
    without_descriptors,
)
from benchmarks.load import HttpTarget, LoadRequest, TimedAnswer, run_streams
from benchmarks.recovery import Metrics, drafts_again, routes_again, target_is_ready
from benchmarks.report import BenchOptions, BenchResult, Table
from benchmarks.serve import checked, local_config, tokenize
from benchmarks.server import ServerProcess
from cluster.config import Config, FileStateConfig, FixedPolicy, RouterConfig
from cluster.errors import OutriderError
from engine.models.prepare import ensure_model
from router.planner import MAX_CHUNK_S

NUM_STREAMS = 8
MAX_PROMPT_LEN = 256
# Pieces per stream before a fault is injected.
NUM_PIECES = 8
NUM_SUPERVISORS = 7  # each took one of a member's six threads before
SLOW_PROMPT_LEN = 400
SLOW_PASS_S = 120.0  # duration of the pass without slowing
SLOWED_S = 36.0  # time observed of it; a target silent for 30 s counts as hung
OVERHEARD_S = 1.0
NO_DESCRIPTORS_S = 1.5
POLL_S = 0.05
STATUS_AGE_S = 1.5  # the API's status is up to a second old
DEADLINE_S = 300.0


class FaultBenchFailed(OutriderError):
    """A measurement was not possible."""


def run(options: BenchOptions) -> BenchResult:
    """Figures:

    - ``identical_fraction``, over the streams whose target was not killed;
    - ``num_lost``: processes that ended without being killed;
    - ``max_gap_s`` and ``recovery_s`` of a killed drafter;
    - ``router.*``: of a router killed while the state folder is locked;
    - ``unsound.num_unlinked`` of two faulty peers; ``supervisor.num_killed``; ``slow_pass.ttft_s``;
    - ``target.clear_error_fraction``; ``target_recovery_s``, from the kill to the first new answer, and
      ``target.start_cpu_s``, the processor time of the new process until then; ``handshake.secret_overheard``.

    Runs in fp32, where batch shape flips no token, with half of the streams sampled (T = 0.8).
    """
    num_tokens = 96 if options.quick else 192
    folder = ensure_model(options.model)
    prompts = asyncio.run(tokenize(folder, options.prompts, NUM_STREAMS))
    asks = [
        LoadRequest(f"stream-{i}", prompt[-MAX_PROMPT_LEN:], num_tokens, temperature=0.8 * (i % 2), seed=1000 + i)
        for i, prompt in enumerate(prompts)
    ]
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as temporary:
        config = with_files(pinned(local_config(options.model)), Path(temporary))
        with ServerProcess(config) as server:
            return _result(_FaultBench(server, folder).all_faults(asks))


def with_files(config: Config, folder: Path) -> Config:
    """With a known secret and its own state."""
    token_file = folder / "token"
    token_file.write_text(secrets.token_hex(32), encoding="utf-8")
    cluster = config.cluster.model_copy(update={"token_file": token_file, "state": FileStateConfig(folder=folder / "state")})
    return config.model_copy(update={"cluster": cluster})


def pinned(config: Config) -> Config:
    """One drafter in its own process, which all requests use: a kill always hits the active drafter."""
    drafter = next(drafter for drafter in config.drafters if not drafter.is_colocated)
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
    answers: list[TimedAnswer] = field(default_factory=list)
    recovery_s: float = 0.0

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


@dataclass(slots=True)
class FaultOutcome:
    """Results of the whole benchmark."""

    plain: list[TimedAnswer]
    drafter: Disturbed
    unsound: Disturbed
    router: Disturbed
    supervisor: Disturbed
    target: Disturbed
    num_unlinked: int
    is_stranger_refused: bool
    state_notes: Sequence[str]
    slow_ttft_s: float
    overheard: bytes
    secret: str
    lost: Sequence[str]
    target_start_cpu_s: float


class _FaultBench:
    def __init__(self, server: ServerProcess, model_folder: Path) -> None:
        self._server = server
        self._model_folder = model_folder
        with server.client() as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
        self._target = HttpTarget(server.config.api.host, server.config.api.port, model)
        self._console = Console(stderr=True)
        self._killed: set[psutil.Process] = set()
        self._lost: list[str] = []

    def all_faults(self, asks: Sequence[LoadRequest]) -> FaultOutcome:
        config = self._server.config
        assert isinstance(config.cluster.state, FileStateConfig)
        assert config.cluster.token_file is not None
        secret, state = config.cluster.token_file.read_text(), config.cluster.state.folder / config.cluster.namespace
        with self._phase("undisturbed"):
            plain = asyncio.run(self.undisturbed(asks))
        with self._phase("a drafter is killed"):
            back = drafts_again(config.drafters[0].name)
            drafter = asyncio.run(self.disturbed(asks, lambda: self._kill("DrafterActor"), back))
        unlinked: list[int] = []
        with self._phase("a drafter and a gateway send unsound messages"):
            address = target_address(self._server)
            refused = is_refused(address, self._model_folder)
            unsound = asyncio.run(
                self.disturbed(
                    asks, lambda: unlinked.append(unlinked_peers(self._server, self._model_folder, secret)), lambda _: True
                )
            )
        with locked_state(state), self._phase("the state folder is locked, and the router is killed"):
            router = asyncio.run(self.disturbed(asks, lambda: self._kill("RouterActor"), routes_again()))
            notes = self._state_notes()
        with self._phase(f"{NUM_SUPERVISORS} supervisors are killed, one after the other"):
            supervisor = asyncio.run(self.disturbed(asks, self._kill_supervisors, lambda _: True))
        with self._phase("a pass takes longer than a process may be silent"):
            slow_ttft_s = asyncio.run(self._slow_pass())
        heard: list[bytes] = []
        with locked_state(state), self._phase("the target is killed, a stranger listens there, nobody can dial"):
            target = asyncio.run(self.disturbed(asks, lambda: heard.append(self._kill_target(address)), target_is_ready()))
            asyncio.run(self.until_answered(asks[0]))
            target.recovery_s = time.monotonic() - target.killed_s
            used = self._server.workers("TargetActor")[0].cpu_times()
        return FaultOutcome(
            plain, drafter, unsound, router, supervisor, target, unlinked[0], refused, notes, slow_ttft_s, heard[0], secret,
            self._lost, used.user + used.system,
        )  # fmt: skip

    @contextmanager
    def _phase(self, what: str) -> Iterator[None]:
        """Records processes that ended in this phase without being killed."""
        self._console.print(f"faults: {what}", highlight=False)
        before = running(self._server)
        yield
        self._lost += lost(before, self._killed)

    def _kill(self, actor: str) -> psutil.Process:
        processes = self._server.workers(actor)
        if not processes:
            raise FaultBenchFailed(f"there is no {actor} to kill: {self._server.last_words()}")
        self._killed.add(processes[0])
        processes[0].kill()
        return processes[0]

    def _kill_supervisors(self) -> None:
        """Kills each supervisor as soon as its predecessor's replacement answers."""
        for _ in range(NUM_SUPERVISORS):
            killed_s, killed = time.monotonic(), self._kill("PoolSupervisor")
            while not (self._is_replaced(killed) and time.monotonic() > killed_s + STATUS_AGE_S and self._all_ready()):
                if time.monotonic() > killed_s + DEADLINE_S:
                    raise FaultBenchFailed(f"no supervisor after {DEADLINE_S:g} s: {self._server.last_words()}")
                time.sleep(POLL_S)

    def _is_replaced(self, killed: psutil.Process) -> bool:
        found = self._server.workers("PoolSupervisor")
        return bool(found) and killed not in found

    def _all_ready(self) -> bool:
        with self._server.client() as client:
            try:
                status = client.get("/v1/outrider/status")
            except httpx.TransportError:
                return False
        if status.status_code != httpx.codes.OK:
            return False
        members = (*status.json()["targets"], *status.json()["drafters"])
        return bool(members) and all(member["state"] == "ready" for member in members)

    def _state_notes(self) -> list[str]:
        """The status notes once the new router has tried to load its snapshot."""
        until_s = time.monotonic() + DEADLINE_S
        with self._server.client() as client:
            while not (notes := client.get("/v1/outrider/status").json()["notes"]) and time.monotonic() < until_s:
                time.sleep(POLL_S)
        return list(notes)

    def _kill_target(self, address: str) -> bytes:
        """Meanwhile records what peers send to its address, and takes file descriptors away for a while."""
        (api,) = self._server.workers("ServeReplica")
        (drafter,) = self._server.workers("DrafterActor")
        self._kill("TargetActor")
        heard = overheard(address, OVERHEARD_S)
        with without_descriptors(api), without_descriptors(drafter):
            time.sleep(NO_DESCRIPTORS_S)
        return heard

    async def _slow_pass(self) -> float:
        """Time to first token of a prompt whose pass is slowed down. Raises FaultBenchFailed if none came."""
        (target,) = self._server.workers("TargetActor")
        first, second = (tuple((7 * i + salt) % 2000 + 1000 for i in range(SLOW_PROMPT_LEN)) for salt in (1, 5))
        usual = checked([await self._target.ask(LoadRequest("usual", first, 1))])[0]
        slow = asyncio.create_task(self._target.ask(LoadRequest("slow", second, 1)))
        with slowed(target, SLOW_PASS_S / min(usual.ttft_s, MAX_CHUNK_S)):
            await asyncio.wait({slow}, timeout=SLOWED_S)
        return checked([await slow])[0].ttft_s

    async def undisturbed(self, asks: Sequence[LoadRequest]) -> list[TimedAnswer]:
        return checked(await run_streams(self._target.ask, asks, NUM_STREAMS))

    async def disturbed(
        self, asks: Sequence[LoadRequest], injure: Callable[[], object], recovered: Callable[[Metrics], bool]
    ) -> Disturbed:
        """Runs streams, injects the fault once all of them flow, and sends further requests until ``recovered``."""
        async with self._http() as client, asyncio.timeout(DEADLINE_S):
            flowing = {ask.id: asyncio.Event() for ask in asks}

            def ask_one(ask: LoadRequest) -> Awaitable[TimedAnswer]:
                flows = flowing[ask.id]
                return self._target.ask(ask, lambda number: flows.set() if number >= NUM_PIECES else None)

            streams = asyncio.create_task(run_streams(ask_one, asks, NUM_STREAMS))
            await asyncio.gather(*(flows.wait() for flows in flowing.values()))
            outcome = Disturbed(killed_s=time.monotonic())
            await asyncio.to_thread(injure)
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

    async def until_answered(self, ask: LoadRequest) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self._target.ask(ask)).error is not None:  # noqa: ASYNC110 - HTTP has no event for it
                await asyncio.sleep(POLL_S)

    async def _further_requests(self, asks: Sequence[LoadRequest], after: asyncio.Task[list[TimedAnswer]]) -> None:
        """Sends requests one by one, so that there is drafting. Starts after the streams, whose gaps their prefill would
        widen."""
        await asyncio.wait({after})
        while True:
            for ask in asks:
                await self._target.ask(LoadRequest("further", ask.prompt_token_ids, 32))
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


def _result(outcome: FaultOutcome) -> BenchResult:
    plain, target = outcome.plain, outcome.target
    kept = {
        "drafter": outcome.drafter,
        "unsound": outcome.unsound,
        "router": outcome.router,
        "supervisor": outcome.supervisor,
    }
    same = {name: run.identical_fraction(plain) for name, run in kept.items()}
    undisturbed_gap_s = Disturbed(0.0, list(plain)).max_gap_s
    whats = {
        "drafter": "a drafter is killed",
        "unsound": "two peers send unsound messages",
        "router": "the router is killed, the state folder is locked",
        "supervisor": f"{NUM_SUPERVISORS} supervisors are killed",
    }
    return BenchResult(
        bench="faults",
        figures={
            "identical_fraction": min(same.values()),
            "num_lost": len(outcome.lost),
            "max_gap_s": outcome.drafter.max_gap_s,
            "recovery_s": outcome.drafter.recovery_s,
            "router.identical_fraction": same["router"],
            "router.max_gap_s": outcome.router.max_gap_s,
            "router.recovery_s": outcome.router.recovery_s,
            "router.num_state_notes": len(outcome.state_notes),
            "unsound.identical_fraction": same["unsound"],
            "unsound.num_unlinked": outcome.num_unlinked,
            "supervisor.identical_fraction": same["supervisor"],
            "supervisor.num_killed": NUM_SUPERVISORS,
            "slow_pass.ttft_s": outcome.slow_ttft_s,
            "target.clear_error_fraction": target.clear_error_fraction,
            "target_recovery_s": target.recovery_s,
            "target.start_cpu_s": outcome.target_start_cpu_s,
            "handshake.num_bytes_overheard": len(outcome.overheard),
            "handshake.secret_overheard": float(outcome.secret.encode() in outcome.overheard),
            "handshake.stranger_refused": float(outcome.is_stranger_refused),
            "undisturbed.max_gap_s": undisturbed_gap_s,
            "undisturbed.num_proposed": sum(answer.num_proposed for answer in plain),
        },
        tables=(
            Table(
                f"with {NUM_STREAMS} streams under way",
                ("fault", "streams as undisturbed", "longest gap s", "recovery s"),
                (
                    ("none", 1.0, undisturbed_gap_s, 0.0),
                    *((whats[name], same[name], run.max_gap_s, run.recovery_s) for name, run in kept.items()),
                    ("the target is killed", target.identical_fraction(plain), "-", target.recovery_s),
                ),
            ),
        ),
        notes=(
            *(f"ended and was not killed: {name}" for name in outcome.lost),
            *(f"the status says: {note}" for note in outcome.state_notes),
            *(f"a stream whose target was killed ends with: {text}" for text in _errors(target)[:1]),
        ),
    )


def _errors(run: Disturbed) -> list[str]:
    return [answer.error for answer in run.answers if answer.error is not None]
