"""The handshake: which peers are refused, and when one that says nothing is dropped."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import IncompatibleTokenizer, LinkClosed, OutriderError
from cluster.messages import Hello, ProposalRound, Role
from cluster.transport import connect
from cluster.transport.base import LinkUp, Mailbox
from cluster.transport.codec import encode
from tests.support.links import DEADLINE_S, DRAFTER, QUICK, TARGET, Ends, collect, grpc_answers


@pytest.mark.parametrize(
    ("hello", "error", "reason"),
    [
        (replace(DRAFTER, token="guess"), LinkClosed, "cluster token"),
        (replace(DRAFTER, token=""), LinkClosed, "cluster token"),
        (replace(DRAFTER, protocol_version=99), LinkClosed, "protocol version 99"),
        (replace(DRAFTER, role=Role.TARGET), LinkClosed, "cannot link with a target"),
        (replace(DRAFTER, vocab_size=101), IncompatibleTokenizer, "(vocabulary|one) of 101"),
        (replace(DRAFTER, tokenizer_fingerprint="other"), IncompatibleTokenizer, "other"),
        (replace(DRAFTER, role=Role.GATEWAY, token="guess"), LinkClosed, "cluster token"),
    ],
)
def test_a_mismatch_is_refused_with_its_reason(
    ends: Ends, address: str, hello: Hello, error: type[OutriderError], reason: str
) -> None:
    mailbox, near_mailbox = Mailbox(), Mailbox()
    address = ends.listen(address, mailbox)
    with pytest.raises(error, match=reason) as refused:
        connect(address, near_mailbox, hello, DEADLINE_S)
    assert "secret" not in str(refused.value)
    assert "guess" not in str(refused.value)
    near = ends.connect(address, near_mailbox)  # the listener minds nothing
    assert near_mailbox.drain() == [LinkUp(near)]
    (up,) = collect(mailbox, 1)
    assert isinstance(up, LinkUp)
    assert up.link.peer == DRAFTER


def test_a_gateway_has_no_tokenizer_to_compare(ends: Ends, address: str) -> None:
    gateway = Hello(Role.GATEWAY, "gateway", 0, "", token="secret")
    near = ends.connect(ends.listen(address, Mailbox()), Mailbox(), gateway)
    assert near.peer == TARGET


def test_only_a_target_and_another_may_link(ends: Ends, address: str) -> None:
    address = ends.listen(address, Mailbox(), DRAFTER)
    with pytest.raises(LinkClosed, match="one must be a target"):
        connect(address, Mailbox(), replace(DRAFTER, role=Role.GATEWAY), DEADLINE_S)
    assert ends.connect(address, Mailbox(), TARGET).peer == DRAFTER


def test_a_unix_peer_that_says_nothing_is_dropped(ends: Ends, folder: Path) -> None:
    mailbox = Mailbox()
    ends.listen(f"unix://{folder}/a/s", mailbox, limits=QUICK)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.settimeout(DEADLINE_S)
        mute.connect(f"{folder}/a/s")
        assert mute.recv(1) == b""
    assert mailbox.drain() == []


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",  # announces four gigabytes
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x00",
        len(encode(ProposalRound(1))).to_bytes(4, "big") + encode(ProposalRound(1)),  # no Hello before it
    ],
)
def test_a_unix_peer_that_talks_nonsense_is_dropped(ends: Ends, folder: Path, said: bytes) -> None:
    mailbox = Mailbox()
    ends.listen(f"unix://{folder}/a/s", mailbox)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(f"{folder}/a/s")
        peer.sendall(said)
        assert peer.recv(1) == b""
    assert mailbox.drain() == []


@pytest.mark.parametrize("said", [None, b"nonsense", encode(ProposalRound(1))])
def test_a_grpc_peer_that_says_nothing_or_nonsense_is_dropped(ends: Ends, said: bytes | None) -> None:
    mailbox = Mailbox()
    address = ends.listen("grpc://127.0.0.1:0", mailbox, limits=QUICK)
    done = threading.Event()

    def frames() -> Iterator[bytes]:
        if said is not None:
            yield said
        done.wait(DEADLINE_S)

    assert grpc_answers(address, frames()) == []
    done.set()
    assert mailbox.drain() == []


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_a_listener_that_says_nothing_is_given_up_at_the_deadline(folder: Path, scheme: str) -> None:
    mailbox = Mailbox()
    with socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET) as mute:
        mute.bind(f"{folder}/s" if scheme == "unix" else ("127.0.0.1", 0))
        mute.listen()
        address = f"unix://{folder}/s" if scheme == "unix" else f"grpc://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(LinkClosed, match=r"no Hello within 0\.3 s"):
            connect(address, mailbox, DRAFTER, 0.3)
    assert mailbox.drain() == []
