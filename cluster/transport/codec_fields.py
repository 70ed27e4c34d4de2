"""Derives how a dataclass is encoded, and decoded, from the types of its fields.

    field of the dataclass        field of wire.proto
    number, str, bytes, bool      the same
    StrEnum                       string
    T | None                      optional, absent for None
    tuple[T, ...]                 repeated
    another dataclass             message
    tuple[tuple[int, float], ...] columns: NAME_token_ids, NAME_values
    tuple[tuple[int, ...], ...]   columns: NAME_lens, NAME_token_ids (without the plural's s)

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
from cluster.transport import wire_pb2 as wire
from cluster.types import Commit, FinishReason, Request, Slo, TokenLogprobs

Encode = Callable[[Any], dict[str, Any]]  # a dataclass to the keyword arguments of its message
Decode = Callable[[Any], Any]  # a message to its dataclass


@cache
def encoder_of(cls: type) -> Encode:
    hints, splits = get_type_hints(cls), _splits(cls)
    split = [(name, split_field) for name, (split_field, _) in splits.items()]
    own = [(field.name, _converter(hints[field.name])) for field in fields(cls) if field.name not in splits]
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
    hints, splits = get_type_hints(cls), _splits(cls)
    names = [field.name for field in fields(cls)]
    split = [(i, splits[name][1]) for i, name in enumerate(names) if name in splits]
    own = [name for name in names if name not in splits]
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


def _splits(cls: type) -> dict[str, tuple[Encode, Decode]]:
    """By field of the class that is several fields of its message."""
    hints = get_type_hints(cls)
    by_type = {name: _COLUMNS[hint](name) for name, hint in hints.items() if hint in _COLUMNS}
    return by_type | {name: _SPLIT[cls, name] for name in hints if (cls, name) in _SPLIT}


def _pairs(name: str) -> tuple[Encode, Decode]:
    keys = f"{name}_token_ids", f"{name}_values"

    def encode(pairs: tuple[tuple[int, float], ...]) -> dict[str, Any]:
        return dict(zip(keys, zip(*pairs, strict=True) if pairs else ((), ()), strict=True))

    return encode, lambda message: tuple(zip(*(getattr(message, key) for key in keys), strict=True))


def _lists(name: str) -> tuple[Encode, Decode]:
    lens, token_ids = (f"{name.removesuffix('s')}_{column}" for column in ("lens", "token_ids"))

    def encode(lists: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
        return {lens: [len(one) for one in lists], token_ids: list(chain.from_iterable(lists))}

    def decode(message: Any) -> tuple[tuple[int, ...], ...]:
        if sum(getattr(message, lens)) != len(getattr(message, token_ids)):
            raise WireError(f"the columns {lens} and {token_ids} differ in length")
        rest = iter(getattr(message, token_ids))
        return tuple(tuple(islice(rest, length)) for length in getattr(message, lens))

    return encode, decode


_COLUMNS: dict[Any, Callable[[str], tuple[Encode, Decode]]] = {
    tuple[tuple[int, float], ...]: _pairs,
    tuple[tuple[int, ...], ...]: _lists,
}


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
