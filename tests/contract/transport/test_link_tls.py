"""Mutual TLS of gRPC links: who has no valid certificate gets no link, and costs the others nothing."""

import logging
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from cluster.config import TlsConfig
from cluster.errors import InvalidField, LinkClosed
from cluster.transport import connect
from cluster.transport.base import LinkUp, Mailbox, Received
from cluster.transport.dialer import Dialer
from cluster.transport.tls import NODE_NAME, CertificateWatch, check
from tests.support.certificates import Authority
from tests.support.links import DEADLINE_S, DRAFTER, ROOT, TARGET, Ends, collect, eventually, numbers, sized

ADDRESS = "grpc://127.0.0.1:0"
OURS, THEIRS = Authority(), Authority("another")
EXPIRED = timedelta(days=2)


@pytest.fixture
def files(tmp_path: Path) -> TlsConfig:
    return OURS.issue(tmp_path / "own")


def links(ends: Ends, address: str, tls: TlsConfig | None) -> bool:
    """Whether a process with these files gets a link."""
    try:
        ends.links.append(connect(address, Mailbox(), DRAFTER, DEADLINE_S, tls=tls))
    except LinkClosed:
        return False
    return True


def test_processes_with_certificates_of_one_authority_link(ends: Ends, files: TlsConfig, tmp_path: Path) -> None:
    """In both directions, also by messages of several pieces, and by an address that the certificate does not name."""
    far_mailbox, near_mailbox = Mailbox(), Mailbox()
    address = ends.listen(ADDRESS, far_mailbox, tls=files)
    near = ends.connect(address, near_mailbox, tls=OURS.issue(tmp_path / "other"))
    assert near.peer == TARGET
    (up,) = collect(far_mailbox, 1)
    assert isinstance(up, LinkUp)
    large = replace(sized(300_000), table_version=7)
    near.send(large)
    up.link.send(large)
    assert numbers(collect(far_mailbox, 1)) == [7]
    (_, received) = collect(near_mailbox, 2)
    assert isinstance(received, Received)
    assert received.message == large


def stranger(folder: Path, kind: str) -> grpc.ChannelCredentials | None:
    """Of a client that accepts our listeners. None: it speaks plain HTTP/2."""
    issued = {
        "ours": lambda: OURS.issue(folder),
        "of another authority": lambda: THEIRS.issue(folder),
        "expired": lambda: OURS.issue(folder, age=EXPIRED),
        "for another name": lambda: OURS.issue(folder, "localhost"),
    }
    if kind == "plaintext":
        return None
    if kind == "no certificate":
        return grpc.ssl_channel_credentials(OURS.pem)
    files = issued[kind]()
    return grpc.ssl_channel_credentials(OURS.pem, files.key_file.read_bytes(), files.cert_file.read_bytes())


def refusal_of(address: str, credentials: grpc.ChannelCredentials | None) -> str | None:
    """What a raw client hears from a listener; None: it was heard."""
    peer, options = address.removeprefix("grpc://"), [("grpc.ssl_target_name_override", NODE_NAME)]
    channel = (
        grpc.insecure_channel(peer, options) if credentials is None else grpc.secure_channel(peer, credentials, options)
    )
    with channel:
        try:
            list(channel.stream_stream("/outrider.Link/Frames")(iter([b"no piece"]), timeout=DEADLINE_S))
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)  # noqa: PT017
            # Whoever passes TLS is told by the stream that this is no piece of a frame.
            return None if error.code() is grpc.StatusCode.CANCELLED else str(error.details())
    return None


@pytest.mark.parametrize("kind", ["plaintext", "no certificate", "of another authority", "expired", "for another name"])
def test_a_listener_refuses_a_stranger_and_serves_on(
    ends: Ends, files: TlsConfig, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """And says why: gRPC on stderr, with OpenSSL's reason, or the log."""
    mailbox = Mailbox()
    address = ends.listen(ADDRESS, mailbox, tls=files)
    near = ends.connect(address, Mailbox(), tls=files)
    reason = refusal_of(address, stranger(tmp_path / "stranger", kind))
    assert reason is not None
    assert "Handshake failed with error" in capfd.readouterr().err or "does not name outrider-node" in reason
    assert refusal_of(address, stranger(tmp_path / "ours", "ours")) is None  # the client is not what was refused
    near.send(sized(100))
    (up, received) = collect(mailbox, 2)
    assert isinstance(up, LinkUp)
    assert isinstance(received, Received)
    assert links(ends, address, files)


def test_a_dial_refuses_a_listener_without_a_certificate_of_its_authority(
    ends: Ends, files: TlsConfig, tmp_path: Path
) -> None:
    for other in (None, THEIRS.issue(tmp_path / "theirs")):
        mailbox = Mailbox()
        address = ends.listen(ADDRESS, mailbox, tls=other)
        with pytest.raises(LinkClosed, match=r"(?i)ssl|tls|handshake"):
            connect(address, Mailbox(), DRAFTER, DEADLINE_S, tls=files)
        assert mailbox.drain() == []
        assert links(ends, address, other)


def damaged(change: Callable[[TlsConfig], object]) -> Callable[[TlsConfig], TlsConfig]:
    def changed(files: TlsConfig) -> TlsConfig:
        change(files)
        return files

    return changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged(lambda files: files.cert_file.unlink()), r"cert_file: cannot be read \(No such file"),
        (damaged(lambda files: files.key_file.unlink()), r"key_file: cannot be read \(No such file"),
        (damaged(lambda files: files.ca_file.unlink()), r"ca_file: cannot be read \(No such file"),
        (damaged(lambda files: files.cert_file.write_text("nothing")), "cert_file: must hold a certificate in PEM"),
        (damaged(lambda files: files.key_file.write_text("nothing")), "key_file: must hold a private key in PEM"),
        (damaged(lambda files: files.ca_file.write_text("-----BEGIN CERTIFICATE-----")), "ca_file: is unusable"),
        (damaged(lambda files: files.key_file.chmod(0o604)), "key_file: must not be accessible to every user"),
        (
            damaged(lambda files: files.key_file.write_bytes(OURS.issue(files.key_file.parent / "b").key_file.read_bytes())),
            "key_file: must be the key of cert_file",
        ),
        (damaged(lambda files: OURS.issue(files.key_file.parent, age=EXPIRED)), "cert_file: .* certificate has expired"),
        (
            damaged(lambda files: OURS.issue(files.key_file.parent, "localhost")),
            "cert_file: .* not valid for 'outrider-node'",
        ),
        (damaged(lambda files: files.ca_file.write_bytes(THEIRS.pem)), "cert_file: would be refused by other processes"),
    ],
)
def test_unusable_files_are_refused_where_they_are_read(
    ends: Ends, files: TlsConfig, change: Callable[[TlsConfig], TlsConfig], reason: str
) -> None:
    check(files)
    files = change(files)
    for use in (
        lambda: check(files),
        lambda: ends.listen(ADDRESS, Mailbox(), tls=files),
        lambda: connect("grpc://127.0.0.1:1", Mailbox(), DRAFTER, DEADLINE_S, tls=files),
    ):
        with pytest.raises(InvalidField, match=rf"cluster\.tls\.{reason}"):
            use()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_commands_of_the_docs_make_usable_files(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    commands = re.findall(r"^    (openssl .*)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        subprocess.run(shlex.split(command), cwd=tmp_path, check=True, capture_output=True)
    check(TlsConfig(cert_file=tmp_path / "tls.crt", key_file=tmp_path / "tls.key", ca_file=tmp_path / "ca.crt"))


def test_files_that_are_replaced_are_used_by_the_next_link(ends: Ends, tmp_path: Path) -> None:
    """An authority is replaced while processes run: first all accept both, then each gets a certificate of the new one."""
    files, old = OURS.issue(tmp_path / "listener"), OURS.issue(tmp_path / "old")
    new = THEIRS.issue(tmp_path / "new")
    address = ends.listen(ADDRESS, Mailbox(), tls=files)
    assert links(ends, address, old)
    assert not links(ends, address, new)
    for both in (files, old, new):
        both.ca_file.write_bytes(OURS.pem + THEIRS.pem)
    assert links(ends, address, old)
    assert links(ends, address, new)
    THEIRS.issue(files.key_file.parent)
    assert links(ends, address, new)
    assert not links(ends, address, OURS.issue(tmp_path / "old"))
    assert all(link.peer == TARGET for link in ends.links)  # those of before stay up


def test_files_that_are_replaced_by_unusable_ones_are_not_used(
    ends: Ends, files: TlsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = ends.listen(ADDRESS, Mailbox(), tls=files)
    files.cert_file.write_text("half a certif")
    with caplog.at_level(logging.WARNING):
        assert links(ends, address, OURS.issue(tmp_path / "other"))
    assert "the certificate in use is kept" in caplog.text


def test_a_listener_logs_once_why_it_keeps_the_certificate_in_use(
    ends: Ends, files: TlsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = ends.listen(ADDRESS, Mailbox(), tls=files)
    dialer, sound = OURS.issue(tmp_path / "other"), files.cert_file.read_bytes()
    for contents in (b"half a certif", sound, b"half a certif"):
        caplog.clear()
        files.cert_file.write_bytes(contents)
        for _ in range(3):
            assert links(ends, address, dialer)
        assert caplog.text.count("the certificate in use is kept") == (contents != sound)


def test_authorities_may_have_comments_of_any_encoding(ends: Ends, files: TlsConfig) -> None:
    files.ca_file.write_bytes("# Autorité\n".encode() + THEIRS.pem + "# Behörde\n".encode("latin-1") + OURS.pem)
    assert CertificateWatch(files).not_after_s() > time.time()
    assert links(ends, ends.listen(ADDRESS, Mailbox(), tls=files), files)
    for damaged in (b"\xef\xbb\xbf" + OURS.pem, OURS.pem.replace(b"\nM", b"\n\xffM")):  # unusable for gRPC
        files.ca_file.write_bytes(damaged)
        with pytest.raises(InvalidField, match="ca_file: is unusable"):
            check(files)


def test_an_authority_that_was_renewed_with_its_key_counts_in_any_order(ends: Ends, files: TlsConfig) -> None:
    """gRPC takes the first authority of a name and key."""
    expired = Authority("another", -timedelta(hours=1), key=THEIRS.key)
    for bundle in (expired.pem + THEIRS.pem, THEIRS.pem + expired.pem):
        tls = THEIRS.issue(files.cert_file.parent)
        tls.ca_file.write_bytes(bundle)
        assert CertificateWatch(tls).not_after_s() > time.time()
        assert links(ends, ends.listen(ADDRESS, Mailbox(), tls=tls), tls)


def test_a_dialer_says_why_it_is_refused_and_links_when_it_has_a_certificate(
    ends: Ends, files: TlsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = ends.listen(ADDRESS, Mailbox(), tls=files)
    theirs = THEIRS.issue(tmp_path / "dialer")
    mailbox = Mailbox()
    dialer = Dialer(mailbox, DRAFTER, theirs)
    dialer.set_addresses([address])
    now_s = 0.0

    def linked() -> bool:
        nonlocal now_s
        now_s += 10.0  # beyond each pause
        dialer.tick(now_s)
        return any(isinstance(event, LinkUp) for event in mailbox.drain())

    try:
        with caplog.at_level(logging.WARNING):
            assert eventually(lambda: linked() or "CERTIFICATE_VERIFY_FAILED" in caplog.text)
        OURS.issue(tmp_path / "dialer")
        assert eventually(linked)
    finally:
        dialer.close()
