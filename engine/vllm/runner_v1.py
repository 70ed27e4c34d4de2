"""vLLM's model runner V1 with our sampling. It asks a proposer for drafts, and gives it those of the scheduler to verify."""

from collections.abc import Sequence
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._proposes = not isinstance(self.drafter, NoProposer)
        self._to_propose: tuple[Any, tuple[Any, ...]] | None = None  # arguments of vLLM's proposer after the last pass
        self._num_accepted: dict[str, int] = {}  # as vLLM counts, by request that is left out of passes

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        """Not yet: the base sets the layers up."""

    def _proposer_layers(self) -> Sequence[int]:
        if not self._proposes or not self.use_aux_hidden_state_outputs:
            return ()
        asked = self._get_eagle3_aux_layers_from_config()
        return tuple(asked or self.model.get_eagle3_default_aux_hidden_state_layers())

    def _slots(self, state: Any, group: int) -> torch.Tensor:
        num_rows = state.scheduler_output.total_num_scheduled_tokens
        slots: torch.Tensor = self.input_batch.block_table[group].slot_mapping.gpu[:num_rows]
        return slots

    def propose_draft_token_ids(self, scheduler_output: Any, *args: Any) -> list[list[int]]:
        """Nothing yet: drafts are asked for after the pass, if at all (`draft`)."""
        self._draft_probs = None
        self._draft_prob_req_ids = None
        self._to_propose = (scheduler_output, args) if self._proposes else None
        return [[] for _ in self.input_batch.req_ids]

    def draft(self, num_tokens: int) -> dict[str, list[int]]:
        """Greedy drafts of vLLM's own proposer after the last pass, by request; none when it was asked before. With
        ``num_tokens`` 0 it computes its keys and values alone."""
        asked, self._to_propose = self._to_propose, None
        if asked is None:
            return {}
        reads_layers = self.use_aux_hidden_state_outputs
        try:
            self.use_aux_hidden_state_outputs = bool(self._own_layers)
            chosen = self._propose(num_tokens, *asked)
        finally:
            self.use_aux_hidden_state_outputs = reads_layers
        return dict(zip(self.input_batch.req_ids, chosen, strict=True)) if num_tokens else {}

    def _propose(self, num_tokens: int, scheduled: Any, args: Sequence[Any]) -> list[list[int]]:
        token_ids, metadata, states, sampled_states, layers, *more = args
        if layers is not None:
            pairs = zip(self._read_layers, layers, strict=True)
            layers = [one for layer, one in pairs if layer in self._own_layers] or None
        scheduled.num_spec_tokens_to_schedule = num_tokens
        with torch.inference_mode():
            drafts = super().propose_draft_token_ids(scheduled, token_ids, metadata, states, sampled_states, layers, *more)
        self._draft_probs = None
        self._draft_prob_req_ids = None
        chosen: list[list[int]] = drafts.tolist() if torch.is_tensor(drafts) else drafts
        return chosen

    def _update_states(self, scheduler_output: Any) -> Any:
        """What a pass leaves out leaves vLLM's batch, which forgets how many of its rows were accepted last: layers with a
        state continue from that row."""
        self._to_propose = None
        batch, kept, scheduled = self.input_batch, self._num_accepted, scheduler_output.num_scheduled_tokens
        self.num_accepted_tokens_event.synchronize()
        for name in batch.req_id_to_index.keys() - scheduled.keys():
            kept[name] = int(batch.num_accepted_tokens_cpu[batch.req_id_to_index[name]])
        for name in (*scheduler_output.finished_req_ids, *scheduler_output.scheduled_cached_reqs.resumed_req_ids):
            kept.pop(name, None)
        corrected = super()._update_states(scheduler_output)
        for name in kept.keys() & scheduled.keys():
            batch.num_accepted_tokens_cpu[batch.req_id_to_index[name]] = kept.pop(name)
        return corrected

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
