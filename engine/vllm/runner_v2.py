"""vLLM's model runner V2 with our sampling. It reads drafts on the device, where its own speculator would leave them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from engine.device import to_device
from engine.sampling import SamplingState
from engine.vllm.sampling import ExactSampling


class ExactRunner(ExactSampling, GPUModelRunner):
    """Of any device, despite the name of its base."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.speculator = None  # of n-grams, the method for which slots of draft tokens are reserved
        self._num_rows: NDArray[np.int32] | None = None  # that are sampled, of each request of the pass

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)
        self._num_rows = np.diff(batch.cu_num_logits_np)
        return batch

    def _set_active_loras(self, by_request: Sequence[int], *args: Any, **kwargs: Any) -> None:
        """vLLM 0.32 and 0.33 forget the rows of drafts where an adapter changes logits."""
        num_rows, self._num_rows = self._num_rows, None
        if num_rows is not None:  # else a dummy pass
            by_request = tuple(np.repeat(by_request, num_rows).tolist())
        super()._set_active_loras(by_request, *args, **kwargs)

    def _slots(self, state: Any, group: int) -> torch.Tensor:
        layer = self.kv_cache_config.kv_cache_groups[group].layer_names[0]
        slots: torch.Tensor = state.slot_mappings_by_layer[layer][: state.input_batch.num_tokens]
        return slots

    def add_requests(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:  # preempted ones, too
            self._states[new.req_id] = self._new_state(new.sampling_params, new.prefill_token_ids)
        super().add_requests(scheduler_output)

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        if self._drafts:
            drafts = self.req_states.draft_tokens
            rows = np.zeros((len(self._drafts), 1 + drafts.shape[1]), np.int64)  # with the index of the request
            for row, (name, token_ids) in zip(rows, self._drafts.items(), strict=True):
                row[0] = self.req_states.req_id_to_index[name]
                row[1 : 1 + len(token_ids)] = token_ids
            on_device = to_device(rows, self.device)
            drafts[on_device[:, 0]] = on_device[:, 1:]

    def sample(
        self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        num = input_batch.num_reqs
        num_drafts = np.zeros(num, np.int32) if (drafts := input_batch.num_draft_tokens_per_req) is None else drafts
        num_computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        is_sampled = num_computed >= input_batch.prefill_len_np
        token_ids = self._choose(logits, input_batch.req_ids, num_drafts.tolist(), is_sampled)
        num_sampled = (token_ids >= 0).sum(axis=1) * is_sampled
        num_rejected = (num_drafts + 1 - num_sampled) * is_sampled
        packed = np.concatenate((num_sampled, num_rejected, token_ids.ravel())).astype(np.int32)  # one copy
        on_device = to_device(packed, self.device)
        sampled, rejected, flat = on_device[:num], on_device[num : 2 * num], on_device[2 * num :]
        return SamplerOutput(flat.view(num, -1), None, None, sampled, rejected), sampled, rejected

    def _state(self, index: int, name: str) -> SamplingState:
        return self._states[name]


class CpuRunner(ExactRunner, CPUModelRunner):
    """On a CPU."""
