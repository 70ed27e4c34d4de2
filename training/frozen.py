"""The frozen target of a training run: it writes prompts and answers, and yields hidden states."""

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from cluster.types import ModelInfo
from drafters.hidden_states.checkpoint import GivenRows
from engine.factory import DTYPES, load_model
from engine.forward import CausalModel
from engine.kv_cache import BLOCK_LEN, num_blocks_for
from engine.models.tokenizer import fingerprint
from engine.models.weights import SafetensorsFolder, open_weights
from engine.native import NativeLimits, NativeTarget
from router.cost_model import CostModel, TableCost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Offline generation fills every pass, so any plausible cost serves.
WRITING_COST: CostModel = TableCost(rows=(1, 512), step_s_at=(0.025, 0.4))

_MAX_CACHE_GB = 24.0
_CACHE_SHARE = 0.5  # of a GPU's free memory: activations, graphs and logits need the rest


@dataclass(frozen=True, slots=True)
class WritingLimits:
    max_in_flight: int
    max_pass_tokens: int
    kv_cache_gb: float


def writing_limits(free_bytes: int | None) -> WritingLimits:
    """A CPU gains nothing beyond 128 rows a pass, a GPU up to a thousand. ``free_bytes``: of the GPU, if there is one."""
    if free_bytes is None:
        return WritingLimits(max_in_flight=96, max_pass_tokens=512, kv_cache_gb=1.5)
    kv_cache_gb = min(_MAX_CACHE_GB, _CACHE_SHARE * free_bytes / 2**30)
    share = kv_cache_gb / _MAX_CACHE_GB
    return WritingLimits(max(16, int(1024 * share)), max(512, int(8192 * share)), kv_cache_gb)


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a GPU, including those that torch has cached; None: no GPU."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


class FrozenTarget:
    """Loaded once: writing and reading share the weights. Raises ModelUnavailable."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: str, max_model_len: int) -> None:
        self.folder = folder
        self.device = device
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]
        self.model: CausalModel = load_model(folder, dtype, str(device))
        self.limits = writing_limits(free_memory(device))
        config = self.model.config
        self.info = ModelInfo(
            name=folder.name,
            vocab_size=config.vocab_size,
            max_model_len=min(max_model_len, config.max_len),
            eos_token_ids=config.eos_token_ids,
            tokenizer_fingerprint=fingerprint(folder),
        )

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(self.folder))

    @cached_property
    def rows(self) -> GivenRows:
        """Embedding and head in fp32."""
        with open_weights(self.folder, self.model.config, torch.float32) as weights:
            return GivenRows(weights.embedding().float().to(self.device), weights.head().float().to(self.device))

    @torch.no_grad()
    def copy_layers(self, layers: Iterable[nn.Module], indices: Sequence[int], norm: nn.Module) -> None:
        """Copies layers ``indices`` and the final norm into modules with Hugging Face's parameter names, but for norms that
        this model's queries and keys do not have."""
        with ExitStack() as stack:
            source = SafetensorsFolder(self.folder, stack)
            prefixes = [*(f"model.layers.{index}." for index in indices), "model.norm."]
            for module, prefix in zip((*layers, norm), prefixes, strict=True):
                for name, parameter in module.named_parameters():
                    if prefix + name in source or not name.endswith(("q_norm.weight", "k_norm.weight")):
                        parameter.copy_(source.read(prefix + name, tuple(parameter.shape)))

    def new_engine(self) -> NativeTarget:
        """An engine to write with. Its KV cache holds at most ``max_in_flight`` sequences of full length."""
        num_affordable = num_blocks_for(self.model.config, int(self.limits.kv_cache_gb * 2**30), self.dtype, BLOCK_LEN)
        num_useful = self.limits.max_in_flight * math.ceil(self.info.max_model_len / BLOCK_LEN)
        limits = NativeLimits(
            num_blocks=min(num_affordable, num_useful),
            block_len=BLOCK_LEN,
            max_num_sequences=self.limits.max_in_flight,
            max_pass_tokens=self.limits.max_pass_tokens,
            max_model_len=self.info.max_model_len,
        )
        return NativeTarget(self.model, limits)

    def encode(self, text: str) -> tuple[int, ...]:
        """As in serving: a chat template writes the special tokens itself, without one the tokenizer adds them."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=not self.tokenizer.chat_template))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
