"""Encodes frames as bytes and back: the dataclasses of ``cluster.messages`` as the protobuf of ``wire.proto``.

Both name their fields alike, so the conversion follows from the types of the dataclass's fields; a new field needs a line in
each. Python works per request, never per token: protobuf converts token ids and confidences as packed columns.

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
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import chain, islice
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, EncodeError

from cluster.errors import IncompatibleTokenizer, InvalidField, LinkClosed, WireError
from cluster.messages import CommitRound, DraftRound, Hello, Message, ProposalRound, SubmitRound
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Sent instead of a Greeting or Welcome by an end that refuses the link."""

    reason: str
    tokenizer: bool = False  # the reason is a different vocabulary or tokenizer

    def error(self, address: str) -> IncompatibleTokenizer | LinkClosed:
        """The exception for the connecting side."""
        message = f"the link to {address} was refused: {self.reason}"
        return IncompatibleTokenizer(message) if self.tokenizer else LinkClosed(message)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first frame of each end."""

    hello: Hello
    nonce: bytes
    proof: bytes = b""  # the accepting end's, of the secret


@dataclass(frozen=True, slots=True)
class Welcome:
    """Sent by the connecting end after it has verified the acceptor's Greeting. ``proof``: its own proof of the secret."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Ping:
    """Heartbeat, sent by both ends and not answered."""


Frame = Greeting | Welcome | Refusal | Ping | Message


MAX_PARTS = 2**14  # of one message: an empty part takes two bytes on the wire, more than a hundred as objects

_KINDS: dict[str, type] = {
    "welcome": Welcome,
    "refusal": Refusal,
    "ping": Ping,
    "draft_round": DraftRound,
    "proposal_round": ProposalRound,
    "submit_round": SubmitRound,
    "commit_round": CommitRound,
}
_encode_hello, _decode_hello = encoder_of(Hello), decoder_of(Hello)
_ENCODERS: dict[type, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    Greeting: ("hello", lambda one: _encode_hello(one.hello) | {"nonce": one.nonce, "proof": one.proof}),
    **{cls: (kind, encoder_of(cls)) for kind, cls in _KINDS.items()},
}
_DECODERS: dict[str, Callable[[Any], Frame]] = {
    "hello": lambda hello: Greeting(_decode_hello(hello), hello.nonce, hello.proof),
    **{kind: decoder_of(cls) for kind, cls in _KINDS.items()},
}

_LISTS = {
    kind: [name for name, field in member.message_type.fields_by_name.items() if field.is_repeated]
    for kind, member in wire.Frame.DESCRIPTOR.fields_by_name.items()
    if member.message_type is not None
}


def encode(frame: Frame) -> bytes:
    """Raises WireError where a value lies outside what the wire can hold (a negative token id, say)."""
    kind, encode_kind = _ENCODERS[type(frame)]
    try:
        return wire.Frame(**{kind: encode_kind(frame)}).SerializeToString()
    except (ValueError, TypeError, EncodeError) as error:
        raise WireError(f"a {type(frame).__name__} cannot be sent: {error}") from error


def decode(data: bytes, max_bytes: int | None = None) -> Frame:
    """Raises WireError where the bytes are not a frame, more than ``max_bytes``, or have more than MAX_PARTS parts."""
    if max_bytes is not None and len(data) > max_bytes:
        raise WireError(f"a frame of {len(data)} bytes came, at most {max_bytes} are allowed")
    try:
        frame = wire.Frame.FromString(data)
        kind = frame.WhichOneof("kind")
        if kind is None:
            raise WireError(f"{len(data)} bytes came that hold no frame of this protocol version")
        message = getattr(frame, kind)
        if (num_parts := _num_parts(kind, message)) > MAX_PARTS:
            raise WireError(f"a {kind} of {num_parts} parts came, at most {MAX_PARTS} are allowed")
        return _DECODERS[kind](message)
    except (DecodeError, InvalidField, ValueError, KeyError) as error:
        raise WireError(f"{len(data)} bytes came that are not a frame: {error}") from error


def _num_parts(kind: str, message: Any) -> int:
    """The entries of its lists, and of the only lists of messages within those."""
    num_parts = sum(len(getattr(message, name)) for name in _LISTS[kind])
    if kind == "proposal_round" and num_parts <= MAX_PARTS:
        num_parts += sum(len(level.verified) for level in message.levels)
    return num_parts


def encode_message(message: Message, max_bytes: int) -> bytes:
    """As ``encode``, for a link that takes at most ``max_bytes``."""
    data = encode(message)
    if len(data) > max_bytes:
        name = type(message).__name__
        raise WireError(f"a {name} of {len(data)} bytes cannot be sent: the link takes at most {max_bytes}")
    return data
