"""Verification of the peer, by each end before its LinkUp.

Both ends prove that they know the cluster's secret by an HMAC-SHA256 under it, over their side, both fresh nonces (against
replay; the side is against reflection) and both hellos. Hellos and later messages are not encrypted.
"""

import hashlib
import hmac
import secrets
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from cluster.errors import InvalidField
from cluster.messages import Hello, Role
from cluster.transport.codec import Greeting, Refusal

NONCE_BYTES = 32
_CONTEXT = "outrider link handshake"


class Side(StrEnum):
    """One end of a link."""

    CONNECTING = "connecting"
    ACCEPTING = "accepting"


def read_secret(file: Path) -> str:
    """The secret in a file of one line. Raises InvalidField: unreadable or empty."""
    try:
        secret = file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("token_file", str(file), f"cannot be read ({error})") from error
    if not secret:
        raise InvalidField("token_file", str(file), "is empty")
    return secret


def greeting(own: Hello) -> Greeting:
    """A Greeting with a fresh nonce and without the secret."""
    return Greeting(replace(own, token=""), secrets.token_bytes(NONCE_BYTES))


def proof(secret: str, side: Side, connecting: Greeting, accepting: Greeting) -> bytes:
    """The 32-byte proof that ``side`` knows the secret."""
    mac = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    for part in (_CONTEXT.encode(), side.encode(), *_parts(connecting), *_parts(accepting)):
        mac.update(len(part).to_bytes(4, "big") + part)  # with its length, so that no two lists of parts look alike
    return mac.digest()


def proves(given: bytes, secret: str, side: Side, connecting: Greeting, accepting: Greeting) -> bool:
    """Whether ``given`` is the proof of ``side``, in constant time."""
    return hmac.compare_digest(given, proof(secret, side, connecting, accepting))


def same_secret(own: Hello, peer: Hello) -> bool:
    """For two ends in one process, which send nothing. Constant time."""
    return hmac.compare_digest(own.token.encode(), peer.token.encode())


def version_refusal(own: Hello, peer: Hello) -> Refusal | None:
    """Checked first: the proofs of another version may differ."""
    if own.protocol_version == peer.protocol_version:
        return None
    return Refusal(
        f"{peer.role} {peer.name!r} speaks protocol version {peer.protocol_version}, "
        f"{own.role} {own.name!r} version {own.protocol_version}: run the same release on both"
    )


def refusal(own: Hello, peer: Hello, has_proved: bool) -> Refusal | None:
    """Why ``own`` refuses ``peer``; ``has_proved``: the peer knows the secret. The message contains no secret."""
    if not has_proved:
        return Refusal(f"the cluster token of {peer.role} {peer.name!r} is not the one of {own.role} {own.name!r}")
    if (own.role is Role.TARGET) == (peer.role is Role.TARGET):
        return Refusal(f"a {peer.role} ({peer.name!r}) cannot link with a {own.role} ({own.name!r}): one must be a target")
    if Role.GATEWAY in (own.role, peer.role):
        return None  # a gateway asks the target for the model, it has no tokenizer to compare yet
    if own.vocab_size != peer.vocab_size:
        return Refusal(
            f"{peer.role} {peer.name!r} has a vocabulary of {peer.vocab_size} tokens, "
            f"{own.role} {own.name!r} one of {own.vocab_size}",
            tokenizer=True,
        )
    if own.tokenizer_fingerprint != peer.tokenizer_fingerprint:
        return Refusal(
            f"the tokenizer of {peer.role} {peer.name!r} ({peer.tokenizer_fingerprint}) is not the one of "
            f"{own.role} {own.name!r} ({own.tokenizer_fingerprint})",
            tokenizer=True,
        )
    return None


def _parts(greeting: Greeting) -> tuple[bytes, ...]:
    hello = greeting.hello
    version, vocab_size = str(hello.protocol_version), str(hello.vocab_size)
    said = (version, hello.role, hello.name, vocab_size, hello.tokenizer_fingerprint, hello.instance, hello.tensors)
    return (greeting.nonce, *(one.encode() for one in said))
