"""Our sampling rule (`engine.sampling`) in vLLM's model runners, by which any draft can be verified exactly.

Each rank samples from the same gathered logits and so chooses the same tokens, which its runner needs as the next inputs.
Rank 0 answers for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, iter_layer_specs

from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from engine.acceptance import accept
from engine.device import to_device
from engine.factory import make_gumbel_argmax
from engine.grammar.compiling import grammars_of
from engine.sampling import Sampler, SampleSpan, SamplingState
from engine.vllm.arguments import EOS_TOKEN_IDS, FEATURE_LAYERS
from router.plan import Span

EXTRA_ARG = "outrider"  # of vLLM's sampling parameters: a `RequestSampling`


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How to sample a request. ``prompt_len``: of its tokens; vLLM takes the output so far for a part of the prompt."""

    sampling: SamplingParams
    prompt_len: int


@dataclass(frozen=True, slots=True)
class PassResult:
    """Of one pass, from rank 0: the outcomes of the spans that were sampled, by request, and the hidden states after the
    wanted layers of all rows, with their slots in the KV cache."""

    outcomes: dict[str, Span]
    slots: torch.Tensor | None  # [rows]
    features: torch.Tensor | None  # [rows, layers * hidden]


def full_attention_group(cache: KVCacheConfig) -> int | None:
    """The first group of layers that keep all positions of a sequence."""
    kept = [all(isinstance(s, FullAttentionSpec) for s in iter_layer_specs(g.kv_cache_spec)) for g in cache.kv_cache_groups]
    return kept.index(True) if True in kept else None


class ExactSampling:
    """Chooses the target's token at each row, and accepts the drafts that equal it. A base of the runners, before vLLM's."""

    model: Any
    model_config: Any
    parallel_config: Any
    kv_cache_config: Any
    vllm_config: Any
    device: torch.device
    dtype: torch.dtype
    execute_model_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._feature_layers: tuple[int, ...] = tuple(self.vllm_config.additional_config[FEATURE_LAYERS])
        self._eos_token_ids: tuple[int, ...] = tuple(self.vllm_config.additional_config[EOS_TOKEN_IDS])
        num_layers = self.model_config.get_total_num_hidden_layers()
        # vLLM's i means before layer i. The last layer's states are taken after the final norm, as vLLM returns them anyway.
        self._aux_layers = tuple(layer + 1 for layer in self._feature_layers if layer + 1 < num_layers)
        self._own_layers: tuple[int, ...] = ()  # that vLLM's own proposer reads
        self._read_layers = self._aux_layers  # and those
        self._states: dict[str, SamplingState] = {}
        self._drafts: dict[str, list[int]] = {}  # that the pass verifies, by request
        self._outcomes: dict[str, Span] = {}

    @property
    def embedding(self) -> torch.Tensor:
        """[rows, hidden]: this rank's rows of the vocabulary."""
        tables = (m for m in self.model.modules() if isinstance(m, VocabParallelEmbedding))
        table = next(m for m in tables if not isinstance(m, ParallelLMHead))
        rows: torch.Tensor = table.weight.detach()[: table.shard_indices.num_org_elements]
        return rows

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._own_layers = tuple(self._proposer_layers())
        self._read_layers = tuple(sorted({*self._aux_layers, *self._own_layers}))
        if self._read_layers:
            if not supports_eagle3(self.model) or self.model_config.using_transformers_backend():
                reason = f"must be none: vLLM's {type(self.model).__name__} gives no hidden states of its layers"
                raise InvalidField("drafters that read hidden states", list(self._feature_layers), reason)
            self.model.set_aux_hidden_state_layers(self._read_layers)
            self.use_aux_hidden_state_outputs = True

    def _proposer_layers(self) -> Sequence[int]:
        """Layers, as vLLM counts them, before which vLLM's own proposer reads hidden states."""
        return ()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        for name in scheduler_output.finished_req_ids:
            self._states.pop(name, None)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._outcomes = {}
        slots = features = None
        state = self.execute_model_state
        if self._feature_layers and state is not None and self.parallel_config.rank == 0:
            slots, features = self._features(state)
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if output is not None:
            # Runner V2 returns it before its copies to the host have ended.
            getattr(output, "model_runner_output", output).outrider = PassResult(self._outcomes, slots, features)
        return output

    def _features(self, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots, features) of the rows of the pass. Several ranks share memory with nobody: they send copies."""
        group = full_attention_group(self.kv_cache_config)
        assert group is not None
        slots = self._slots(state, group)
        num_rows = len(slots)
        found = dict(zip(self._read_layers, state.aux_hidden_states or (), strict=True))
        rows = [found.get(layer + 1, state.hidden_states)[:num_rows] for layer in self._feature_layers]
        features = torch.cat(rows, -1)
        return (slots, features) if self.parallel_config.world_size == 1 else (slots.cpu().clone(), features.cpu())

    def _slots(self, state: Any, group: int) -> torch.Tensor:
        """[rows]: where the KV cache of a group keeps the rows of the pass."""
        raise NotImplementedError

    def _state(self, index: int, name: str) -> SamplingState:
        """Of the request at ``index`` of the batch, with all its committed tokens."""
        raise NotImplementedError

    def _choose(
        self, logits: torch.Tensor, names: Sequence[str], num_drafts: Sequence[int], is_sampled: Sequence[bool]
    ) -> NDArray[np.int32]:
        """[requests, tokens]: the accepted drafts and the next token of each request, then -1; one zero where nothing is
        sampled. Keeps the outcomes.

        Args:
            logits: the rows of all requests of the batch, of each as many as its drafts and one.
            is_sampled: false for a chunk of a prompt that is not its last.
        """
        spans, rows, sampled, row = list[SampleSpan](), list[int](), list[int](), 0
        for i, (name, num) in enumerate(zip(names, num_drafts, strict=True)):
            if is_sampled[i]:
                drafts = tuple(self._drafts[name][:num]) if num else ()
                spans.append(SampleSpan(self._state(i, name), drafts, num + 1))
                rows.extend(range(row, row + num + 1))
                sampled.append(i)
            row += num + 1
        token_ids = np.full((len(names), max(num_drafts, default=0) + 1), -1, np.int32)
        token_ids[:, 0] = 0  # not sampled, or the request ends with an error
        if spans:
            if len(rows) < len(logits):
                logits = logits.index_select(0, to_device(np.array(rows), logits.device))
            chosen = self._sampler.choose(logits, spans)
            for i, span, choice in zip(sampled, spans, chosen, strict=True):
                outcome = self._outcomes[names[i]] = Span(names[i], 1, len(span.drafts))
                accept(outcome, span.drafts, choice)
                if outcome.chosen:
                    token_ids[i, : len(outcome.chosen)] = outcome.chosen
                    span.state.extend(outcome.chosen)
        return token_ids

    def _new_state(self, params: Any, token_ids: Sequence[int]) -> SamplingState:
        """Of a request with vLLM's sampling parameters and these committed tokens."""
        asked: RequestSampling | None = (params.extra_args or {}).get(EXTRA_ARG)
        if asked is None:  # vLLM's own, by which runner V2 warms up
            return SamplingState(SamplingParams(1, 1.0, seed=0), token_ids, len(token_ids))
        grammar = None
        if asked.sampling.grammar is not None:
            grammars = grammars_of(Path(self.model_config.model), self._sampler.vocab_size, self._eos_token_ids)
            grammar = grammars.follow(asked.sampling, token_ids[asked.prompt_len :])
        return SamplingState(asked.sampling, token_ids, asked.prompt_len, grammar)

    @cached_property
    def _sampler(self) -> Sampler:
        vocab_size = self.model_config.get_vocab_size()
        return Sampler(vocab_size, self._eos_token_ids, make_gumbel_argmax(vocab_size, self.dtype, self.device))
