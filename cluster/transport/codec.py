"""Encodes frames as bytes and back: the dataclasses of ``cluster.messages`` as the protobuf of ``wire.proto``.

Both name their fields alike, so the conversion follows from the dataclass's types (``codec_fields``); a new field needs a
line in each. Python works per request, never per token: protobuf converts token ids and confidences as packed columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, EncodeError

from cluster.errors import IncompatibleTokenizer, InvalidField, LinkClosed, WireError
from cluster.messages import CommitRound, DraftRound, Hello, Message, ProposalRound, SubmitRound
from cluster.transport import wire_pb2 as wire
from cluster.transport.codec_fields import decoder_of, encoder_of


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
