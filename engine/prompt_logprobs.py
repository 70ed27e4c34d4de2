"""Log-probabilities of prompt tokens, from the hidden states of prefill chunks (vLLM's ``prompt_logprobs``)."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cluster.types import Request, TokenLogprobs
from engine.sampling import token_logprobs
from engine.target import SpanInput

_ROWS_AT_ONCE = 64  # bounds the logits in memory: 64 rows of 128k tokens are 32 MiB in fp32


@torch.inference_mode()
def prompt_logprobs(
    request: Request, span: SpanInput, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprobs, ...]:
    """Of the prompt tokens that the span's rows predict: positions base_len + 1 onwards.

    Args:
        hidden: (number of span tokens, hidden size).
        logits_of: hidden states to logits (rows, V).
    """
    num_top = request.sampling.prompt_logprobs
    next_ids = request.prompt_token_ids[span.base_len + 1 : span.base_len + 1 + len(span.token_ids) - span.num_drafts]
    if num_top is None or not next_ids:
        return ()
    found: list[TokenLogprobs] = []
    for start in range(0, len(next_ids), _ROWS_AT_ONCE):
        ids = np.array(next_ids[start : start + _ROWS_AT_ONCE], np.int64)
        found += token_logprobs(logits_of(hidden[start : start + len(ids)]), ids, [num_top] * len(ids), ranked=True)
    return tuple(found)
