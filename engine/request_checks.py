"""Which requests a target refuses."""

from typing import TYPE_CHECKING

from cluster.errors import InvalidField, Overloaded
from cluster.message_checks import request_fault
from cluster.types import Commit, FinishReason, ModelInfo, Request
from engine.sequences import Sequences
from engine.target import AdapterHost, TargetEngine
from router.plan import Capacity

if TYPE_CHECKING:
    from engine.grammar.waiting import PendingGrammars


def refusal(
    request: Request,
    sequences: Sequences,
    model: ModelInfo,
    capacity: Capacity,
    max_waiting: int,
    draining: bool,
    grammars: "PendingGrammars | None" = None,
) -> Commit | None:
    """The only commit of a request that is refused, with the reason; None: it is taken. The gateway has validated the
    request. This checks what only the target knows, and what would do harm."""
    prompt_len, max_len = len(request.prompt_token_ids), capacity.max_model_len
    num_waiting = len(sequences) - sequences.num_running
    longest, num_cached = min(prompt_len + request.sampling.max_tokens, max_len), capacity.num_blocks * capacity.block_len
    finish, error = FinishReason.ERROR, None
    grammar = request.sampling.grammar
    refused = None if grammar is None or grammars is None else grammars.refusal(grammar)
    if request.id in sequences:
        error = f"request {request.id} is live already"
    elif draining and not request.was_admitted:
        finish, error = FinishReason.DRAINING, "the target drains: it takes no more requests"
    elif num_waiting >= max_waiting and not request.was_admitted:
        finish, error = FinishReason.OVERLOADED, f"{num_waiting} requests wait already"
    elif not 0 < prompt_len < max_len:
        room = f"at least 1 and leave room in the model's context of {max_len}"
        error = f"the prompt has {prompt_len} tokens; it must have {room}"
    elif not len(request.output_token_ids) < min(request.sampling.max_tokens, max_len - prompt_len):
        error = f"its output of {len(request.output_token_ids)} tokens is complete"
    elif longest > num_cached:
        needed = f"prompt and max_tokens need {longest} tokens of KV cache, of which there are {num_cached} in all"
        error = f"{needed}; lower max_tokens"
    elif grammar is not None and grammars is None:
        error = "this target has no structured output; its log says why"
    elif refused is not None:
        finish, error = FinishReason.OVERLOADED if refused.is_busy else FinishReason.REFUSED, refused.reason
    else:
        error = request_fault(request, model.vocab_size)
    return None if error is None else Commit(request.id, request.committed_len, (), finish=finish, error=error)


def adapter_refusal(request: Request, sequences: Sequences, engine: TargetEngine) -> Commit | None:
    """As ``refusal``, of a request for an adapter that cannot be loaded. None: it is loaded, or none is wanted."""
    if request.adapter is None:
        return None
    finish = FinishReason.REFUSED
    try:
        if not isinstance(engine, AdapterHost):
            raise InvalidField("model", request.adapter.name, "is an adapter, which this engine does not serve")
        engine.load_adapter(request.adapter, {one.request.adapter for one in sequences if one.request.adapter})
    except (InvalidField, Overloaded) as error:
        finish = FinishReason.OVERLOADED if isinstance(error, Overloaded) else finish
        return Commit(request.id, request.committed_len, (), finish=finish, error=str(error))
    return None
