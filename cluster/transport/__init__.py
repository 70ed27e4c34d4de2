"""Links: long-lived, bidirectional, ordered streams of messages between two processes. A link never blocks its owner:
``send`` queues or raises, and the owner drains messages and link events from its ``Mailbox`` once per round.

An address selects the transport by its scheme. Any thread may call; links need no event loop.

memory://NAME        within a process; messages are not encoded, so size limits do not apply
unix:///PATH         within a node
grpc://HOST:PORT     between nodes; port 0 picks a free port, which the listener's address names
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

from cluster.config import TlsConfig
from cluster.config.file import NODE
from cluster.errors import InvalidField
from cluster.messages import Hello
from cluster.transport.base import Limits, Link, Listener, Mailbox
from cluster.transport.memory import LocalNetwork

LOCAL = LocalNetwork()


def listen(
    address: str, mailbox: Mailbox, hello: Hello, limits: Limits | None = None, tls: TlsConfig | None = None
) -> Listener:
    """Accepts links, each of which is announced to the mailbox by LinkUp when both ends have verified each other.

    Args:
        tls: of links between nodes; those within a node have none. None: not encrypted.

    Raises:
        InvalidField: the address is malformed, cannot be used here, or is in use; or a file of ``tls`` is unusable.
    """
    listener: Listener = _transport(address, tls).listen(address, mailbox, hello, limits or Limits())
    return listener


def connect(
    address: str,
    mailbox: Mailbox,
    hello: Hello,
    deadline_s: float = 5.0,
    limits: Limits | None = None,
    tls: TlsConfig | None = None,
) -> Link:
    """Connects to a present listener. Waits at most ``deadline_s`` for the handshake; LinkUp is then in the mailbox.

    Raises:
        InvalidField: the address is malformed, or a file of ``tls`` is unusable.
        IncompatibleTokenizer: vocabularies or tokenizers differ.
        LinkClosed: nobody listens, the peer refused for another reason, or the deadline passed.
    """
    link: Link = _transport(address, tls).connect(address, mailbox, hello, deadline_s, limits or Limits())
    return link


def at_node(address: str, host: str) -> str:
    """The address to listen at on the node of a ``host``: the host ``node`` is replaced by it."""
    return _with_host(address, (f"grpc://{NODE}:",), host)


def as_seen_from_elsewhere(address: str, host: str) -> str:
    """The address for other nodes: a wildcard host is replaced by ``host``, the name of the listener's node."""
    return _with_host(address, ("grpc://0.0.0.0:", "grpc://[::]:"), host)


def _with_host(address: str, replaced: tuple[str, ...], host: str) -> str:
    for start in replaced:
        if address.startswith(start):
            return f"grpc://{bracketed(host)}:{address.removeprefix(start)}"
    return address


def bracketed(host: str) -> str:
    """A host as part of an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _transport(address: str, tls: TlsConfig | None) -> Any:
    """What has ``listen`` and ``connect``: a network or a module."""
    match address.partition("://")[0]:
        case "memory":
            return LOCAL
        case "unix":
            from cluster.transport import unix

            return unix
        case "grpc":
            from cluster.transport import rpc  # imports gRPC

            return SimpleNamespace(listen=partial(rpc.RpcListener, tls=tls), connect=partial(rpc.connect, tls=tls))
    raise InvalidField("address", address, "must be memory://NAME, unix:///PATH or grpc://HOST:PORT")
