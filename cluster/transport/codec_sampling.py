"""Encodes sampling parameters: every field of `SamplingParams` is a field of that name in ``wire.proto``, but for the bias,
which is two columns. None is an absent field."""

from dataclasses import fields
from typing import Any

from cluster.transport import wire_pb2 as wire
from cluster.types import SamplingParams

_NAMES = tuple(field.name for field in fields(SamplingParams) if field.name != "logit_bias")
_OPTIONAL = frozenset({"top_k", "top_logprobs"})
_REPEATED = frozenset({"stop", "stop_token_ids", "allowed_token_ids"})


def encode_sampling(sampling: SamplingParams, to: wire.SamplingParams) -> None:
    for name in _NAMES:
        value = getattr(sampling, name)
        if name in _REPEATED:
            getattr(to, name).extend(value)
        elif value is not None:
            setattr(to, name, value)
    to.logit_bias_token_ids.extend([token_id for token_id, _ in sampling.logit_bias])
    to.logit_bias_values.extend([bias for _, bias in sampling.logit_bias])


def decode_sampling(sampling: wire.SamplingParams) -> SamplingParams:
    found: dict[str, Any] = {name: getattr(sampling, name) for name in _NAMES}
    found |= {name: tuple(found[name]) for name in _REPEATED}
    found |= {name: None for name in _OPTIONAL if not sampling.HasField(name)}
    bias = zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)
    return SamplingParams(**found, logit_bias=tuple(bias))
