"""vLLM's worker with our sampling rule (`engine.sampling`), by which any draft can be verified exactly.

vLLM loads `Worker` and `NoProposer` by their qualified names, in the processes of all ranks. Each rank samples from the
same gathered logits and so chooses the same tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from cluster.sampling_params import SamplingParams
from engine.acceptance import verdict
from engine.factory import make_gumbel_argmax
from engine.grammar.compiling import grammars_of
from engine.hidden_states import HiddenStateCache
from engine.models.config import load_config
from engine.sampling import Sampler, SampleSpan, SamplingState
from engine.target import SpanOutcome

EXTRA_ARG = "outrider"  # of vLLM's sampling parameters: a `RequestSampling`
FEATURE_LAYERS = "outrider_feature_layers"  # of vLLM's additional configuration


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How to sample a request. ``prompt_len``: of its tokens; vLLM takes the output so far for a part of the prompt."""

    sampling: SamplingParams
    prompt_len: int
    eos_token_ids: tuple[int, ...]


class NoProposer:
    """Proposes nothing; vLLM reserves the slots of draft tokens for it."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class ExactRunner(CPUModelRunner):
    """Chooses the target's token at each row, and accepts the drafts that equal it. Keeps hidden states for drafters, in the
    slots of vLLM's KV cache: so its prefix cache and preemption cover them."""

    features: HiddenStateCache

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model_shape = load_config(Path(self.model_config.model))
        self._feature_layers: tuple[int, ...] = tuple(self.vllm_config.additional_config[FEATURE_LAYERS])
        # vLLM's i means before layer i. The last layer's states are taken after the final norm, as vLLM returns them anyway.
        self._aux_layers = tuple(layer + 1 for layer in self._feature_layers if layer + 1 < self._model_shape.num_layers)
        self.use_aux_hidden_state_outputs = bool(self._aux_layers)
        self._states: dict[str, SamplingState] = {}
        self._outcomes: dict[str, SpanOutcome] = {}
        self._samplers: dict[tuple[int, ...], Sampler] = {}

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        (group,) = kv_cache_config.kv_cache_groups
        block_len, num_blocks = group.kv_cache_spec.block_size, kv_cache_config.num_blocks
        self.features = HiddenStateCache(
            self._model_shape, self._feature_layers, num_blocks, block_len, self.dtype, self.device
        )

    @property
    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden]"""
        weight: torch.Tensor = self.model.get_parameter("model.embed_tokens.weight")
        return weight.detach()[: self._model_shape.vocab_size]

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        if self._aux_layers:
            self.model.set_aux_hidden_state_layers(self._aux_layers)

    def _keep_features(self, state: Any) -> None:
        num_rows = state.scheduler_output.total_num_scheduled_tokens
        found = dict(zip(self._aux_layers, state.aux_hidden_states or (), strict=True))
        rows = [found.get(layer + 1, state.hidden_states)[:num_rows] for layer in self._feature_layers]
        slots = self.input_batch.block_table[0].slot_mapping.gpu[:num_rows]
        self.features.write_slots(slots, torch.cat(rows, -1))

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._outcomes = {}
        if self._feature_layers and self.execute_model_state is not None:
            self._keep_features(self.execute_model_state)
        output = super().sample_tokens(grammar_output)
        if output is not None:
            output.outrider = self._outcomes
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
        drafted = [] if spec_decode_metadata is None else spec_decode_metadata.draft_token_ids.tolist()
        spans, rows, sampled = list[SampleSpan](), list[int](), list[int]()
        row = start = 0
        for i, (name, num) in enumerate(zip(names, num_drafts, strict=True)):
            if not self.discard_request_mask.np[i]:  # else a prefill chunk, of which nothing is sampled
                spans.append(SampleSpan(self._state(i, name), tuple(drafted[start : start + num]), num + 1))
                rows.extend(range(row, row + num + 1))
                sampled.append(i)
            row += num + 1
            start += num
        token_ids = np.full((len(names), max(num_drafts, default=0) + 1), -1, np.int32)
        token_ids[:, 0] = 0  # discarded, or the request ends with an error
        if spans:
            sampler = self._sampler(names[sampled[0]])
            chosen = sampler.choose(logits if len(rows) == len(logits) else logits[rows], spans)
            for i, span, choice in zip(sampled, spans, chosen, strict=True):
                outcome = verdict(names[i], span.drafts, choice)
                self._outcomes[names[i]] = outcome
                if outcome.token_ids:
                    token_ids[i, : len(outcome.token_ids)] = outcome.token_ids
                    span.state.extend(outcome.token_ids)
        return SamplerOutput(sampled_token_ids=torch.from_numpy(token_ids), logprobs_tensors=None)

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
            vocab_size = self.model_config.get_vocab_size()
            self._samplers[eos_token_ids] = Sampler(vocab_size, eos_token_ids, make_gumbel_argmax(vocab_size, self.dtype))
        return self._samplers[eos_token_ids]

    def _asked(self, name: str) -> RequestSampling:
        asked = self.requests[name].sampling_params.extra_args[EXTRA_ARG]
        assert isinstance(asked, RequestSampling)
        return asked


class Worker(CPUWorker):
    """vLLM's worker builds the runner that its module names: another one is named while it does."""

    def init_device(self) -> None:
        runner = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = ExactRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = runner
