"""Which requests a target takes."""

from cluster.types import Commit, FinishReason, ModelInfo, Request
from engine.sequences import Sequences
from router.plan import Capacity


def refusal(
    request: Request, sequences: Sequences, model: ModelInfo, capacity: Capacity, max_waiting: int, draining: bool
) -> Commit | None:
    """Why a request cannot be served, as its only commit; None: it can.

    The gateway has checked what a caller may get wrong; this is what only the target knows, and a second look at what
    would do harm.
    """

    def refuse(finish: FinishReason, error: str) -> Commit:
        return Commit(request.id, len(request.prompt_token_ids), (), finish=finish, error=error)

    if request.id in sequences:
        return refuse(FinishReason.ERROR, f"request {request.id} is under way already")
    if draining:
        return refuse(FinishReason.OVERLOADED, "the target drains: it takes no more requests")
    num_waiting = len(sequences) - sequences.num_running
    if num_waiting >= max_waiting:
        return refuse(FinishReason.OVERLOADED, f"{num_waiting} requests wait already")
    prompt = request.prompt_token_ids
    if not prompt or len(prompt) >= model.max_model_len:
        return refuse(
            FinishReason.ERROR,
            f"the prompt has {len(prompt)} tokens; it must have at least 1 and leave room in the model's context of"
            f" {model.max_model_len}",
        )
    if not all(0 <= token < model.vocab_size for token in prompt):
        return refuse(FinishReason.ERROR, f"a prompt token lies outside the vocabulary of {model.vocab_size}")
    longest = min(len(prompt) + request.sampling.max_tokens, model.max_model_len)
    num_cached = capacity.num_blocks * capacity.block_len
    if longest > num_cached:
        return refuse(
            FinishReason.ERROR,
            f"prompt and max_tokens need {longest} tokens of KV cache, of which there are {num_cached} in all;"
            " lower max_tokens",
        )
    return None
