"""Log-probabilities of tokens: from logits, and of prompt tokens from the hidden states of prefill chunks."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.types import Request, TokenLogprobs
from engine.device import to_device, to_host
from router.plan import Span

_ROWS_AT_ONCE = 64  # bounds the logits in memory: 64 rows of 128k tokens are 32 MiB in fp32


def token_logprobs(
    logits: Tensor, token_ids: NDArray[np.int64], num_top: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprobs]:
    """Raw log-probabilities of ``token_ids`` (R,) under logits (R, V), each with its ``num_top`` most probable tokens."""
    raw = logits.float()
    norm = raw.logsumexp(-1, keepdim=True)
    tokens = to_device(token_ids, raw.device).clamp_max(raw.shape[-1] - 1)
    chosen = raw.gather(1, tokens[:, None])
    ranks = 1 + (raw > chosen).sum(-1, keepdim=True)
    top = raw.topk(min(max(num_top), raw.shape[-1]))
    columns = [chosen - norm, ranks, top.values - norm, top.indices]
    host = to_host(torch.cat([column.double() for column in columns], dim=-1))  # one copy from the device
    own, ranks_found = host[:, 0].tolist(), host[:, 1].astype(np.int64).tolist()
    top_values, top_ids = np.split(host[:, 2:], 2, axis=1)
    values, ids = top_values.tolist(), top_ids.astype(np.int64).tolist()
    return [
        TokenLogprobs(own[i], tuple(zip(ids[i][:num], values[i][:num], strict=True)), ranks_found[i] if ranked else None)
        for i, num in enumerate(num_top)
    ]


@torch.inference_mode()
def prompt_logprobs(
    request: Request, span: Span, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprobs, ...]:
    """vLLM's ``prompt_logprobs``: of the prompt tokens that the span's rows predict, positions base_len + 1 onwards.

    Args:
        hidden: (rows of the span, hidden size).
        logits_of: hidden states to logits (rows, V).
    """
    num_top = request.sampling.prompt_logprobs
    next_ids = request.prompt_token_ids[span.base_len + 1 : span.base_len + 1 + span.num_compute]
    if num_top is None or not next_ids:
        return ()
    found: list[TokenLogprobs] = []
    for start in range(0, len(next_ids), _ROWS_AT_ONCE):
        ids = np.array(next_ids[start : start + _ROWS_AT_ONCE], np.int64)
        found += token_logprobs(logits_of(hidden[start : start + len(ids)]), ids, [num_top] * len(ids), ranked=True)
    return tuple(found)
