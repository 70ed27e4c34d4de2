"""The fields of an answer beside its choices: ids, usage, and drafting counts."""

import json
import time
from collections.abc import Mapping, Sequence

from cluster.types import PREDICTION
from deploy.api.choice import Choice
from deploy.api.draft_counts import DraftingCounts

# One encoder over plain dicts: a stream writes a small object per chunk.
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def named_event(event: Mapping[str, object]) -> bytes:
    """A server-sent event that is named by its type."""
    return f"event: {event['type']}\ndata: {encode_json(event)}\n\n".encode()


class Envelope:
    """The common fields of an answer or of all chunks of a stream, encoded once."""

    def __init__(self, call_id: str, kind: str, model: str, fingerprint: str, *, usage_in_chunks: bool) -> None:
        fields = {
            "id": call_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = encode_json(fields)[:-1]
        self._usage_in_chunks = usage_in_chunks  # as in OpenAI's API: null in all chunks but the last

    def document(self, fields: Mapping[str, object]) -> bytes:
        """A JSON object of the common fields and ``fields``."""
        return f"{self._head},{encode_json(fields)[1:]}".encode()

    def event(self, choices: Sequence[object], *, usage: object = None, **fields: object) -> bytes:
        """One server-sent event. ``fields``: additional ones of its chunk; those that are None are left out."""
        given = {name: value for name, value in fields.items() if value is not None}
        usages = {"usage": usage} if self._usage_in_chunks else {}
        return b"data: " + self.document({"choices": choices, **usages, **given}) + b"\n\n"


def usage_of(choices: Sequence[Choice]) -> dict[str, object]:
    """OpenAI's usage object. It counts each prompt, and its hits in the prefix cache, once for all its choices."""
    num_tokens = sum(choice.num_tokens for choice in choices)
    firsts = [choice for choice in choices if choice.counts_prompt]
    num_prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in firsts)
    num_cached_tokens = sum(choice.prefill.num_cached_tokens for choice in firsts if choice.prefill is not None)
    counts = total_counts(choices)
    if any(choice.request.prediction_token_ids for choice in choices):  # else all drafts count
        counts = counts.by_drafter.get(PREDICTION, DraftingCounts())
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": counts.num_accepted,
            "rejected_prediction_tokens": counts.num_proposed - counts.num_accepted,
        },
    }


def metrics_of(choices: Sequence[Choice]) -> dict[str, object]:
    """vLLM's ``metrics``, which describe one sequence: empty for a call with several."""
    if len(choices) > 1:
        return {}
    return {"metrics": {"speculative_decoding": choices[0].counts.speculative_decoding()}}


def total_counts(choices: Sequence[Choice]) -> DraftingCounts:
    total = DraftingCounts()
    for choice in choices:
        total.merge(choice.counts)
    return total
