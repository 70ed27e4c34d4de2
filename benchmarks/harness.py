"""A model in fp32, its requests, and in-process clusters that run them under varying conditions."""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from benchmarks.embedded import Completion, EmbeddedCluster, PoolEntry
from benchmarks.fault_injection import MidRequest, every_second
from benchmarks.interpreted_triton import interpret_triton
from benchmarks.prompts import encode_chats
from cluster.config import DrafterConfig, DraftLengthConfig, HiddenStateOptions, TargetConfig
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request, RoutingTable
from deploy.api.tokenizer import Tokenizer
from drafters.hidden_states.host import Host
from drafters.hidden_states.received import remote_host
from drafters.protocol import Drafter
from drafters.registry import feature_layers, make_drafter
from engine.dtypes import AS_SHIPPED
from engine.factory import load_model
from engine.feature_feed import FeatureFeeds
from engine.forward import CausalModel
from engine.loading import proposer_of
from engine.models.config import load_config
from engine.models.prepare import ensure_model
from engine.models.tokenizer import fingerprint
from engine.native import NativeLimits, NativeTarget
from engine.partition import core_sets
from engine.target import LoadedTarget
from engine.tensor_parallel.local import load_over_local_ranks
from engine.tensor_parallel.sharding import shard_of
from engine.vllm.environment import RUNNER_V2, prepare_environment
from router.cost_model import TableCost
from router.drafting.partition_choice import WHOLE, PartitionChoice
from router.plan import SequenceView
from router.planning.planner import Planner, PlannerSettings, StepPlanner

TEMPERATURES = (0.0, 0.8)
DRAFT_LEN = 5
MAX_PROMPT_LEN = 1024
BLOCK_LEN = 16
VLLM_BLOCK_LEN: Literal[32] = 32  # vLLM takes multiples of 32 on a CPU
MAX_PASS_TOKENS = 2048  # large enough that all requests run before the first is half done
MAX_KV_CACHE_TOKENS = 32768
NUM_TOP_LOGPROBS = 20
DEADLINE_S = 60.0

# Verification of everything that comes, and holds long enough for everything to come: what is tested is what drafts do to
# tokens, not whether they are worth their time.
PATIENT = PlannerSettings(verification="all", max_hold_s=DEADLINE_S, max_chunk_len=MAX_PASS_TOKENS)
PRECIOUS_PASSES = TableCost((1,), (100 * DEADLINE_S,))
# As long, and each row more adds a fiftieth: verification policies leave out draft tokens that are not likely enough.
PRECIOUS_ROWS = TableCost((1, 51), (100 * DEADLINE_S, 200 * DEADLINE_S))


@dataclass(frozen=True, slots=True)
class RunConditions:
    """How requests are run. ``kill``, ``preempt`` and ``lose_rank`` happen once, when the first request is half done.

    ``pool`` makes the drafters, among which requests are distributed in turn. ``kill``: this drafter is killed and
    replaced by ``successor``. ``preempt``: half of the batch loses its cache and is recomputed. ``lose_rank``: the last rank
    ends, the target with it, and its requests go on at another one, which some began at. ``companions`` belong
    to the pool and are made anew beside the target of each run, or if they are ``remote`` behind a tensor link, which
    ``cut`` cuts. ``divided``: they draft in lanes, which change every few rounds. ``num_ranks``: processes that compute the
    target; then half of the requests ask for no log-probabilities, for which ranks exchange whole rows.
    """

    pool: Callable[[], Mapping[str, Drafter]] = dict
    companions: tuple[DrafterConfig, ...] = ()
    max_num_sequences: int = 256
    prefix_cache: bool = True
    kill: str | None = None
    successor: Callable[[], Drafter] | None = None
    preempt: bool = False
    lose_rank: bool = False
    cut: bool = False
    divided: bool = False
    num_ranks: int = 1
    planner: PlannerSettings = PATIENT
    draft_length: DraftLengthConfig | None = None  # the default
    cost: TableCost = PRECIOUS_PASSES


@dataclass(frozen=True, slots=True)
class Run:
    completions: list[Completion]  # in request order
    as_intended: bool  # drafts were verified if there are drafters, and the fault occurred


class Harness:
    """Loads the model once. Requests are all prompts at all temperatures, each with its own seed."""

    def __init__(
        self, model: str, prompts: Sequence[str], max_tokens: int, engine: str = "native", dtype: str = "float32"
    ) -> None:
        self.folder = folder = ensure_model(model)
        self._shape = config = load_config(folder)
        self.has_lanes = engine == "native" and dtype != AS_SHIPPED
        runner_v1 = engine == "vllm" and os.environ.get(RUNNER_V2) != "1"
        self.has_proposers = runner_v1 and config.num_layers > 3  # vLLM's EAGLE-3 reads three
        self.has_ranks = self.has_lanes or (runner_v1 and config.num_heads % 2 == 0)  # else vLLM cannot divide it
        self._make_target = self._vllm if engine == "vllm" else partial(self._native, load_model(folder, dtype))
        self._max_tokens, self._dtype = max_tokens, dtype
        self.info = ModelInfo(
            name=model,
            vocab_size=config.vocab_size,
            max_model_len=min(config.max_len, MAX_PROMPT_LEN + max_tokens),
            eos_token_ids=config.eos_token_ids,
            tokenizer_fingerprint=fingerprint(folder),
        )
        self.requests = [
            self._request(index, temperature, prompt)
            for index, prompt in enumerate(encode_chats(Tokenizer.from_folder(folder), prompts))
            for temperature in TEMPERATURES
        ]

    def make(self, config: DrafterConfig) -> Drafter:
        return make_drafter(config, self.info)

    def run(self, circumstances: RunConditions) -> Run:
        """Raises errors of the target and the streams."""
        wanted = sum(len(request.prompt_token_ids) + self._max_tokens + BLOCK_LEN for request in self.requests)
        num_tokens = max(self.info.max_model_len, min(wanted, MAX_KV_CACHE_TOKENS)) + BLOCK_LEN
        engine = self._make_target(num_tokens, circumstances)
        try:
            return self._run_on(engine, num_tokens, circumstances)
        finally:
            engine.close()

    def _run_on(self, engine: LoadedTarget, num_tokens: int, circumstances: RunConditions) -> Run:
        capacity = len(self.requests)
        pool = {name: PoolEntry(drafter, DRAFT_LEN, capacity=capacity) for name, drafter in circumstances.pool().items()}
        host = Host(engine, self.folder)
        remote = {one.name: feature_layers([one], self.folder) for one in circumstances.companions if one.remote}
        feeds = FeatureFeeds(engine, remote, "127.0.0.1") if remote else None
        for config in circumstances.companions:
            states = None
            if config.remote and isinstance(config.options, HiddenStateOptions):
                host, states = remote_host(config.options.of_target(str(self.folder)), "cpu")
            drafter = make_drafter(config, self.info, host)
            pool[config.name] = PoolEntry(drafter, DRAFT_LEN, capacity=capacity, companion=not config.remote, states=states)
        partition = core_sets() if circumstances.divided else None
        choice = None if partition is None else Alternating([WHOLE, *(split.name for split in partition.splits)])
        table = RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),))
        half_done = threading.Event()
        planner: Planner = StepPlanner(circumstances.planner)
        if circumstances.preempt:
            planner = MidRequest(planner, self._max_tokens // 2, every_second)
        elif circumstances.cut and feeds is not None:
            planner = MidRequest(planner, self._max_tokens // 2, _calling(feeds.close))
        elif circumstances.lose_rank:
            planner = MidRequest(planner, self._max_tokens // 2, _calling(_end_last_rank))
        elif circumstances.kill is not None:
            planner = MidRequest(planner, self._max_tokens // 2, _calling(half_done.set))
        completions, num_resumed = list[Completion](), 0
        with self._spare(num_tokens, circumstances) as spare:
            cluster = EmbeddedCluster(
                engine,
                self.info,
                circumstances.cost,
                pool,
                planner,
                table,
                draft_length=circumstances.draft_length,
                divided=None if partition is None or choice is None else (partition, choice),
                feeds=feeds,
                others=spare,
            )
            with cluster, _killer(cluster, circumstances, capacity, half_done):
                asked = self.requests if circumstances.num_ranks == 1 else self._half_without_logprobs()
                completions = cluster.complete(asked)
                num_preempted = cluster.loop.telemetry.num_preempted
                num_resumed = cluster.num_resumed
        if feeds is not None:
            feeds.close()
        if not circumstances.lose_rank:
            engine.check_integrity()
        engine.close()
        for entry in pool.values():
            entry.drafter.check_integrity()
        as_intended = not pool or any(completion.num_proposed for completion in completions)
        if isinstance(planner, MidRequest):
            as_intended = as_intended and planner.has_happened
        if circumstances.preempt:
            as_intended = as_intended and num_preempted >= len(self.requests) // 4  # some had ended
        if circumstances.lose_rank:
            as_intended = as_intended and num_resumed > 0
        return Run(completions, as_intended)

    @contextmanager
    def _spare(self, num_tokens: int, circumstances: RunConditions) -> Iterator[Sequence[str]]:
        """The address of a target of one rank without drafters, for requests of one that loses a rank. Raises RuntimeError:
        it lost none."""
        if not circumstances.lose_rank:
            yield ()
            return
        engine = self._make_target(num_tokens, replace(circumstances, num_ranks=1, companions=()))
        with closing(engine), EmbeddedCluster(engine, self.info, PRECIOUS_PASSES, {}) as cluster:
            try:
                yield (cluster.address,)
            except RuntimeError as error:
                if "RankLost" not in str(error):
                    raise

    def _native(self, model: CausalModel, num_tokens: int, circumstances: RunConditions) -> LoadedTarget:
        if circumstances.num_ranks > 1:
            own = shard_of(model.config, 0, circumstances.num_ranks).config_of(model.config)
            options = {
                "dtype": self._dtype,
                "device": "cpu",
                "kv_cache_bytes": num_tokens * own.kv_bytes_per_token(model.kv_dtype.itemsize),
                "block_len": BLOCK_LEN,
                "max_num_sequences": circumstances.max_num_sequences,
                "max_pass_tokens": MAX_PASS_TOKENS,
                "max_model_len": self.info.max_model_len,
            }
            layers = feature_layers(circumstances.companions, self.folder)
            return load_over_local_ranks(circumstances.num_ranks, self.folder, options, layers)
        limits = NativeLimits(
            num_blocks=num_tokens // BLOCK_LEN,
            block_len=BLOCK_LEN,
            max_num_sequences=circumstances.max_num_sequences,
            max_pass_tokens=MAX_PASS_TOKENS,
            max_model_len=self.info.max_model_len,
        )
        return NativeTarget(model, limits, circumstances.prefix_cache, feature_layers(circumstances.companions, self.folder))

    def _vllm(self, num_tokens: int, circumstances: RunConditions) -> LoadedTarget:
        if os.environ.get(RUNNER_V2) == "1":
            interpret_triton()
        prepare_environment()
        from engine.vllm.target import VllmTarget

        proposer = proposer_of(circumstances.companions)
        num_bytes = (num_tokens + VLLM_BLOCK_LEN) * self._shape.kv_bytes_per_token(4) * (2 if proposer else 1)  # its layers'
        target = TargetConfig(
            engine="vllm",
            dtype="float32",
            device="cpu",
            max_num_sequences=circumstances.max_num_sequences,
            max_pass_tokens=MAX_PASS_TOKENS,
            block_len=VLLM_BLOCK_LEN,
            kv_cache_gb=num_bytes // circumstances.num_ranks / 2**30,
            tensor_parallel=circumstances.num_ranks,
            vllm={} if circumstances.prefix_cache else {"enable_prefix_caching": False},
        )
        layers = feature_layers(circumstances.companions, self.folder)
        return VllmTarget(self.folder, target, self.info.max_model_len, self.info.eos_token_ids, layers, proposer)

    def _half_without_logprobs(self) -> list[Request]:
        plain = [replace(r, sampling=replace(r.sampling, top_logprobs=None)) for r in self.requests]
        return [
            request if i // 2 % 2 else other for i, (request, other) in enumerate(zip(self.requests, plain, strict=True))
        ]

    def _request(self, index: int, temperature: float, prompt: tuple[int, ...]) -> Request:
        sampling = SamplingParams(
            max_tokens=self._max_tokens, temperature=temperature, seed=index + 1, top_logprobs=NUM_TOP_LOGPROBS
        )
        max_prompt_len = self.info.max_model_len - self._max_tokens
        return Request(f"{index}@{temperature}", prompt[-max_prompt_len:], sampling, arrival_s=index * 1e-6)


@contextmanager
def _killer(
    cluster: EmbeddedCluster, circumstances: RunConditions, capacity: int, half_done: threading.Event
) -> Iterator[None]:
    """Kills the drafter on another thread at the event, and starts its successor."""
    name, successor = circumstances.kill, circumstances.successor
    if name is None or successor is None:
        yield
        return

    def kill() -> None:
        half_done.wait()
        cluster.kill_drafter(name)
        cluster.start_drafter(name, PoolEntry(successor(), DRAFT_LEN, capacity=capacity))

    thread = threading.Thread(target=kill, name="killer")
    thread.start()
    try:
        yield
    finally:
        half_done.set()
        thread.join()


class Alternating(PartitionChoice):
    """Another partition every few rounds."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__({WHOLE: None}, {})
        self._names = itertools.cycle([name for name in names for _ in range(3)])

    def choose(self, batch: int, num_context: Callable[[], int]) -> str:
        return next(self._names)


def _end_last_rank() -> None:
    """Of two ranks, where vLLM's first one is a process of its own, too."""
    for process in multiprocessing.active_children():
        if process.name.startswith(("rank-", "VllmWorker-1")):
            process.kill()


def _calling(call: Callable[[], None]) -> Callable[[Sequence[SequenceView]], Sequence[SequenceView]]:
    """A hook that preempts nothing and calls ``call``."""

    def preempted(_: Sequence[SequenceView]) -> Sequence[SequenceView]:
        call()
        return ()

    return preempted
