"""The one place that knows which address means which transport.

    memory://NAME        within one process; nothing is encoded, so limits on the size of messages do not matter
    unix:///PATH         within one node
    grpc://HOST:PORT     between nodes; port 0 picks a free one, the listener's address tells which

Both functions may be called from any thread, and the links belong to plain threads: no event loop is needed or used.
"""

from cluster.errors import InvalidField
from cluster.messages import Hello
from cluster.transport.base import Limits, Link, Listener, Mailbox
from cluster.transport.memory import LocalNetwork

LOCAL = LocalNetwork()  # the names of memory:// are those of this process


def listen(address: str, mailbox: Mailbox, hello: Hello, limits: Limits | None = None) -> Listener:
    """Accept links at an address; each comes to the mailbox as a LinkUp once both ends have checked the other's Hello.

    Raises:
        InvalidField: the address is of no known form, cannot be used here, or is in use.
    """
    limits = limits or Limits()
    match address.partition("://")[0]:
        case "memory":
            return LOCAL.listen(address, mailbox, hello, limits)
        case "unix":
            from cluster.transport.unix import UnixListener

            return UnixListener(address, mailbox, hello, limits)
        case "grpc":
            from cluster.transport.rpc import RpcListener  # imports gRPC, which not every process needs

            return RpcListener(address, mailbox, hello, limits)
        case _:
            raise _unknown(address)


def connect(address: str, mailbox: Mailbox, hello: Hello, deadline_s: float = 5.0, limits: Limits | None = None) -> Link:
    """Link with a listener. Waits for its Hello, at most ``deadline_s``; LinkUp is in the mailbox when this returns.

    It does not wait for a listener to appear: whoever wants that tries again later.

    Raises:
        InvalidField: the address is of no known form.
        IncompatibleTokenizer: the two ends have different vocabularies or tokenizers.
        LinkClosed: nobody listens there, the other end refused for another reason, or the deadline passed.
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
    """A listener's address for others: one that listens at every interface is told by ``host``, the name of its node."""
    for everywhere in ("grpc://0.0.0.0:", "grpc://[::]:"):
        if address.startswith(everywhere):
            name = f"[{host}]" if ":" in host else host
            return f"grpc://{name}:{address.removeprefix(everywhere)}"
    return address


def _unknown(address: str) -> InvalidField:
    return InvalidField("address", address, "must be memory://NAME, unix:///PATH or grpc://HOST:PORT")
