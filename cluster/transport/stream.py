"""One end of a link over a stream of frames: the handshake, then messages into the owner's mailbox.

Unix sockets and gRPC move frames differently (``Pipe``). The protocol is the same:

    connecting end                     accepting end
    Greeting              ->           checks its version; else Refusal
    checks it             <-           Greeting, with a proof of the secret
    Welcome with a proof  ->           checks it; else Refusal
    LinkUp                             LinkUp
    messages, pings      <->           messages, pings

Both ends prove that they know the cluster's secret by an HMAC-SHA256 under it, over their side, both fresh nonces (against
replay; the side is against reflection) and both hellos. Hellos and later messages are not encrypted.
"""

import hashlib
import hmac
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Protocol

from cluster.errors import IncompatibleTokenizer, InvalidField, LinkClosed, LinkFull, WireError
from cluster.messages import Hello, Message, Role
from cluster.transport.base import Limits, LinkDown, LinkUp, Mailbox, Received
from cluster.transport.codec import Greeting, Ping, Refusal, Welcome, decode, encode, encode_message

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


# Maximum frame size before the handshake ends; bounds what an unauthenticated peer can occupy.
MAX_HANDSHAKE_BYTES = 4 * 2**10
MAX_REASON_LEN = 200  # characters of a peer's refusal in the log

_OF_THE_LINK = (Greeting, Welcome, Refusal, Ping)

_log = logging.getLogger(__name__)


class Pipe(Protocol):
    """Moves the frames of one link. Thread-safe."""

    def write(self, frame: bytes) -> None:
        """Queues a frame without waiting. Raises LinkFull or LinkClosed."""

    def resume(self) -> None:
        """Resumes reading: the mailbox has room again."""

    def finish(self) -> None:
        """Closes after the queued frames are written."""

    def close(self) -> None:
        """Closes at once; idempotent."""


class _State(Enum):
    HANDSHAKE = auto()
    CONFIRMING = auto()  # the accepting end awaits the Welcome
    UP = auto()
    DOWN = auto()


class StreamLink:
    """A ``Link``. ``on_frame`` is called by one thread, ``lost`` by any."""

    def __init__(self, pipe: Pipe, own: Hello, mailbox: Mailbox, limits: Limits, address: str, accepts: bool) -> None:
        self.settled = threading.Event()  # the handshake has succeeded or failed
        self.on_closed: Callable[[], None] = lambda: None
        self._pipe = pipe
        self._own = own
        self._mailbox = mailbox
        self._limits = limits
        self._address = address
        self._accepts = accepts
        self._greeting = greeting(own)
        self._peer_greeting: Greeting | None = None
        self._peer: Hello | None = None
        self._lock = threading.Lock()
        self._state = _State.HANDSHAKE
        self._held: Received | None = None  # refused by the full mailbox; no frame follows before it is put
        self._error: IncompatibleTokenizer | LinkClosed | None = None  # why it is down

    @property
    def peer(self) -> Hello:
        if self._peer is None:
            raise LinkClosed(f"the peer at {self._address} has not said who it is")
        return self._peer

    @property
    def is_up(self) -> bool:
        return self._state is _State.UP

    @property
    def max_frame_bytes(self) -> int:
        return self._limits.max_message_bytes if self._state is _State.UP else MAX_HANDSHAKE_BYTES

    def send(self, message: Message) -> None:
        frame = encode_message(message, self._limits.max_message_bytes)
        if self._state is not _State.UP:
            raise LinkClosed(f"{self} is closed: {self._error}")
        self._pipe.write(frame)

    def close(self) -> None:
        self._down(LinkClosed("closed by its owner"), tell=False)
        self._pipe.close()

    def greet(self) -> None:
        """Starts the handshake, at the connecting end."""
        self._say(self._greeting)

    def wait_up(self, deadline_s: float) -> None:
        """Waits for the end of the handshake, at the connecting end; raises as ``cluster.transport.connect``."""
        if not self.settled.wait(deadline_s):
            self.lost(f"no Hello within {deadline_s:g} s")
        if (error := self._error) is not None:
            raise error

    def on_frame(self, frame: bytes) -> bool:
        """Handles a frame. False: the mailbox was full; the message is kept, and no frame may follow until ``resume``."""
        try:
            content = decode(frame, self.max_frame_bytes)
        except WireError as error:
            self.lost(str(error))
            return True
        if self._state is _State.UP and not isinstance(content, _OF_THE_LINK):  # first, as the most frequent
            return self._take(Received(self, content))
        match content, self._state:
            case Ping(), _:
                return True
            case Greeting(), _State.HANDSHAKE:
                self._on_greeting(content)
            case Refusal(), _State.HANDSHAKE | _State.CONFIRMING:
                self._on_refusal(content)
            case Welcome(), _State.CONFIRMING:
                self._on_welcome(content)
            case ((Greeting() | Refusal() | Welcome()), _):
                self.lost(f"a {type(content).__name__} came out of turn")
            case _, _State.DOWN:
                pass  # sent before this end closed
            case _:
                self.lost(f"a {type(content).__name__} came before the end of the handshake")
        return True

    def lost(self, reason: str) -> None:
        """The stream broke, ended, or carried an invalid frame."""
        self._down(LinkClosed(f"{self}: {reason}"), tell=True)
        self._pipe.close()

    def _on_greeting(self, peer: Greeting) -> None:
        refused = version_refusal(self._own, peer.hello)
        if refused is None and len(peer.nonce) != NONCE_BYTES:
            refused = Refusal(f"the nonce must have {NONCE_BYTES} bytes, got {len(peer.nonce)}")
        if refused is not None:
            self._refuse(refused)
            return
        self._peer_greeting, mine = peer, self._greeting
        if not self._accepts:
            if self._admits(peer, peer.proof, Side.ACCEPTING, connecting=mine, accepting=peer):
                self._say(Welcome(proof(self._own.token, Side.CONNECTING, connecting=mine, accepting=peer)))
                self._up()
            return
        with self._lock:
            if self._state is _State.DOWN:
                return
            self._state = _State.CONFIRMING
        self._greeting = replace(mine, proof=proof(self._own.token, Side.ACCEPTING, connecting=peer, accepting=mine))
        self._say(self._greeting)

    def _on_welcome(self, welcome: Welcome) -> None:
        peer = self._peer_greeting
        assert peer is not None, "a Welcome follows a Greeting"
        if self._admits(peer, welcome.proof, Side.CONNECTING, connecting=peer, accepting=self._greeting):
            self._up()

    def _admits(self, peer: Greeting, given: bytes, side: Side, connecting: Greeting, accepting: Greeting) -> bool:
        """Checks the proof of ``side``, the peer's, and its Hello; refuses the link if one is wrong."""
        refused = refusal(self._own, peer.hello, proves(given, self._own.token, side, connecting, accepting))
        if refused is not None:
            self._refuse(refused)
            return False
        self._peer = peer.hello
        return True

    def _refuse(self, refused: Refusal) -> None:
        _log.warning("refused a link at %s: %s", self._address, refused.reason)
        self._down(refused.error(self._address), tell=False)
        self._say(refused)
        self._pipe.finish()

    def _on_refusal(self, refused: Refusal) -> None:
        """The peer is not authenticated, so its reason is quoted and truncated for the log."""
        refused = replace(refused, reason=repr(refused.reason[:MAX_REASON_LEN])[1:-1])
        if self._accepts:
            _log.warning("a link at %s was refused by its peer: %s", self._address, refused.reason)
        self._down(refused.error(self._address), tell=False)
        self._pipe.close()

    def _say(self, frame: Greeting | Welcome | Refusal) -> None:
        try:
            self._pipe.write(encode(frame))
        except (LinkClosed, LinkFull) as error:
            self.lost(str(error))

    def _up(self) -> None:
        with self._lock:
            if self._state is not _State.DOWN:
                self._state = _State.UP
                self._mailbox.put(LinkUp(self))
        self.settled.set()

    def _down(self, error: IncompatibleTokenizer | LinkClosed, tell: bool) -> None:
        with self._lock:
            if self._state is _State.DOWN:
                return
            was_up = self._state is _State.UP
            self._state = _State.DOWN
            self._error = error
            self._held = None
            if was_up and tell:
                self._mailbox.put(LinkDown(self, str(error)))
        if not was_up and tell and self._accepts:
            _log.warning("a link did not come up: %s", error)
        self.settled.set()
        self.on_closed()

    def _take(self, event: Received) -> bool:
        with self._lock:
            if self._state is not _State.UP or self._mailbox.put(event, self._on_room):
                return True
            self._held = event
            return False

    def _on_room(self) -> None:
        with self._lock:
            if self._held is None or not self._mailbox.put(self._held, self._on_room):
                return
            self._held = None
        self._pipe.resume()

    def __str__(self) -> str:
        who = "an unknown peer" if self._peer is None else f"{self._peer.role} {self._peer.name!r}"
        return f"the link to {who} at {self._address}"
