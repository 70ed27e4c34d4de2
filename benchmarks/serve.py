"""Overhead of HTTP, Ray Serve and separate processes over the same cluster in one process, and their memory."""

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, cycle, islice
from pathlib import Path

from rich.console import Console

from actors.router import RouterActor
from actors.worker import set_threads
from benchmarks.embedded import EmbeddedCluster
from benchmarks.load import (
    HttpTarget,
    LoadRequest,
    TimedAnswer,
    ask_engine,
    checked,
    percentile,
    run_streams,
    sum_tokens,
    tokens_per_s,
)
from benchmarks.process_usage import tree_cpu_s, tree_pss_bytes
from benchmarks.prompts import choose_prompts, encode_chats
from benchmarks.report import BenchOptions, BenchResult, Cell, Table, describe_environment
from benchmarks.server import ServerProcess
from cluster.client import EngineClient
from cluster.config import ApiConfig, Config, ModelConfig, StateConfig, TargetConfig
from cluster.resolve import Inventory, Node, resolve
from cluster.types import RoutingTable
from deploy.api.tokenizer import Tokenizer
from deploy.local_ray import free_port
from drafters.shipped import with_shipped
from engine.models.prepare import ensure_model
from engine.round import TargetLoop
from router.drafter.policies import build_policy, build_pool
from router.drafter.router import Router, SlotReport

NUM_STREAMS = 8
MAX_PROMPT_LEN = 512
SAMPLE_PERIOD_S = 0.5
NUM_BURST, PREFIX_LEN, OWN_LEN, NUM_BURST_TOKENS = 40, 800, 12, 16  # requests, prompt tokens, output tokens
IN_PROCESS = "in process"


def run(options: BenchOptions) -> BenchResult:
    """Figures: ``throughput_over_in_process``, ``ttft_overhead_ms``, ``cached_ttft_over_short``, ``peak_pss_gb``, and their
    components; ``first_answer_s``, from the start of a server whose model is prepared until its first answer.

    Both clusters answer the same requests in turn (A B A B), one idle while the other works. Last, bursts of requests go to
    the server alone: prompts behind a cached prefix, and in turn the same prompts without it, which are the floor.
    """
    num_rounds, num_requests, num_tokens, num_single = (2, 8, 96, 10) if options.quick else (4, 16, 128, 20)
    console = Console(stderr=True)
    config = local_config(options.model, TargetConfig.model_validate({"dtype": options.dtype or "auto"}))
    set_threads(config.target.resources.threads)
    folder = ensure_model(options.model)
    tokenized = tokenize(folder, options.prompts, num_requests * (num_rounds + 3) + num_single + 1)
    prompts, prefix = iter(tokenized), tuple(islice(cycle(chain.from_iterable(tokenized)), PREFIX_LEN))

    def load(name: str) -> list[LoadRequest]:
        """Fresh prompts, since drafters remember answers."""
        return [LoadRequest(f"{name}-{i}", next(prompts), num_tokens) for i in range(num_requests)]

    console.print("serve: to the first answer", highlight=False)
    first_answer_s = _first_answer_s(config, LoadRequest("first", next(prompts), 1))
    console.print("serve: starting both", highlight=False)
    with ServerProcess(config) as server, EmbeddedCluster.of(config) as embedded, _routed(config, embedded.loop):
        bench = _ServeBench(server, embedded.client, embedded.model.name)
        console.print("serve: warming up", highlight=False)
        asyncio.run(bench.throughput(load("warm")))
        pairs = []
        for number in range(num_rounds):
            console.print(f"serve: round {number + 1} of {num_rounds}", highlight=False)
            pairs.append(asyncio.run(bench.throughput(load(f"round-{number}"))))
        console.print("serve: time to first token of an idle server", highlight=False)
        ttfts = asyncio.run(bench.ttft([LoadRequest(f"single-{i}", next(prompts), 1) for i in range(num_single)]))
        console.print("serve: memory under load", highlight=False)
        held = asyncio.run(bench.memory(load("memory")))
        console.print("serve: CPU under load", highlight=False)
        cpu_ms = asyncio.run(bench.cpu_ms_per_token(load("cpu")))
        console.print("serve: bursts of requests that share a cached prefix", highlight=False)
        bursts = [asyncio.run(bench.burst(prefix, number)) for number in range(num_rounds)]
    return _result(first_answer_s, pairs, ttfts, bursts, held, cpu_ms)


def _first_answer_s(config: Config, ask: LoadRequest) -> float:
    began_s = time.monotonic()
    with ServerProcess(config) as server:
        checked([asyncio.run(server.target().ask(ask))])
        return time.monotonic() - began_s


def local_config(model: str, target: TargetConfig | None = None) -> Config:
    """The default configuration, with ``target`` if given, resolved for this machine, at a free port."""
    num_cores = describe_environment().num_cores
    asked = Config(model=ModelConfig(name=model), target=target or TargetConfig(), api=ApiConfig(port=free_port()))
    config = with_shipped(asked)
    return resolve(config, Inventory((Node("here", float(num_cores)),)))


def with_state(config: Config, folder: Path) -> Config:
    """Its state in ``folder``: what an earlier server learned is not known."""
    cluster = config.cluster.model_copy(update={"state": StateConfig(folder=folder)})
    return config.model_copy(update={"cluster": cluster})


def tokenize(folder: Path, files: Sequence[Path], num_prompts: int) -> list[tuple[int, ...]]:
    """Prompts as chats, cut to MAX_PROMPT_LEN, and repeated if the files hold too few."""
    chats = encode_chats(Tokenizer.from_folder(folder), [prompt.text for prompt in choose_prompts(files, num_prompts)])
    return [chats[i % len(chats)][-MAX_PROMPT_LEN:] for i in range(num_prompts)]


class _Loop:
    """`actors.router.Targets` over an in-process loop."""

    def __init__(self, loop: TargetLoop) -> None:
        self._loop = loop

    def reports(self, deadline_s: float) -> list[SlotReport]:
        status = self._loop.status()
        drafters = tuple(name for name, _ in status.followed)
        return [SlotReport(self._loop.requests(), self._loop.telemetry.take_observations(), status.table_version, drafters)]

    def publish(self, table: RoutingTable) -> None:
        self._loop.publish_table(table)

    def set_names(self, names: Sequence[str]) -> None:
        """There is one target."""


@contextmanager
def _routed(config: Config, loop: TargetLoop) -> Iterator[None]:
    """Routes the in-process cluster as the server is routed, so that both draft alike."""
    router = Router(build_policy(config.router.policy), build_pool(config))
    actor = RouterActor(config, router, _Loop(loop))
    actor.start()
    try:
        yield
    finally:
        actor.stop()


class _ServeBench:
    def __init__(self, server: ServerProcess, engine: EngineClient, model: str) -> None:
        self._server = server
        self._engine = engine
        self._http = HttpTarget(server.config.api.host, server.config.api.port, model)

    async def over_http(self, asks: Sequence[LoadRequest]) -> list[TimedAnswer]:
        return checked(await run_streams(self._http.ask, asks, NUM_STREAMS))

    async def in_process(self, asks: Sequence[LoadRequest]) -> list[TimedAnswer]:
        return checked(await run_streams(lambda ask: ask_engine(self._engine, ask), asks, NUM_STREAMS))

    async def throughput(self, asks: Sequence[LoadRequest]) -> tuple[list[TimedAnswer], list[TimedAnswer]]:
        return await self.over_http(asks), await self.in_process(asks)

    async def ttft(self, asks: Sequence[LoadRequest]) -> list[tuple[float, float]]:
        """Seconds over HTTP and in process, one request at a time. Prompts differ, so no prefix cache applies."""
        pairs = []
        for ask in asks:
            http, own = checked([await self._http.ask(ask), await ask_engine(self._engine, ask)])
            pairs.append((http.ttft_s, own.ttft_s))
        return pairs

    async def burst(self, prefix: tuple[int, ...], number: int) -> tuple[float, float]:
        """Median TTFT of NUM_BURST requests at once, in seconds: behind the prefix, which is cached, and without it."""
        rng = random.Random(number)
        own = [tuple(rng.choices(prefix, k=OWN_LEN)) for _ in range(NUM_BURST)]
        checked([await self._http.ask(LoadRequest(f"prefix-{number}", prefix, 1))])
        found = {}
        for name in ("cached", "short") if number % 2 == 0 else ("short", "cached"):
            before = prefix if name == "cached" else ()
            asks = [LoadRequest(f"{name}-{number}-{i}", (*before, *one), NUM_BURST_TOKENS) for i, one in enumerate(own)]
            answers = checked(await run_streams(self._http.ask, asks, NUM_BURST))
            found[name] = statistics.median([answer.ttft_s for answer in answers])
        return found["cached"], found["short"]

    async def memory(self, asks: Sequence[LoadRequest]) -> dict[str, int]:
        """Memory of each process of the server when their sum was largest."""
        samples: list[dict[str, int]] = []
        done = threading.Event()

        def sample() -> None:
            while True:
                samples.append(tree_pss_bytes(self._server.pid))
                if done.wait(SAMPLE_PERIOD_S):
                    return

        sampling = asyncio.create_task(asyncio.to_thread(sample))
        try:
            await self.over_http(asks)
        finally:
            done.set()
            await sampling
        return max(samples, key=lambda held: sum(held.values()))

    async def cpu_ms_per_token(self, asks: Sequence[LoadRequest]) -> dict[str, float]:
        """Of each process of the server, and of the in-process cluster. Not together with `memory`, whose sampling takes
        time."""
        before = tree_cpu_s(self._server.pid)
        num_tokens = sum_tokens(await self.over_http(asks))
        after = tree_cpu_s(self._server.pid)
        own_s = time.process_time()
        num_own_tokens = sum_tokens(await self.in_process(asks))
        own_s = time.process_time() - own_s
        per_token = {name: 1e3 * (s - before.get(name, 0.0)) / num_tokens for name, s in after.items()}
        return {**per_token, IN_PROCESS: 1e3 * own_s / num_own_tokens}


def _result(
    first_answer_s: float,
    pairs: Sequence[tuple[list[TimedAnswer], list[TimedAnswer]]],
    ttfts: Sequence[tuple[float, float]],
    bursts: Sequence[tuple[float, float]],
    held: Mapping[str, int],
    cpu_ms: Mapping[str, float],
) -> BenchResult:
    ratios = [tokens_per_s(over_http) / tokens_per_s(in_process) for over_http, in_process in pairs]
    figures = {
        "throughput_over_in_process": statistics.median(ratios),
        "ttft_overhead_ms": 1e3 * statistics.median(http - own for http, own in ttfts),
        "cached_ttft_ms": 1e3 * statistics.median(cached_s for cached_s, _ in bursts),
        "cached_ttft_over_short": statistics.median(cached_s / short_s for cached_s, short_s in bursts),
        "first_answer_s": first_answer_s,
        "peak_pss_gb": sum(held.values()) / 2**30,
        "http.cpu_ms_per_token": sum(ms for name, ms in cpu_ms.items() if name != IN_PROCESS),
        "in_process.cpu_ms_per_token": cpu_ms[IN_PROCESS],
    }
    rows: list[tuple[Cell, ...]] = []
    for name, side in (("http", 0), ("in_process", 1)):
        answers = [answer for pair in pairs for answer in pair[side]]
        tpots_s = [a.tpot_s for a in answers if a.tpot_s is not None]
        num_proposed = sum(a.num_proposed for a in answers)
        measured = {
            "tokens_per_s": statistics.median(tokens_per_s(pair[side]) for pair in pairs),
            "ttft_ms_p50": 1e3 * percentile([a.ttft_s for a in answers], 0.50),
            "ttft_ms_p99": 1e3 * percentile([a.ttft_s for a in answers], 0.99),
            "tpot_ms_p50": 1e3 * percentile(tpots_s, 0.50),
            "tpot_ms_p99": 1e3 * percentile(tpots_s, 0.99),
            "proposed_per_token": num_proposed / sum(a.num_tokens for a in answers),
            "acceptance": sum(a.num_accepted for a in answers) / max(1, num_proposed),
            "idle_ttft_ms": 1e3 * statistics.median(pair[side] for pair in ttfts),
        }
        figures |= {f"{name}.{key}": value for key, value in measured.items()}
        rows.append((name, *measured.values()))
    largest_first = sorted(held.items(), key=lambda item: -item[1])
    return BenchResult(
        bench="serve",
        figures=figures,
        tables=(
            Table(
                f"{NUM_STREAMS} streams",
                ("", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "proposed/token", "acceptance", "idle TTFT ms"),
                tuple(rows),
            ),
            Table(
                "processes under load",
                ("process", "PSS MB", "CPU ms per token"),
                tuple((name, size / 2**20, cpu_ms.get(name, 0.0)) for name, size in largest_first),
            ),
        ),
        notes=(
            f"ratios of the rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)}",
            f"median TTFT of {NUM_BURST} requests at once, of {PREFIX_LEN} cached and {OWN_LEN} own tokens, and of own "
            f"tokens alone: {', '.join(f'{1e3 * one:.0f} and {1e3 * other:.0f} ms' for one, other in bursts)}",
        ),
    )
