"""The handshake: which peers are refused, when a silent one is dropped, and that both ends prove to know the secret."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import IncompatibleTokenizer, LinkClosed, OutriderError
from cluster.messages import Hello, ProposalRound, Role
from cluster.transport import connect
from cluster.transport.base import LinkDown, LinkUp, Mailbox
from cluster.transport.codec import Greeting, Welcome, decode, encode
from cluster.transport.rpc import PIECE_BYTES
from cluster.transport.stream import MAX_HANDSHAKE_BYTES, NONCE_BYTES, Side, greeting, proof
from tests.support.links import (
    DEADLINE_S,
    DRAFTER,
    QUICK,
    TARGET,
    Ends,
    Wiretap,
    address_of,
    collect,
    greeted,
    grpc_answers,
    refused,
)


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


# ---- the cluster's secret: both ends prove that they know it, neither sends it


def test_a_listener_that_does_not_know_the_secret_never_sees_it(tap: Wiretap) -> None:
    """Whoever gets hold of an address hears what the connecting end says."""
    failed: list[OutriderError] = []

    def dial() -> None:
        try:
            connect(tap.address, Mailbox(), DRAFTER, DEADLINE_S)
        except OutriderError as error:
            failed.append(error)

    dialling = threading.Thread(target=dial)
    dialling.start()
    wire = tap.accept()
    heard = wire.read()
    assert heard is not None
    assert b"secret" not in heard
    said = decode(heard)
    assert isinstance(said, Greeting)
    mine = greeting(replace(TARGET, token=""))
    wire.write(encode(replace(mine, proof=proof("a guess", Side.ACCEPTING, connecting=said, accepting=mine))))
    assert "cluster token" in refused(wire)  # it proved nothing, so it is told nothing
    dialling.join(DEADLINE_S)
    assert isinstance(failed[0], LinkClosed)
    wire.close()


def test_both_ends_use_new_nonces_for_every_link(tap: Wiretap, ends: Ends, folder: Path) -> None:
    address = ends.listen(f"unix://{folder}/new/socket", Mailbox())
    mine = greeting(DRAFTER)
    heard = []
    for _ in range(2):
        wire = ends.wire(address)
        wire.write(encode(mine))
        heard.append(greeted(wire))
        wire.close()
    assert heard[0].nonce != heard[1].nonce
    assert heard[0].proof != heard[1].proof
    assert greeting(DRAFTER).nonce != mine.nonce
    assert all(len(one.nonce) == NONCE_BYTES for one in (mine, *heard))


def test_a_proof_that_was_recorded_opens_no_other_link(ends: Ends, folder: Path) -> None:
    mailbox = Mailbox()
    address = ends.listen(f"unix://{folder}/new/socket", mailbox)
    mine = greeting(DRAFTER)
    first = ends.wire(address)
    first.write(encode(mine))
    welcome = encode(Welcome(proof("secret", Side.CONNECTING, connecting=mine, accepting=greeted(first))))
    first.write(welcome)
    assert isinstance(collect(mailbox, 1)[0], LinkUp)  # it is the right proof, for this link
    second = ends.wire(address)
    second.write(encode(mine))
    greeted(second)
    second.write(welcome)
    assert "cluster token" in refused(second)
    first.close()
    assert [type(event) for event in collect(mailbox, 1)] == [LinkDown]


def test_a_proof_cannot_be_sent_back_to_its_maker(ends: Ends, folder: Path) -> None:
    mailbox = Mailbox()
    wire = ends.wire(ends.listen(f"unix://{folder}/new/socket", mailbox))
    wire.write(encode(greeting(DRAFTER)))
    wire.write(encode(Welcome(greeted(wire).proof)))
    assert "cluster token" in refused(wire)
    assert mailbox.drain() == []


@pytest.mark.parametrize(
    "forged",
    [b"", b"short", bytes(32), proof("secret", Side.CONNECTING, greeting(DRAFTER), greeting(TARGET))],
    ids=["empty", "short", "zeros", "of-another-link"],  # a proof is another one in every process
)
def test_no_link_without_a_proof(ends: Ends, folder: Path, forged: bytes) -> None:
    mailbox = Mailbox()
    wire = ends.wire(ends.listen(f"unix://{folder}/new/socket", mailbox))
    wire.write(encode(greeting(DRAFTER)))
    greeted(wire)
    wire.write(encode(Welcome(forged)))
    assert "cluster token" in refused(wire)
    assert mailbox.drain() == []


def test_a_hello_that_was_changed_on_its_way_is_refused(ends: Ends, folder: Path) -> None:
    """The proofs cover what both ends say of themselves."""
    mailbox = Mailbox()
    wire = ends.wire(ends.listen(f"unix://{folder}/new/socket", mailbox))
    mine = greeting(DRAFTER)
    wire.write(encode(replace(mine, hello=replace(mine.hello, name="another"))))
    wire.write(encode(Welcome(proof("secret", Side.CONNECTING, connecting=mine, accepting=greeted(wire)))))
    assert "cluster token" in refused(wire)
    assert mailbox.drain() == []


@pytest.mark.parametrize("version", [1, 99])
def test_an_end_of_another_protocol_version_is_told_so(ends: Ends, folder: Path, version: int) -> None:
    """Version 1 had no nonces, and sent the secret."""
    wire = ends.wire(ends.listen(f"unix://{folder}/new/socket", Mailbox()))
    wire.write(encode(Greeting(replace(DRAFTER, token="", protocol_version=version), b"")))
    assert f"protocol version {version}" in refused(wire)


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_nobody_unknown_makes_a_listener_hold_a_large_frame(ends: Ends, folder: Path, scheme: str) -> None:
    mailbox = Mailbox()
    address = ends.listen(address_of(scheme, folder), mailbox)
    huge = encode(Greeting(replace(DRAFTER, name="x" * MAX_HANDSHAKE_BYTES), bytes(NONCE_BYTES)))
    if scheme == "unix":
        wire = ends.wire(address)
        wire.write(huge)
        assert wire.read() is None
    else:
        num_asked_for = 0

        def pieces() -> Iterator[bytes]:
            """As long as the other end takes them, up to 64 MB."""
            nonlocal num_asked_for
            for _ in range(1024):
                num_asked_for += 1
                yield b"\0" + bytes(PIECE_BYTES)

        assert grpc_answers(address, pieces()) == []
        assert num_asked_for < 256  # of 1024; gRPC's flow control lets some be under way
    assert mailbox.drain() == []


@pytest.mark.parametrize("piece", [b"", b"\2abc", b"\0", b"\1" + bytes(PIECE_BYTES + 1)])
def test_a_grpc_peer_that_sends_no_pieces_of_frames_is_dropped(ends: Ends, piece: bytes) -> None:
    mailbox = Mailbox()
    address = ends.listen("grpc://127.0.0.1:0", mailbox)
    assert grpc_answers(address, iter([piece])) == []
    assert mailbox.drain() == []
