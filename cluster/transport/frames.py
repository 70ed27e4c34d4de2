"""Frames of the link protocol itself, sent beside the messages."""

from dataclasses import dataclass

from cluster.errors import IncompatibleTokenizer, LinkClosed
from cluster.messages import Hello, Message


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
