"""Selects the transport by the scheme of an address.

    memory://NAME        within a process; messages are not encoded, so size limits do not apply
    unix:///PATH         within a node
    grpc://HOST:PORT     between nodes; port 0 picks a free port, which the listener's address names

Any thread may call these functions. Links need no event loop.
"""

from cluster.errors import InvalidField
from cluster.messages import Hello
from cluster.transport.base import Limits, Link, Listener, Mailbox
from cluster.transport.memory import LocalNetwork

LOCAL = LocalNetwork()


def listen(address: str, mailbox: Mailbox, hello: Hello, limits: Limits | None = None) -> Listener:
    """Accepts links at an address. Each is announced to the mailbox by LinkUp after both ends have verified each other.

    Raises:
        InvalidField: the address is malformed, cannot be used here, or is in use.
    """
    limits = limits or Limits()
    match address.partition("://")[0]:
        case "memory":
            return LOCAL.listen(address, mailbox, hello, limits)
        case "unix":
            from cluster.transport.unix import UnixListener

            return UnixListener(address, mailbox, hello, limits)
        case "grpc":
            from cluster.transport.rpc import RpcListener  # imports gRPC

            return RpcListener(address, mailbox, hello, limits)
        case _:
            raise _unknown(address)


def connect(address: str, mailbox: Mailbox, hello: Hello, deadline_s: float = 5.0, limits: Limits | None = None) -> Link:
    """Connects to a listener. Waits at most ``deadline_s`` for the handshake; LinkUp is then in the mailbox.

    Does not wait for a listener to appear.

    Raises:
        InvalidField: the address is malformed.
        IncompatibleTokenizer: vocabularies or tokenizers differ.
        LinkClosed: nobody listens, the peer refused for another reason, or the deadline passed.
    """
    limits = limits or Limits()
    match address.partition("://")[0]:
        case "memory":
            return LOCAL.connect(address, mailbox, hello, deadline_s, limits)
        case "unix":
            from cluster.transport import unix

            return unix.connect(address, mailbox, hello, deadline_s, limits)
        case "grpc":
            from cluster.transport import rpc

            return rpc.connect(address, mailbox, hello, deadline_s, limits)
        case _:
            raise _unknown(address)


def as_seen_from_elsewhere(address: str, host: str) -> str:
    """The address for other nodes: a wildcard host is replaced by ``host``, the name of the listener's node."""
    for everywhere in ("grpc://0.0.0.0:", "grpc://[::]:"):
        if address.startswith(everywhere):
            name = f"[{host}]" if ":" in host else host
            return f"grpc://{name}:{address.removeprefix(everywhere)}"
    return address


def _unknown(address: str) -> InvalidField:
    return InvalidField("address", address, "must be memory://NAME, unix:///PATH or grpc://HOST:PORT")
