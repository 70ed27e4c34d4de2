"""Whether a target takes a request at all: what only it knows, and plain numbers are enough for."""

from cluster.types import FinishReason
from router.plan import Capacity


def refusal(
    prompt_len: int, max_tokens: int, capacity: Capacity, num_waiting: int, max_waiting: int, draining: bool
) -> tuple[FinishReason, str] | None:
    """Why a target cannot serve a request of such lengths, and how it then ends; None: it can."""
    if draining:
        return FinishReason.OVERLOADED, "the target drains: it takes no more requests"
    if num_waiting >= max_waiting:
        return FinishReason.OVERLOADED, f"{num_waiting} requests wait already"
    if not 0 < prompt_len < capacity.max_model_len:
        return (
            FinishReason.ERROR,
            f"the prompt has {prompt_len} tokens; it must have at least 1 and leave room in the model's context of"
            f" {capacity.max_model_len}",
        )
    longest = min(prompt_len + max_tokens, capacity.max_model_len)
    num_cached = capacity.num_blocks * capacity.block_len
    if longest > num_cached:
        return (
            FinishReason.ERROR,
            f"prompt and max_tokens need {longest} tokens of KV cache, of which there are {num_cached} in all;"
            " lower max_tokens",
        )
    return None
