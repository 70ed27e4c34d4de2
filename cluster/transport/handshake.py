"""Who may link with whom: each end checks what the other says of itself before either sees a LinkUp."""

import hmac

from cluster.messages import Hello, Role
from cluster.transport.frames import Refusal


def refusal(own: Hello, peer: Hello) -> Refusal | None:
    """Why the end that says ``own`` refuses one that says ``peer``; None when it does not.

    The token comes first: whoever does not know it learns nothing else.
    """
    if not hmac.compare_digest(own.token.encode(), peer.token.encode()):
        return Refusal(f"the cluster token of {peer.role} {peer.name!r} is not the one of {own.role} {own.name!r}")
    if own.protocol_version != peer.protocol_version:
        return Refusal(
            f"{peer.role} {peer.name!r} speaks protocol version {peer.protocol_version}, "
            f"{own.role} {own.name!r} version {own.protocol_version}: run the same release on both"
        )
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
