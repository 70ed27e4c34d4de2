"""vLLM's worker with our sampling rule (`engine.sampling`), by which any draft can be verified exactly.

vLLM loads the workers and `NoProposer` by their qualified names, in the processes of all ranks. Each rank samples from the
same gathered logits and so chooses the same tokens, which its runner needs as the next inputs. Rank 0 answers for all.
"""

import logging
import multiprocessing
import os
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, iter_layer_specs
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker import cpu_worker, gpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from engine.acceptance import verdict
from engine.device import to_device
from engine.factory import make_gumbel_argmax
from engine.grammar.compiling import grammars_of
from engine.ops import GumbelArgmax
from engine.sampling import Sampler, SampleSpan, SamplingState
from engine.target import SpanOutcome
from engine.vllm.arguments import FEATURE_LAYERS
from engine.vllm.graphs import capture_any_lengths

EXTRA_ARG = "outrider"  # of vLLM's sampling parameters: a `RequestSampling`

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How to sample a request. ``prompt_len``: of its tokens; vLLM takes the output so far for a part of the prompt."""

    sampling: SamplingParams
    prompt_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PassResult:
    """Of one pass, from rank 0: the outcomes of the spans that were sampled, by request, and the hidden states after the
    wanted layers of all rows, with their slots in the KV cache."""

    outcomes: dict[str, SpanOutcome]
    slots: torch.Tensor | None  # [rows]
    features: torch.Tensor | None  # [rows, layers * hidden]


def full_attention_group(cache: KVCacheConfig) -> int | None:
    """The first group of layers that keep all positions of a sequence."""
    for i, group in enumerate(cache.kv_cache_groups):
        if all(isinstance(spec, FullAttentionSpec) for spec in iter_layer_specs(group.kv_cache_spec)):
            return i
    return None


class NoProposer:
    """Proposes nothing; vLLM reserves the slots of draft tokens for it."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class ExactRunner(GPUModelRunner):
    """Chooses the target's token at each row, and accepts the drafts that equal it. vLLM's runner of any device, despite the
    name of its base."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._feature_layers: tuple[int, ...] = tuple(self.vllm_config.additional_config[FEATURE_LAYERS])
        num_layers = self.model_config.get_total_num_hidden_layers()
        # vLLM's i means before layer i. The last layer's states are taken after the final norm, as vLLM returns them anyway.
        self._aux_layers = tuple(layer + 1 for layer in self._feature_layers if layer + 1 < num_layers)
        self.use_aux_hidden_state_outputs = bool(self._aux_layers)
        self._states: dict[str, SamplingState] = {}
        self._drafts: dict[str, list[int]] = {}  # that the pass verifies, by request
        self._outcomes: dict[str, SpanOutcome] = {}
        self._samplers: dict[tuple[int, ...], Sampler] = {}

    @property
    def embedding(self) -> torch.Tensor:
        """[rows, hidden]: this rank's rows of the vocabulary."""
        tables = (
            m for m in self.model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
        )
        table = next(tables)
        rows: torch.Tensor = table.weight.detach()[: table.shard_indices.num_org_elements]
        return rows

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        if self._aux_layers:
            if not supports_eagle3(self.model) or self.model_config.using_transformers_backend():
                reason = f"must be none: vLLM's {type(self.model).__name__} gives no hidden states of its layers"
                raise InvalidField("drafters that read hidden states", list(self._feature_layers), reason)
            self.model.set_aux_hidden_state_layers(self._aux_layers)

    def _features(self, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots, features) of the rows of the pass. Several ranks share memory with nobody: they send copies."""
        num_rows = state.scheduler_output.total_num_scheduled_tokens
        found = dict(zip(self._aux_layers, state.aux_hidden_states or (), strict=True))
        rows = [found.get(layer + 1, state.hidden_states)[:num_rows] for layer in self._feature_layers]
        group = full_attention_group(self.kv_cache_config)
        slots = self.input_batch.block_table[group].slot_mapping.gpu[:num_rows]
        features = torch.cat(rows, -1)
        return (slots, features) if self.parallel_config.world_size == 1 else (slots.cpu().clone(), features.cpu())

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._outcomes = {}
        slots = features = None
        if self.execute_model_state is not None:  # known here: reading vLLM's copy on the device would wait for it
            self._drafts = self.execute_model_state.scheduler_output.scheduled_spec_decode_tokens
        if self._feature_layers and self.execute_model_state is not None and self.parallel_config.rank == 0:
            slots, features = self._features(self.execute_model_state)
        output = super().sample_tokens(grammar_output)
        if output is not None:
            output.outrider = PassResult(self._outcomes, slots, features)
        return output

    def _update_states(self, scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            self._states.pop(name, None)
        return super()._update_states(scheduler_output)

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        self._draft_probs = None
        self._draft_prob_req_ids = None
        return [[] for _ in self.input_batch.req_ids]

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        batch = self.input_batch
        names = batch.req_ids[: batch.num_reqs]
        num_drafts = [0] * len(names) if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        spans, rows, sampled = list[SampleSpan](), list[int](), list[int]()
        row = 0
        for i, (name, num) in enumerate(zip(names, num_drafts, strict=True)):
            if not self.discard_request_mask.np[i]:  # else a prefill chunk, of which nothing is sampled
                drafts = tuple(self._drafts[name][:num]) if num else ()
                spans.append(SampleSpan(self._state(i, name), drafts, num + 1))
                rows.extend(range(row, row + num + 1))
                sampled.append(i)
            row += num + 1
        token_ids = np.full((len(names), max(num_drafts, default=0) + 1), -1, np.int32)
        token_ids[:, 0] = 0  # discarded, or the request ends with an error
        if spans:
            sampler = self._sampler(names[sampled[0]])
            if len(rows) < len(logits):
                logits = logits.index_select(0, to_device(np.array(rows), logits.device))
            chosen = sampler.choose(logits, spans)
            for i, span, choice in zip(sampled, spans, chosen, strict=True):
                outcome = verdict(names[i], span.drafts, choice)
                self._outcomes[names[i]] = outcome
                if outcome.token_ids:
                    token_ids[i, : len(outcome.token_ids)] = outcome.token_ids
                    span.state.extend(outcome.token_ids)
        return SamplerOutput(sampled_token_ids=to_device(token_ids, self.device), logprobs_tensors=None)

    def _state(self, index: int, name: str) -> SamplingState:
        """Of the request at ``index`` of the batch, with all its committed tokens."""
        num_tokens = int(self.input_batch.num_tokens_no_spec[index])
        state = self._states.get(name)
        if state is None or len(state) != num_tokens:
            asked = self._asked(name)
            token_ids = self.input_batch.token_ids_cpu[index, :num_tokens].tolist()
            grammar = None
            if asked.sampling.grammar is not None:
                grammars = grammars_of(
                    Path(self.model_config.model), self.model_config.get_vocab_size(), asked.eos_token_ids
                )
                grammar = grammars.follow(asked.sampling, token_ids[asked.prompt_len :])
            state = self._states[name] = SamplingState(asked.sampling, token_ids, asked.prompt_len, grammar)
        return state

    def _sampler(self, name: str) -> Sampler:
        eos_token_ids = self._asked(name).eos_token_ids
        if eos_token_ids not in self._samplers:
            self._samplers[eos_token_ids] = Sampler(self.model_config.get_vocab_size(), eos_token_ids, self._kernel)
        return self._samplers[eos_token_ids]

    @cached_property
    def _kernel(self) -> GumbelArgmax | None:
        return make_gumbel_argmax(self.model_config.get_vocab_size(), self.dtype, self.device)

    def _asked(self, name: str) -> RequestSampling:
        asked = self.requests[name].sampling_params.extra_args[EXTRA_ARG]
        assert isinstance(asked, RequestSampling)
        return asked


class CpuRunner(ExactRunner, CPUModelRunner):
    """On a CPU."""


class RankWorker:
    """What a worker in a process of its own adds to vLLM's: it ends with the target's process, and when it has failed.

    vLLM lets it end by itself, which a rank in a collective of ranks that have ended never does.
    """

    rank: int
    model_runner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        capture_any_lengths(self.vllm_config)  # type: ignore[attr-defined]
        target = multiprocessing.parent_process()
        self._is_child = target is not None and self.parallel_config.world_size > 1  # type: ignore[attr-defined]
        if target is not None and self._is_child:
            threading.Thread(target=_end_after, args=(target,), name="end with the target", daemon=True).start()

    def embedding_rows(self) -> torch.Tensor:
        """Of this rank; a rank in a process of its own sends a copy."""
        rows: torch.Tensor = self.model_runner.embedding
        return rows.cpu() if self._is_child else rows

    def execute_model(self, scheduler_output: Any) -> Any:
        try:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        except Exception:
            self._end_unheard()
            raise

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        except Exception:
            self._end_unheard()
            raise

    def _end_unheard(self) -> None:
        """Of rank 0 the executor hears the error. Another rank would go on, without the tokens of this pass."""
        if self._is_child and self.rank > 0:
            logger.exception("rank %d failed and ends", self.rank)
            os._exit(1)


def _end_after(target: Any) -> None:
    target.join()
    os._exit(1)


class Worker(RankWorker, CPUWorker):
    """On CPUs. vLLM's worker builds the runner that its module names: another one is named while it does."""

    def init_device(self) -> None:
        runner = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = CpuRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = runner


class GpuWorker(RankWorker, gpu_worker.Worker):
    """On GPUs; never run so far."""

    def _make_model_runner(self) -> ExactRunner:
        return ExactRunner(self.vllm_config, self.device)
