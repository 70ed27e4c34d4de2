"""Which requests a target refuses."""

from cluster.message_checks import request_fault
from cluster.types import Commit, FinishReason, ModelInfo, Request
from engine.sequences import Sequences
from router import admission
from router.plan import Capacity


def refusal(
    request: Request, sequences: Sequences, model: ModelInfo, capacity: Capacity, max_waiting: int, draining: bool
) -> Commit | None:
    """The only commit of a request that is refused, with the reason; None: it is taken. The gateway has validated the
    request. This checks what only the target knows, and what would do harm."""

    def refuse(finish: FinishReason, error: str) -> Commit:
        return Commit(request.id, len(request.prompt_token_ids), (), finish=finish, error=error)

    if request.id in sequences:
        return refuse(FinishReason.ERROR, f"request {request.id} is live already")
    prompt = request.prompt_token_ids
    num_waiting = len(sequences) - sequences.num_running
    found = admission.refusal(len(prompt), request.sampling.max_tokens, capacity, num_waiting, max_waiting, draining)
    if found is not None:
        return refuse(*found)
    fault = request_fault(request, model.vocab_size)
    return None if fault is None else refuse(FinishReason.ERROR, fault)
