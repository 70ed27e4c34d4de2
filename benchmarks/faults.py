"""Faults of a running server: killed processes, faulty peers, a long pass, missing resources.

Streams must keep their tokens, no other process may end, and killed processes must return soon. The first server has one
target, so that its loss shows to clients. Then the rows of the fault table are measured on a server with two targets. Faults
of machines are those over hosts.
"""

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.disturbed import (
    DEADLINE_S,
    POLL_S,
    Disturbed,
    DisturbedServer,
    routes_again,
    target_is_ready,
)
from benchmarks.fault_rows import SHOWN, RowResult, measure
from benchmarks.host_rows import start_host_rows
from benchmarks.injections import (
    is_refused,
    locked_state,
    overheard,
    slowed,
    target_address,
    unlinked_peers,
    without_descriptors,
)
from benchmarks.load import LoadRequest, TimedAnswer, checked
from benchmarks.local_rows import start_local_rows
from benchmarks.report import BenchOptions, BenchResult, Table
from benchmarks.serve import local_config, tokenize, with_state
from benchmarks.server import ServerProcess
from cluster.config import Config, PolicyConfig, RouterConfig
from engine.models.prepare import ensure_model
from router.planning.planner import MAX_CHUNK_S

NUM_STREAMS = 8
MAX_PROMPT_LEN = 256
SLOW_PROMPT_LEN = 400
SLOW_PASS_S = 120.0  # duration of the pass without slowing
SLOWED_S = 36.0  # time observed of it; a target silent for 30 s counts as hung
OVERHEARD_S = 1.0
NO_DESCRIPTORS_S = 1.5
NUM_TIMES, NUM_TIMES_OVER_HOSTS = 20, 5  # each row of the fault table
NUM_ROW_STREAMS, NUM_ROW_TOKENS = 4, 48


def run(options: BenchOptions) -> BenchResult:
    """Figures:

    - ``identical_fraction``, over the streams whose target was not killed;
    - ``num_lost``: processes that ended without being killed, and streams that ended with an error that no promise allows,
      of requests that came before or with the fault;
    - ``router.*``: of a router killed while the state folder is locked;
    - ``unsound.num_unlinked`` of two faulty peers; ``slow_pass.ttft_s``;
    - ``target.clear_error_fraction``; ``target_recovery_s``, from the kill to the first new answer, and
      ``target.start_cpu_s``, the processor time of the new process until then; ``handshake.secret_overheard``;
    - ``num_wrong_tokens``, of streams whose text differs;
    - of the rows of the fault table, each 20 times (once if quick): ``num_rows``; ``least_times``, how often the rarest was
      measured; ``num_leaked``: requests, KV blocks and processes that are left; ``ROW.recovery_p50_s`` and ``_p99_s``, at
      least 1.5 s.

    SIGINT ends the repetitions when the row under way has ended, and what was measured is reported. The rows of a server are
    repeated in turn, so that a shorter run has each as often, give or take one.

    Over hosts: only the rows of `benchmarks.host_rows`, each five times (once if quick).

    Runs in fp32, where batch shape flips no token, with half of the streams sampled (T = 0.8).
    """
    num_tokens = 96 if options.quick else 192
    folder = ensure_model(options.model)
    prompts = tokenize(folder, options.prompts, NUM_STREAMS)
    asks = [
        LoadRequest(f"stream-{i}", prompt[-MAX_PROMPT_LEN:], num_tokens, temperature=0.8 * (i % 2), seed=1000 + i)
        for i, prompt in enumerate(prompts)
    ]
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as temporary:
        config = with_files(pinned(local_config(options.model)), Path(temporary))
        if options.hosts:
            return _over_hosts(config, asks[:NUM_ROW_STREAMS], 1 if options.quick else NUM_TIMES_OVER_HOSTS)
        with ServerProcess(config) as server:
            outcome = _FaultBench(server, folder).all_faults(asks)
        asks = [replace(ask, max_tokens=NUM_ROW_TOKENS) for ask in asks[:NUM_ROW_STREAMS]]
        num_times = 1 if options.quick else NUM_TIMES
        measured = measure(lambda stack, n: start_local_rows(stack, config, Path(temporary) / f"rows-{n}"), num_times, asks)
        return _result(outcome, measured.rows, measured.lost)


def with_files(config: Config, folder: Path) -> Config:
    """With a known secret and its own state."""
    token_file = folder / "token"
    token_file.write_text(secrets.token_hex(32), encoding="utf-8")
    cluster = config.cluster.model_copy(update={"token_file": token_file})
    return with_state(config.model_copy(update={"cluster": cluster}), folder / "state")


def pinned(config: Config) -> Config:
    """One drafter in its own process, which all requests use: a kill always hits the active drafter."""
    drafter = next(drafter for drafter in config.drafters if not drafter.is_colocated)
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"dtype": "float32"}),
            "drafters": (drafter,),
            "router": RouterConfig(policy=PolicyConfig(kind="fixed", chain=(drafter.name,))),
        }
    )


@dataclass(slots=True)
class FaultOutcome:
    """Results of the whole benchmark."""

    plain: list[TimedAnswer]
    unsound: Disturbed
    router: Disturbed
    target: Disturbed
    num_unlinked: int
    is_stranger_refused: bool
    state_notes: Sequence[str]
    slow_ttft_s: float
    overheard: bytes
    secret: str
    lost: Sequence[str]
    target_start_cpu_s: float


def recoveries(rows: Sequence[RowResult]) -> dict[str, float]:
    """Figures of the rows from which the server recovered."""
    found = {f"{row.name}.recovery_p{percent}_s": row.recovery_s(percent) for row in rows for percent in SHOWN}
    return {name: value for name, value in found.items() if value is not None}


class _FaultBench(DisturbedServer):
    def __init__(self, server: ServerProcess, model_folder: Path) -> None:
        super().__init__(server)
        self._model_folder = model_folder

    def all_faults(self, asks: Sequence[LoadRequest]) -> FaultOutcome:
        config = self.server.config
        assert config.cluster.state.url is None
        assert config.cluster.token_file is not None
        secret, state = config.cluster.token_file.read_text(), config.cluster.state.folder / config.cluster.namespace
        with self.phase("undisturbed"):
            plain = asyncio.run(self.undisturbed(asks))
        unlinked: list[int] = []
        with self.phase("a drafter and a gateway send unsound messages"):
            address = target_address(self.server)
            refused = is_refused(address, self._model_folder)
            unsound = asyncio.run(
                self.disturbed(
                    asks, lambda: unlinked.append(unlinked_peers(self.server, self._model_folder, secret)), lambda _: True
                )
            )
        with locked_state(state), self.phase("the state folder is locked, and the router is killed"):
            router = asyncio.run(self.disturbed(asks, lambda: self.kill("RouterActor"), routes_again()))
            notes = self._state_notes()
        with self.phase("a pass takes longer than a process may be silent"):
            slow_ttft_s = asyncio.run(self._slow_pass())
        heard: list[bytes] = []
        with locked_state(state), self.phase("the target is killed, a stranger listens there, nobody can dial"):
            target = asyncio.run(self.disturbed(asks, lambda: heard.append(self._kill_target(address)), target_is_ready()))
            asyncio.run(self.until_answered(asks[0]))
            target.recovery_s = time.monotonic() - target.killed_s
            used = self.server.workers("TargetActor")[0].cpu_times()
        return FaultOutcome(
            plain, unsound, router, target, unlinked[0], refused, notes, slow_ttft_s, heard[0], secret,
            self.lost, used.user + used.system,
        )  # fmt: skip

    def _state_notes(self) -> list[str]:
        """The status notes once the new router has tried to load its snapshot."""
        until_s = time.monotonic() + DEADLINE_S
        with self.server.client() as client:
            while not (notes := client.get("/v1/outrider/status").json()["notes"]) and time.monotonic() < until_s:
                time.sleep(POLL_S)
        return list(notes)

    def _kill_target(self, address: str) -> bytes:
        """Meanwhile records what peers send to its address, and takes file descriptors away for a while."""
        (api,) = self.server.workers("ServeReplica")
        (drafter,) = self.server.workers("DrafterActor")
        self.kill("TargetActor")
        heard = overheard(address, OVERHEARD_S)
        with without_descriptors(api), without_descriptors(drafter):
            time.sleep(NO_DESCRIPTORS_S)
        return heard

    async def _slow_pass(self) -> float:
        """Time to first token of a prompt whose pass is slowed down. Raises FaultBenchFailed if none came."""
        (target,) = self.server.workers("TargetActor")
        first, second = (tuple((7 * i + salt) % 2000 + 1000 for i in range(SLOW_PROMPT_LEN)) for salt in (1, 5))
        usual = checked([await self.target.ask(LoadRequest("usual", first, 1))])[0]
        slow = asyncio.create_task(self.target.ask(LoadRequest("slow", second, 1)))
        with slowed(target, SLOW_PASS_S / min(usual.ttft_s, MAX_CHUNK_S)):
            await asyncio.wait({slow}, timeout=SLOWED_S)
        return checked([await slow])[0].ttft_s


def _result(outcome: FaultOutcome, rows: Sequence[RowResult], rows_lost: Sequence[str]) -> BenchResult:
    plain, target = outcome.plain, outcome.target
    kept = {"unsound": outcome.unsound, "router": outcome.router}
    same = {name: run.identical_fraction(plain) for name, run in kept.items()}
    pairs = [(one, answer) for run in kept.values() for one, answer in zip(plain, run.answers, strict=True)]
    ended = [answer.error for _, answer in pairs if answer.error is not None]
    num_wrong_tokens = sum(one.num_tokens for one, answer in pairs if answer.error is None and answer.text != one.text)
    undisturbed_gap_s = Disturbed(0.0, list(plain)).max_gap_s
    of_rows = row_figures(rows, rows_lost)
    whats = {
        "unsound": "two peers send unsound messages",
        "router": "the router is killed, the state folder is locked",
    }
    return BenchResult(
        bench="faults",
        figures={
            "identical_fraction": min(same.values()),
            **of_rows,
            "num_lost": len(outcome.lost) + len(ended) + of_rows["num_lost"],
            "num_wrong_tokens": num_wrong_tokens + of_rows["num_wrong_tokens"],
            "router.identical_fraction": same["router"],
            "router.max_gap_s": outcome.router.max_gap_s,
            "router.recovery_s": outcome.router.recovery_s,
            "router.num_state_notes": len(outcome.state_notes),
            "unsound.identical_fraction": same["unsound"],
            "unsound.num_unlinked": outcome.num_unlinked,
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
            _table("with two targets", rows),
        ),
        notes=(
            *(f"ended and was not killed: {name}" for name in (*outcome.lost, *rows_lost)),
            *(f"a stream of the first server ended: {error}" for error in ended),
            *(("not measured without redis-server: redis_lost",) if not shutil.which("redis-server") else ()),
            *(f"{row.name}: {text}" for row in rows for text in row.complaints),
            *(f"the status says: {note}" for note in outcome.state_notes),
            *(f"a stream whose target was killed ends with: {text}" for text in _errors(target)[:1]),
        ),
    )


def _over_hosts(config: Config, asks: Sequence[LoadRequest], num_times: int) -> BenchResult:
    found = measure(lambda stack, _: start_host_rows(stack, config), num_times, asks)
    return BenchResult(
        bench="faults",
        figures=row_figures(found.rows, found.lost),
        tables=(_table("over hosts", found.rows),),
        notes=(
            *(f"ended and was not killed: {name}" for name in found.lost),
            *(f"{row.name}: {text}" for row in found.rows for text in row.complaints),
        ),
    )


def row_figures(rows: Sequence[RowResult], lost: Sequence[str]) -> dict[str, float]:
    return {
        "num_lost": len(lost) + sum(row.num_lost for row in rows),
        "num_wrong_tokens": sum(row.num_wrong_tokens for row in rows),
        "num_rows": len(rows),
        "least_times": min((len(row.runs) for row in rows), default=0),
        "num_leaked": sum(row.num_leaked for row in rows),
        "num_resumed": sum(row.num_resumed for row in rows),
        **recoveries(rows),
    }


def _table(title: str, rows: Sequence[RowResult]) -> Table:
    columns = ("fault", "times", "wrong tokens", "lost", "leaked", "resumed", "longest gap s", "recovery p50 s", "p99 s")
    return Table(title, columns, tuple(row.cells() for row in rows))


def _errors(run: Disturbed) -> list[str]:
    return [answer.error for answer in run.answers if answer.error is not None]
