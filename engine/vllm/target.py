"""`TargetEngine` over vLLM's engine core in this process, whose ranks, if there are several, are its children."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.triton_utils import HAS_TRITON
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest

from cluster.config import TargetConfig
from cluster.errors import InvalidField, ModelUnavailable
from cluster.types import Adapter, ModelInfo, Request, TokenLogprobs
from engine.adapter_files import read_adapter
from engine.device import require
from engine.grammar.compiling import known_grammars
from engine.hidden_states import HiddenStateCache
from engine.target import FeatureSpan, LoadedTarget
from engine.vllm.adapters import AdapterSlots
from engine.vllm.arguments import MAX_DRAFT_LEN, engine_arguments
from engine.vllm.environment import NOT_BOUND, RUNNER_V2, binding_of, require_vllm, threads_of_ranks
from engine.vllm.executor import RankExecutor
from engine.vllm.graphs import prepared_rows
from engine.vllm.sampling import EXTRA_ARG, PassResult, RequestSampling, full_attention_group
from engine.vllm.scheduler import PlannedScheduler
from router.plan import Capacity, Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """vLLM's form of a request that is not added yet."""

    request: VllmRequest
    wave: int


class VllmTarget:
    """``engine.target.LoadedTarget``. Admits and computes what the round plans. The outcomes tell what ran: vLLM may compute
    less, or preempt, and verifies no drafts of a request in the pass that admits it.

    An exception in ``execute`` leaves vLLM's scheduler between two states. From then on nothing can be computed: the process
    must end. RankLost: one of several ranks has ended; the others have been killed.

    The environment of the process must have been set by `engine.vllm.environment` before vLLM was imported.

    Args:
        folder: of a Hugging Face model.
        target: resolved.
        eos_token_ids: of the model.
        feature_layers: layers whose hidden states are kept for drafters in this process (``read_hidden_states``).
        proposer: vLLM's speculative configuration of its own.
    """

    def __init__(
        self,
        folder: Path,
        target: TargetConfig,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        feature_layers: Sequence[int] = (),
        proposer: Mapping[str, Any] = {},
    ) -> None:
        envs.disable_envs_cache()  # of an earlier engine in this process
        if proposer:
            os.environ[RUNNER_V2] = "0"  # whose proposers can be asked after a pass
        runner_v2 = HAS_TRITON if envs.VLLM_USE_V2_MODEL_RUNNER is None else envs.VLLM_USE_V2_MODEL_RUNNER
        about = folder, target, max_model_len, feature_layers, eos_token_ids, proposer
        arguments = engine_arguments(*about, runner_v2=runner_v2)
        executor_class = RankExecutor if target.tensor_parallel > 1 else None
        config = EngineArgs(**arguments, distributed_executor_backend=executor_class).create_engine_config()
        with _threads(target), _explained(config):
            self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        assert isinstance(self._core.scheduler, PlannedScheduler)
        self._scheduler = self._core.scheduler
        executor = self._core.model_executor
        self._ranks = executor if isinstance(executor, RankExecutor) else None
        self._stream = torch.cuda.current_stream() if target.device != "cpu" and self._ranks is None else None
        self._adapters = AdapterSlots(executor, target.num_adapters)
        self._target = target
        self._runner = "V2" if config.use_v2_model_runner else "V1"
        self._vocab_size = config.model_config.get_vocab_size()
        self._features_group, self._features = self._hidden_state_cache(config, feature_layers)
        self._eos_token_ids = tuple(eos_token_ids)
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._num_idle_blocks = self._pool.get_num_free_blocks()
        self._capacity = self._whole_capacity(config)
        self._has_failed = False
        self._has_proposer = self._proposes = bool(proposer)  # vLLM's own; until it fails
        self._is_unasked = False  # since the last pass
        self.meanwhile: Callable[[], None] | None = None
        self._lock = threading.Lock()  # of the scheduler's state, which drafters' threads read
        self._waiting: dict[str, _Waiting] = {}  # requests of which it was asked what is cached
        self._computed_before: dict[str, int] = {}  # tokens of the requests in the pass under way, without those it computes
        self.grammars = known_grammars(folder, self._vocab_size, self._eos_token_ids)
        logger.info("the target's engine is %s", self.operators)

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        if self._stream is not None:  # vLLM would take another for this thread, which its copies do not wait for
            torch.cuda.set_stream(self._stream)
        waiting = self._prepared(request, token_ids)
        del self._waiting[request.id]
        with self._lock:
            self._core.add_request(waiting.request, waiting.wave)
        return self._num_cached(waiting.request)

    def has_adapter(self, adapter: Adapter) -> bool:
        return adapter in self._adapters

    def load_adapter(self, adapter: Adapter, in_use: Collection[Adapter]) -> None:
        self._adapters.load(adapter, in_use)

    def num_cached(self, request: Request, token_ids: Sequence[int]) -> int:
        waiting = self._prepared(request, token_ids)
        with self._lock:
            return self._num_cached(waiting.request)

    def _num_cached(self, prepared: VllmRequest) -> int:
        return int(self._scheduler.kv_cache_manager.get_computed_blocks(prepared)[1])

    def _prepared(self, request: Request, token_ids: Sequence[int]) -> _Waiting:
        """vLLM takes all committed tokens for the prompt. It never ends a request: the round does."""
        known = self._waiting.get(request.id)
        if known is not None and known.request.num_prompt_tokens == len(token_ids):
            return known
        asked = RequestSampling(request.sampling, len(request.prompt_token_ids))
        sampling = VllmSamplingParams(
            max_tokens=self._capacity.max_model_len - len(token_ids),
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=request.sampling.prompt_logprobs,
            extra_args={EXTRA_ARG: asked},
        )
        prepared, wave = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=request.id,
                prompt_token_ids=list(token_ids),
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None if request.adapter is None else self._adapters.request_of(request.adapter),
                cache_salt=request.salt or None,
                data_parallel_rank=None,
            )
        )
        found = self._waiting[request.id] = _Waiting(prepared, wave)
        return found

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        if not spans:
            return ()
        if self._has_failed:
            raise RuntimeError("vLLM's engine computes nothing after an error")
        with self._guarded():
            if self._is_unasked:
                self._ask(0)  # else the proposer would never know the tokens of the last pass
            self._execute(spans)
            self._is_unasked = self._proposes
            return spans

    def _execute(self, spans: Sequence[Span]) -> None:
        scheduler, executor = self._scheduler, self._core.model_executor
        scheduler.plan = {span.request_id: _cut(span) for span in spans}
        with self._lock:
            self._computed_before = {span.request_id: self._computed_len(span.request_id) for span in spans}
            scheduled: SchedulerOutput = scheduler.schedule()
        future = executor.execute_model(scheduled, non_block=True)
        grammar = scheduler.get_grammar_bitmask(scheduled)
        if self.meanwhile is not None:
            self.meanwhile()
        output: ModelRunnerOutput | None = future.result()
        if output is None:
            output = executor.sample_tokens(grammar)
        computed = {span.request_id: self._computed_len(span.request_id) for span in spans}
        prompt_lens = {name: self._prompt_len(name) for name in output.prompt_logprobs_dict}
        result: PassResult | None = getattr(output, "outrider", None)
        with self._lock:
            if result is not None and result.slots is not None and result.features is not None:
                device = torch.device(self._target.device)
                self._features.write(result.slots.to(device), result.features.to(device))
            scheduler.update_from_output(scheduled, output)
            self._computed_before.clear()
        found = {} if result is None else result.outcomes
        for span in spans:
            outcome = found.get(span.request_id)
            if outcome is None:
                span.computed_len = computed[span.request_id]
            else:
                span.take(outcome)
            scored = output.prompt_logprobs_dict.get(span.request_id)
            if scored is not None:
                span.prompt_logprobs = _prompt_logprobs(scored, prompt_lens[span.request_id])

    def draft(self, num_tokens: int) -> Mapping[str, Sequence[int]]:
        """`drafters.engine_proposals.Proposing`: of vLLM's own proposer. The ranks compute: the target's thread calls it.
        Raises RuntimeError: the proposer has failed."""
        if self._has_proposer and not self._proposes:
            raise RuntimeError("vLLM's own proposer is not called after an error")
        if not self._is_unasked:
            return {}
        with self._guarded():
            return self._ask(num_tokens)

    def _ask(self, num_tokens: int) -> Mapping[str, Sequence[int]]:
        """The drafts of the proposer, computed by all ranks. After an error on one rank none is asked again.

        Raises TimeoutError: a rank did not answer, and may still wait in a collective that it would mix up with a later one.
        """
        self._is_unasked = False
        timeout_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        replies = self._core.model_executor.collective_rpc("draft", timeout=timeout_s, args=(num_tokens,))
        failed = [f"rank {rank}: {reply}" for rank, reply in enumerate(replies) if isinstance(reply, str)]
        if failed:
            self._proposes = False
            logger.error("vLLM's own proposer failed, and is not called again: %s", ", ".join(failed))
        return {} if failed else replies[0]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with nullcontext() if self._ranks is None else self._ranks.guarded():
                yield
        except BaseException:
            self._has_failed = True
            raise

    def release(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        if request_id in self._scheduler.requests and not self._has_failed:
            with self._lock:
                self._core.abort_requests([request_id])

    def capacity(self) -> Capacity:
        whole, free = self._capacity, self._pool.get_num_free_blocks()
        return replace(whole, num_free_blocks=whole.num_blocks * free // self._num_idle_blocks)

    def _whole_capacity(self, config: VllmConfig) -> Capacity:
        """Of the idle engine, in blocks of one sequence: where groups of layers have blocks of their own, each stands for as
        many of vLLM's as the longest sequence takes for it. Raises InvalidField: it holds no such sequence."""
        cache, block_len = self._scheduler.kv_cache_config, self._scheduler.block_size
        max_len = config.model_config.max_model_len
        blocks_per_sequence = cache.num_blocks / get_max_concurrency_for_kv_cache_config(config, cache)
        num_blocks = int(min(self._num_idle_blocks, self._num_idle_blocks * -(-max_len // block_len) / blocks_per_sequence))
        if num_blocks * block_len < max_len:
            num_tokens = num_blocks * block_len
            reason = f"a KV cache of {num_tokens} tokens cannot hold one such sequence: enlarge kv_cache_gb or lower it"
            raise InvalidField("max_model_len", max_len, reason)
        target = self._target
        return Capacity(
            block_len=block_len,
            num_blocks=num_blocks,
            num_free_blocks=num_blocks,
            max_num_sequences=target.max_num_sequences,
            max_pass_tokens=target.longest_pass,
            max_model_len=max_len,
            prepared_rows=prepared_rows(config.compilation_config, target.longest_pass),
            max_verify_len=MAX_DRAFT_LEN,
        )

    def _hidden_state_cache(self, config: VllmConfig, layers: Sequence[int]) -> tuple[int, HiddenStateCache]:
        """Hidden states lie in the slots of vLLM's KV cache, so that its prefix cache and preemption cover them. Returns the
        group of layers whose slots these are: one that keeps all positions."""
        cache, model = self._scheduler.kv_cache_config, config.model_config
        group = full_attention_group(cache)
        if group is None and layers:
            reason = "must be none: each attention layer of the target keeps a window of positions alone"
            raise InvalidField("drafters that read hidden states", list(layers), reason)
        shape = model.get_total_num_hidden_layers(), model.get_hidden_size()
        block_len, device = cache.kv_cache_groups[group or 0].kv_cache_spec.block_size, torch.device(self._target.device)
        return group or 0, HiddenStateCache(shape, layers, cache.num_blocks, block_len, model.dtype, device)

    def check_integrity(self) -> None:
        if self._ranks is not None:
            self._ranks.check_ranks()
        scheduler = self._scheduler
        if not scheduler.requests:
            assert not scheduler.running, "vLLM runs requests that it does not know"
            free = self._pool.get_num_free_blocks()
            assert free == self._num_idle_blocks, f"{self._num_idle_blocks - free} blocks are held by nobody"

    @property
    def is_asynchronous(self) -> bool:
        return self._target.device != "cpu"

    @property
    def operators(self) -> str:
        return f"vLLM {require_vllm()}, model runner {self._runner}"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._features.layers

    @cached_property
    def embedding(self) -> torch.Tensor:
        """The whole table, of whose rows each rank holds a part."""
        parts = self._core.model_executor.collective_rpc("embedding_rows")
        return torch.cat([part.to(self._target.device) for part in parts])[: self._vocab_size]

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], torch.Tensor]:
        with self._lock:
            # vLLM counts the tokens of a pass as computed when it begins.
            names = [span.request_id for span in spans]
            lens = [self._computed_before.get(name, self._computed_len(name)) for name in names]
            held = [0 <= one.start <= one.stop <= num for one, num in zip(spans, lens, strict=True)]
            blocks, group = self._scheduler.kv_cache_manager.get_block_ids, self._features_group
            tables = {span: np.array(blocks(span.request_id)[group], np.int32) for span in compress(spans, held)}
            return held, self._features.read([(table, span.start, span.stop) for span, table in tables.items()])

    def close(self) -> None:
        self._core.shutdown()

    def _prompt_len(self, request_id: str) -> int:
        return int(self._scheduler.requests[request_id].sampling_params.extra_args[EXTRA_ARG].prompt_len)

    def _computed_len(self, request_id: str) -> int:
        request = self._scheduler.requests.get(request_id)
        return 0 if request is None else int(request.num_computed_tokens)


@contextmanager
def _explained(config: VllmConfig) -> Iterator[None]:
    """Raises InvalidField for the ValueError of a KV cache that holds no sequence of the longest kind, ModelUnavailable for
    others."""
    try:
        yield
    except InvalidField:
        raise
    except ValueError as error:
        if "max seq len" in str(error):
            told = str(error).partition(" Try increasing")[0]
            reason = f"must be smaller, or target.kv_cache_gb larger: {told}"
            raise InvalidField("model.max_model_len", config.model_config.max_model_len, reason) from error
        raise ModelUnavailable(f"vLLM could not load {config.model_config.model}: {error}") from error


def _threads(target: TargetConfig) -> AbstractContextManager[None]:
    """Several ranks on CPUs have cores of their own, where there are enough; but not those of several targets, which would
    have the same ones."""
    if target.tensor_parallel == 1 or target.device != "cpu":
        return nullcontext()
    binding, num_threads = NOT_BOUND, 1 if target.resources.threads == "auto" else target.resources.threads
    if target.most == 1:
        cores = {cpu.id: cpu.physical_core for cpu in get_allowed_cpu_list()}
        binding = binding_of(cores, target.tensor_parallel, num_threads)
    return threads_of_ranks(binding, num_threads)


def _prompt_logprobs(scored: LogprobsTensors, prompt_len: int) -> tuple[TokenLogprobs, ...]:
    """Of tokens 1 to prompt_len - 1. vLLM's columns begin with the token itself, and its prompt may hold output."""
    num = prompt_len - 1
    columns = (scored.logprob_token_ids[:num], scored.logprobs[:num], scored.selected_token_ranks[:num])
    return tuple(
        TokenLogprobs(logprobs[0], tuple(zip(ids[1:], logprobs[1:], strict=True)), rank)
        for ids, logprobs, rank in zip(*(column.tolist() for column in columns), strict=True)
    )


def _cut(span: Span) -> Span:
    """With at most MAX_DRAFT_LEN drafts: the buffers of vLLM's grammar masks hold no more."""
    excess = span.num_drafts - MAX_DRAFT_LEN
    if excess <= 0:
        return span
    return Span.bound(span.request_id, span.base_len, span.token_ids[:-excess], MAX_DRAFT_LEN, span.samples)


def load_vllm(
    folder: Path,
    target: TargetConfig,
    info: ModelInfo,
    feature_layers: Sequence[int] = (),
    proposer: Mapping[str, Any] | None = None,
) -> LoadedTarget:
    """The target of a resolved configuration, as `engine.loading.load_engine`, which has set the environment.

    Raises:
        InvalidField: vLLM refuses the configuration; there is no such device; the KV cache cannot hold a sequence of the
            longest kind.
    """
    require(target.device)
    engine = VllmTarget(folder, target, info.max_model_len, info.eos_token_ids, feature_layers, proposer or {})
    for i, adapter in enumerate(info.adapters):
        try:
            read_adapter(adapter)
            engine.load_adapter(adapter, info.adapters)
        except InvalidField as error:
            raise InvalidField(f"target.lora_modules[{i}].path", adapter.path, error.reason) from error
    return engine
