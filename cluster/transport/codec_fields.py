"""Derives how a dataclass is encoded, and decoded, from the types of its fields.

    field of the dataclass        field of wire.proto
    number, str, bytes, bool      the same
    StrEnum                       string
    T | None                      optional, absent for None
    tuple[T, ...]                 repeated
    another dataclass             message

``_SPLIT`` has the fields whose wire form differs.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import chain, islice
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from cluster.errors import WireError
from cluster.messages import Hello
from cluster.sampling_params import SamplingParams
from cluster.transport import wire_pb2 as wire
from cluster.types import Commit, FinishReason, Request, Slo, TokenLogprobs

Encode = Callable[[Any], dict[str, Any]]  # a dataclass to the keyword arguments of its message
Decode = Callable[[Any], Any]  # a message to its dataclass


@cache
def encoder_of(cls: type) -> Encode:
    hints = get_type_hints(cls)
    split = [(field.name, _SPLIT[cls, field.name][0]) for field in fields(cls) if (cls, field.name) in _SPLIT]
    own = [(field.name, _converter(hints[field.name])) for field in fields(cls) if (cls, field.name) not in _SPLIT]
    plain = [name for name, convert in own if convert is None]
    converted = [(name, convert) for name, convert in own if convert is not None]

    def encode(message: Any) -> dict[str, Any]:
        encoded = {name: getattr(message, name) for name in plain}
        for name, convert in converted:
            encoded[name] = convert(getattr(message, name))
        for name, split_field in split:
            encoded |= split_field(getattr(message, name))
        return encoded

    return encode


@cache
def decoder_of(cls: type) -> Decode:
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    split = [(i, _SPLIT[cls, name][1]) for i, name in enumerate(names) if (cls, name) in _SPLIT]
    own = [name for name in names if (cls, name) not in _SPLIT]
    readers = [(i, read) for i, name in enumerate(own) if (read := _reader(hints[name])) is not None]
    optional = [(i, name) for i, name in enumerate(own) if NoneType in get_args(hints[name])]
    values_of = attrgetter(*own) if len(own) > 1 else lambda message: [getattr(message, name) for name in own]

    def decode(message: Any) -> Any:
        values = [*values_of(message)]
        for i, name in optional:
            if not message.HasField(name):
                values[i] = None
        for i, read in readers:
            if values[i] is not None:
                values[i] = read(values[i])
        for i, read in split:
            values.insert(i, read(message))
        return cls(*values)

    return decode


def _converter(hint: Any) -> Callable[[Any], Any] | None:
    """From a field's value to what protobuf takes; None: it takes the value itself."""
    is_repeated, item = _kind_of(hint)
    if not is_dataclass(item):
        return None
    encode = encoder_of(item)
    if is_repeated:
        return lambda values: [encode(value) for value in values]
    return lambda value: None if value is None else encode(value)


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """From what protobuf gives to a field's value; None: it is the value."""
    is_repeated, item = _kind_of(hint)
    if is_dataclass(item):
        decode = decoder_of(item)
        return (lambda messages: tuple([decode(message) for message in messages])) if is_repeated else decode
    return tuple if is_repeated else item if issubclass(item, StrEnum) else None


def _kind_of(hint: Any) -> tuple[bool, type]:
    """Of a type hint: whether it is a tuple, and the type within the tuple or beside None."""
    inner = next((one for one in get_args(hint) if one is not NoneType), hint)
    return get_origin(hint) is tuple, inner


def _split_bias(bias: tuple[tuple[int, float], ...]) -> dict[str, Any]:
    token_ids, values = zip(*bias, strict=True) if bias else ((), ())
    return {"logit_bias_token_ids": token_ids, "logit_bias_values": values}


def _split_words(words: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    return {"bad_word_lens": [len(word) for word in words], "bad_word_token_ids": list(chain.from_iterable(words))}


def _read_words(sampling: wire.SamplingParams) -> tuple[tuple[int, ...], ...]:
    if sum(sampling.bad_word_lens) != len(sampling.bad_word_token_ids):
        raise WireError("the columns of bad words differ in length")
    token_ids = iter(sampling.bad_word_token_ids)
    return tuple(tuple(islice(token_ids, length)) for length in sampling.bad_word_lens)


def _split_logprobs(logprobs: tuple[TokenLogprobs, ...], name: str) -> dict[str, Any]:
    """As columns, so that no message is made per token."""
    if not logprobs:
        return {}
    pairs = list(chain.from_iterable(token.top for token in logprobs))
    token_ids, values = zip(*pairs, strict=True) if pairs else ((), ())
    columns = {
        "chosen": [token.logprob for token in logprobs],
        "num_top": [len(token.top) for token in logprobs],
        "top_token_ids": token_ids,
        "top_logprobs": values,
        "ranks": [token.rank for token in logprobs if token.rank is not None],
    }
    return {name: columns}


def _read_logprobs(logprobs: wire.Logprobs) -> tuple[TokenLogprobs, ...]:
    if sum(logprobs.num_top) != len(logprobs.top_token_ids):
        raise WireError("the columns of a commit's log-probabilities differ in length")
    pairs: Iterator[tuple[int, float]] = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    ranks = logprobs.ranks or [None] * len(logprobs.chosen)
    if not len(logprobs.chosen) == len(logprobs.num_top) == len(ranks):
        raise WireError("the columns of a commit's log-probabilities differ in length")
    columns = zip(logprobs.chosen, logprobs.num_top, ranks, strict=True)
    return tuple(TokenLogprobs(chosen, tuple(islice(pairs, num_top)), rank) for chosen, num_top, rank in columns)


_FINISH_OF = {wire.NOT_FINISHED: None} | {wire.FinishReason.Value(reason.name): reason for reason in FinishReason}

_SLO_FIELDS = ("ttft_s", "tpot_s", "slo_name")

# By class and field: the keyword arguments that its value becomes, and the value from the message.
_SPLIT: dict[tuple[type, str], tuple[Encode, Decode]] = {
    (Hello, "token"): (lambda _: {}, lambda _: ""),  # never sent
    (SamplingParams, "logit_bias"): (
        _split_bias,
        lambda sampling: tuple(zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)),
    ),
    (SamplingParams, "bad_words"): (_split_words, _read_words),
    (Request, "slo"): (
        lambda slo: {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "slo_name": slo.name},
        lambda request: Slo(*[getattr(request, s) if request.HasField(s) else None for s in _SLO_FIELDS]),
    ),
    (Request, "chain"): (
        lambda names: {} if names is None else {"chain": {"drafters": names}},
        lambda request: tuple(request.chain.drafters) if request.HasField("chain") else None,
    ),
    (Commit, "logprobs"): (
        lambda logprobs: _split_logprobs(logprobs, "logprobs"),
        lambda commit: _read_logprobs(commit.logprobs) if commit.HasField("logprobs") else (),
    ),
    (Commit, "prompt_logprobs"): (
        lambda logprobs: _split_logprobs(logprobs, "prompt_logprobs"),
        lambda commit: _read_logprobs(commit.prompt_logprobs) if commit.HasField("prompt_logprobs") else (),
    ),
    (Commit, "finish"): (
        lambda reason: {} if reason is None else {"finish": reason.name},
        lambda commit: _FINISH_OF[commit.finish],
    ),
}
