"""What a link itself says, beside the messages that it carries."""

from dataclasses import dataclass

from cluster.errors import IncompatibleTokenizer, LinkClosed
from cluster.messages import Hello, Message


@dataclass(frozen=True, slots=True)
class Refusal:
    """Instead of a Greeting or a Welcome: why an end does not want the link.

    ``tokenizer``: the token ids of the two ends do not mean the same text.
    """

    reason: str
    tokenizer: bool = False

    def error(self, address: str) -> IncompatibleTokenizer | LinkClosed:
        """What the connecting side raises."""
        message = f"the link to {address} was refused: {self.reason}"
        return IncompatibleTokenizer(message) if self.tokenizer else LinkClosed(message)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first frame of each end: what it says of itself, and a nonce. ``proof``: the accepting end's, of the secret."""

    hello: Hello
    nonce: bytes
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connecting end has checked the accepting end's Greeting, and proves in turn that it knows the secret."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Ping:
    """The sender is still there. Needs no answer: both ends send them."""


Frame = Greeting | Welcome | Refusal | Ping | Message
