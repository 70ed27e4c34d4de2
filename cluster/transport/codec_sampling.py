"""Encodes sampling parameters."""

from cluster.transport import wire_pb2 as wire
from cluster.types import SamplingParams


def encode_sampling(sampling: SamplingParams, to: wire.SamplingParams) -> None:
    to.max_tokens = sampling.max_tokens
    to.temperature = sampling.temperature
    if sampling.top_k is not None:
        to.top_k = sampling.top_k
    to.top_p = sampling.top_p
    to.min_p = sampling.min_p
    to.repetition_penalty = sampling.repetition_penalty
    to.presence_penalty = sampling.presence_penalty
    to.frequency_penalty = sampling.frequency_penalty
    if sampling.logit_bias:
        token_ids, values = zip(*sampling.logit_bias, strict=True)
        to.logit_bias_token_ids.extend(token_ids)
        to.logit_bias_values.extend(values)
    to.stop.extend(sampling.stop)
    to.stop_token_ids.extend(sampling.stop_token_ids)
    to.min_tokens = sampling.min_tokens
    to.ignore_eos = sampling.ignore_eos
    to.seed = sampling.seed
    if sampling.top_logprobs is not None:
        to.top_logprobs = sampling.top_logprobs
    to.allowed_token_ids.extend(sampling.allowed_token_ids)


def decode_sampling(sampling: wire.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
        allowed_token_ids=tuple(sampling.allowed_token_ids),
    )
