"""Encodes frames as bytes and back: the dataclasses of ``cluster.messages`` as the protobuf of ``wire.proto``.

The work here is per request, never per token: the protobuf runtime converts token ids and confidences as packed columns.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, EncodeError

from cluster.errors import InvalidField, WireError
from cluster.messages import CommitRound, DraftRound, Hello, Message, ProposalRound, Role, SubmitRound
from cluster.transport import wire_pb2 as wire
from cluster.transport.codec_drafting import (
    decode_draft_round,
    decode_proposal_round,
    encode_draft_round,
    encode_proposal_round,
)
from cluster.transport.codec_serving import (
    decode_commit_round,
    decode_submit_round,
    encode_commit_round,
    encode_submit_round,
)
from cluster.transport.frames import Frame, Greeting, Ping, Refusal, Welcome


def encode(frame: Frame) -> bytes:
    """Raises WireError where a value lies outside what the wire can hold (a negative token id, say)."""
    out = wire.Frame()
    try:
        _ENCODERS[type(frame)](frame, out)
        return out.SerializeToString()
    except (ValueError, TypeError, EncodeError) as error:
        raise WireError(f"a {type(frame).__name__} cannot be sent: {error}") from error


def decode(data: bytes, max_bytes: int | None = None) -> Frame:
    """Raises WireError where the bytes are not a frame, or more than ``max_bytes``."""
    if max_bytes is not None and len(data) > max_bytes:
        raise WireError(f"a frame of {len(data)} bytes came, at most {max_bytes} are allowed")
    try:
        frame = wire.Frame.FromString(data)
        kind = frame.WhichOneof("kind")
        if kind is None:
            raise WireError(f"{len(data)} bytes came that hold no frame of this protocol version")
        return _DECODERS[kind](getattr(frame, kind))
    except (DecodeError, InvalidField, ValueError, KeyError) as error:
        raise WireError(f"{len(data)} bytes came that are not a frame: {error}") from error


def encode_message(message: Message, max_bytes: int) -> bytes:
    """As ``encode``, for a link that takes at most ``max_bytes``."""
    data = encode(message)
    if len(data) > max_bytes:
        raise WireError(
            f"a {type(message).__name__} of {len(data)} bytes cannot be sent: the link takes at most {max_bytes}"
        )
    return data


# The handshake and the heartbeat.


def _encode_greeting(greeting: Greeting, out: wire.Frame) -> None:
    hello, to = greeting.hello, out.hello
    to.role = hello.role.value
    to.name = hello.name
    to.vocab_size = hello.vocab_size
    to.tokenizer_fingerprint = hello.tokenizer_fingerprint
    to.protocol_version = hello.protocol_version
    to.nonce = greeting.nonce
    to.proof = greeting.proof


def _decode_greeting(hello: wire.Hello) -> Greeting:
    said = Hello(
        role=Role(hello.role),
        name=hello.name,
        vocab_size=hello.vocab_size,
        tokenizer_fingerprint=hello.tokenizer_fingerprint,
        protocol_version=hello.protocol_version,
    )
    return Greeting(said, hello.nonce, hello.proof)


def _encode_welcome(welcome: Welcome, out: wire.Frame) -> None:
    out.welcome.SetInParent()
    out.welcome.proof = welcome.proof


def _encode_refusal(refusal: Refusal, out: wire.Frame) -> None:
    out.refusal.SetInParent()
    out.refusal.reason = refusal.reason
    out.refusal.tokenizer = refusal.tokenizer


def _encode_ping(_: Ping, out: wire.Frame) -> None:
    out.ping.SetInParent()


_ENCODERS: dict[type, Callable[[Any, wire.Frame], None]] = {
    Greeting: _encode_greeting,
    Welcome: _encode_welcome,
    Refusal: _encode_refusal,
    Ping: _encode_ping,
    DraftRound: encode_draft_round,
    ProposalRound: encode_proposal_round,
    SubmitRound: encode_submit_round,
    CommitRound: encode_commit_round,
}

_DECODERS: dict[str, Callable[[Any], Frame]] = {
    "hello": _decode_greeting,
    "welcome": lambda welcome: Welcome(welcome.proof),
    "refusal": lambda refusal: Refusal(refusal.reason, refusal.tokenizer),
    "ping": lambda _: Ping(),
    "draft_round": decode_draft_round,
    "proposal_round": decode_proposal_round,
    "submit_round": decode_submit_round,
    "commit_round": decode_commit_round,
}
