"""The target while a drafter is trained for it: it writes, it is read, and it never changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cluster.types import ModelInfo
from engine.factory import DTYPES, load_model
from engine.forward import CausalModel
from engine.kv_cache import BLOCK_LEN, num_blocks_for
from engine.models.tokenizer import fingerprint
from engine.native import NativeLimits, NativeTarget
from router.cost_model import CostModel, TableCost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Writing asks nothing of the plan but the same passes every time, so the cost of a pass is not measured but set.
WRITING_COST: CostModel = TableCost(rows=(1, 512), step_s_at=(0.025, 0.4))


_MAX_CACHE_GB = 24.0
_CACHE_SHARE = 0.5  # of what a GPU has left: activations, graphs and logits take the rest


@dataclass(frozen=True, slots=True)
class WritingLimits:
    """How much is written at once."""

    max_in_flight: int
    max_pass_tokens: int
    kv_cache_gb: float


def writing_limits(free_bytes: int | None) -> WritingLimits:
    """A CPU's pass costs no less per row beyond 128 rows; a large GPU's does up to a thousand, if it has room.

    Args:
        free_bytes: of the GPU, beside the weights; None: there is none.
    """
    if free_bytes is None:
        return WritingLimits(max_in_flight=96, max_pass_tokens=512, kv_cache_gb=1.5)
    kv_cache_gb = min(_MAX_CACHE_GB, _CACHE_SHARE * free_bytes / 2**30)
    share = kv_cache_gb / _MAX_CACHE_GB
    return WritingLimits(max(16, int(1024 * share)), max(512, int(8192 * share)), kv_cache_gb)


def free_memory(device: torch.device) -> int | None:
    """Bytes that a GPU has left, those that torch holds in reserve among them; None: no GPU."""
    if device.type != "cuda":
        return None
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


class FrozenTarget:
    """Loaded once; its writing engine and its readings share the weights.

    Raises:
        ModelUnavailable: missing, half-written or unsupported.
    """

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

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.folder)
        return tokenizer

    def new_engine(self) -> NativeTarget:
        """An engine to write with; its KV cache goes with it. A small model's cache is smaller than the limit: it holds
        ``max_in_flight`` sequences of full length."""
        num_bytes = int(self.limits.kv_cache_gb * 2**30)
        num_affordable = num_blocks_for(self.model.config, num_bytes, self.dtype, BLOCK_LEN)
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
        """As where it is served: a chat template writes the special tokens itself, without one the tokenizer adds them."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=not self.tokenizer.chat_template))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
