"""Until when certificate files make links, while they are replaced, and what is logged of unusable ones."""

import ssl
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from cluster.config import TlsConfig
from cluster.errors import InvalidField
from cluster.transport.tls import CertificateWatch, channel_credentials, check, server_credentials
from tests.support.certificates import Authority, not_after_s

OURS, THEIRS = Authority(), Authority("another")
EXPIRED = timedelta(days=2)
SHORT = Authority("old", timedelta(hours=10))  # expires before what it issues
RENEWED, REPLACEMENT = Authority("old", key=SHORT.key), Authority("old")
ENDED = Authority("old", -timedelta(hours=1))
INTERMEDIATE = Authority("intermediate", timedelta(hours=12), OURS)


@pytest.fixture
def files(tmp_path: Path) -> TlsConfig:
    return OURS.issue(tmp_path / "own")


def tells_the_present(watch: CertificateWatch) -> bool:
    earliest_s = time.time()
    return earliest_s <= watch.not_after_s() <= time.time()


def test_the_end_of_the_certificate_is_told_and_the_present_while_it_is_unusable(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    files = OURS.issue(folder)
    watch = CertificateWatch(files)
    first_s = watch.not_after_s()
    assert first_s == not_after_s(files.cert_file.read_bytes())
    OURS.issue(folder, age=EXPIRED)
    assert tells_the_present(watch)
    OURS.issue(folder, age=timedelta(hours=20))
    assert watch.not_after_s() == not_after_s(files.cert_file.read_bytes()) < first_s
    with pytest.raises(InvalidField, match="expired"):
        CertificateWatch(OURS.issue(tmp_path / "another", age=EXPIRED))


def test_a_watch_recovers_when_files_are_no_longer_replaced_in_part(files: TlsConfig, tmp_path: Path) -> None:
    watch, old = CertificateWatch(files), files.key_file.read_bytes()
    new = OURS.issue(tmp_path / "new", age=timedelta(hours=20))
    files.key_file.write_bytes(new.key_file.read_bytes())
    assert tells_the_present(watch)
    files.key_file.write_bytes(old)
    assert watch.not_after_s() == not_after_s(files.cert_file.read_bytes())
    files.cert_file.write_bytes(new.cert_file.read_bytes())
    assert tells_the_present(watch)
    files.key_file.write_bytes(new.key_file.read_bytes())
    assert watch.not_after_s() == not_after_s(new.cert_file.read_bytes())


def test_files_that_go_while_they_are_read_count_as_unusable(
    files: TlsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = CertificateWatch(files)
    OURS.issue(tmp_path / "own", age=timedelta(hours=20))
    load = ssl.SSLContext.load_cert_chain

    def gone(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
        files.cert_file.unlink()
        load(context, cert_file, key_file)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", gone)
    with pytest.raises(InvalidField, match=r"cert_file: or key_file cannot be read \(No such file"):
        check(files)
    OURS.issue(tmp_path / "own", age=timedelta(hours=20))
    assert tells_the_present(watch)


def test_a_watch_logs_why_files_are_unusable_once_for_each_reason(
    files: TlsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    watch, sound = CertificateWatch(files), files.cert_file.read_bytes()

    def logged(contents: bytes) -> list[str]:
        caplog.clear()
        files.cert_file.write_bytes(contents)
        for _ in range(3):
            watch.not_after_s()
        return [record.getMessage() for record in caplog.records]

    (no_certificate,) = logged(b"half a certif")
    assert "cluster.tls.cert_file: must hold a certificate in PEM" in no_certificate
    assert str(files.cert_file) in no_certificate
    (damaged,) = logged(sound.replace(b"\nM", b"\n\xffM", 1))
    assert damaged != no_certificate
    assert not logged(sound)
    assert logged(b"half a certif") == [no_certificate]


@pytest.mark.parametrize(
    ("issuer", "bundle", "first"),
    [
        (OURS, [OURS], None),
        (SHORT, [SHORT], SHORT),
        (SHORT, [SHORT, RENEWED], None),
        (SHORT, [RENEWED, SHORT], None),
        (RENEWED, [SHORT, RENEWED], None),
        (SHORT, [SHORT, REPLACEMENT], SHORT),
        (REPLACEMENT, [SHORT, REPLACEMENT], None),
        (REPLACEMENT, [ENDED, SHORT, REPLACEMENT, THEIRS], None),
        (SHORT, [ENDED, SHORT, THEIRS], SHORT),
        (Authority("intermediate", parent=SHORT), [SHORT], SHORT),
        (INTERMEDIATE, [OURS], INTERMEDIATE),
        (INTERMEDIATE, [SHORT, OURS], INTERMEDIATE),
        (Authority("lower", parent=INTERMEDIATE), [OURS], INTERMEDIATE),
    ],
    ids=[
        "own certificate",
        "authority",
        "authority renewed with its key",
        "authority renewed with its key, other order",
        "issued by the renewed authority",
        "authority to be replaced, its name kept",
        "authority replaced",
        "authority replaced, others beside it",
        "authority, an expired one beside it",
        "authority of an intermediate",
        "intermediate",
        "intermediate, an unused authority",
        "second intermediate",
    ],
)
def test_the_first_certificate_that_links_need_counts(
    tmp_path: Path, issuer: Authority, bundle: list[Authority], first: Authority | None
) -> None:
    """``first``: None for the own certificate."""
    files = issuer.issue(tmp_path / "own")
    files.ca_file.write_bytes(b"".join(authority.pem for authority in bundle))
    expected = files.cert_file.read_bytes() if first is None else first.pem
    assert CertificateWatch(files).not_after_s() == not_after_s(expected)


def test_a_root_beside_the_certificate_does_not_count(tmp_path: Path) -> None:
    files = OURS.issue(tmp_path / "own")
    files.cert_file.write_bytes(files.cert_file.read_bytes() + SHORT.pem)
    assert CertificateWatch(files).not_after_s() == not_after_s(files.cert_file.read_bytes())


def test_a_certificate_that_cannot_be_decoded_is_refused(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CertificateWatch(files)
    OURS.issue(files.cert_file.parent)  # the watch decodes files that have changed

    def fail(*_: object, **__: object) -> None:
        raise ssl.SSLError("invalid string")

    monkeypatch.setattr(ssl.SSLContext, "get_ca_certs", fail)
    assert tells_the_present(watch)
    uses: tuple[Callable[[TlsConfig], object], ...] = (check, CertificateWatch, channel_credentials, server_credentials)
    for use in uses:
        with pytest.raises(InvalidField, match="file: is unusable"):
            use(files)
