"""vLLM's model runner V1 with our sampling. It asks a proposer for drafts, and gives it those of the scheduler to verify."""

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from engine.device import to_device
from engine.sampling import SamplingState
from engine.vllm.sampling import ExactSampling


class NoProposer:
    """Proposes nothing; vLLM reserves the slots of draft tokens for it. Loaded by its qualified name."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class ExactRunner(ExactSampling, GPUModelRunner):
    """Of any device, despite the name of its base."""

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        """Not yet: the base sets the layers up."""

    def _slots(self, state: Any, group: int) -> torch.Tensor:
        num_rows = state.scheduler_output.total_num_scheduled_tokens
        slots: torch.Tensor = self.input_batch.block_table[group].slot_mapping.gpu[:num_rows]
        return slots

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        self._draft_probs = None
        self._draft_prob_req_ids = None
        return [[] for _ in self.input_batch.req_ids]

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        names = self.input_batch.req_ids[: self.input_batch.num_reqs]
        num_drafts = [0] * len(names) if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        token_ids = self._choose(logits, names, num_drafts, ~self.discard_request_mask.np[: len(names)])
        return SamplerOutput(sampled_token_ids=to_device(token_ids, self.device), logprobs_tensors=None)

    def _state(self, index: int, name: str) -> SamplingState:
        num_tokens = int(self.input_batch.num_tokens_no_spec[index])
        state = self._states.get(name)
        if state is None or len(state) != num_tokens:
            token_ids = self.input_batch.token_ids_cpu[index, :num_tokens].tolist()
            state = self._states[name] = self._new_state(self.requests[name].sampling_params, token_ids)
        return state


class CpuRunner(ExactRunner, CPUModelRunner):
    """On a CPU."""
