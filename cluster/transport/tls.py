"""Mutual TLS of links between nodes: each end needs a certificate for ``NODE_NAME`` from an authority of ``ca_file``.

All processes share the name, since addresses of nodes change. Files are read again for each dial and each accepted
connection, so that they can be replaced while processes run; links that are up stay up.
"""

import logging
import ssl
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from cluster.config import TlsConfig
from cluster.errors import InvalidField

NODE_NAME = "outrider-node"
_HANDSHAKE_TURNS = 4  # of both ends; TLS 1.3 needs two

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Contents:
    """Of the PEM files."""

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes


@dataclass(frozen=True, slots=True)
class _Issuer:
    """The certificate of an authority or an intermediate."""

    is_root: bool
    not_after_s: float
    pem: bytes


def check(files: TlsConfig) -> None:
    """Raises InvalidField: this process cannot use the files, or other processes would refuse a link with them."""
    _chain_not_after_s(files, _read(files))


class _FaultLog:
    """Logs why files are unusable once, until the reason changes: they are read for each link and each status."""

    def __init__(self, effect: str) -> None:
        self._effect = effect
        self._logged: str | None = None

    def note(self, fault: InvalidField | None) -> None:
        """None: the files are usable."""
        reason = None if fault is None else str(fault)
        if reason is not None and reason != self._logged:
            _log.warning("%s: %s", self._effect, reason)
        self._logged = reason


class CertificateWatch:
    """Until when ``files``, which may be replaced, make links. The constructor raises InvalidField as ``check``."""

    def __init__(self, files: TlsConfig) -> None:
        self._files = files
        self._faults = _FaultLog("no new links: the certificate files are unusable")
        self._contents = _read(files)
        self._not_after_s = _chain_not_after_s(files, self._contents)

    def not_after_s(self) -> float:
        """POSIX time at which the first certificate expires that links need: the process's own, an intermediate of
        ``cert_file`` or the authority of ``ca_file``. The present time while the files, which each call reads again, are
        unusable, for a reason that is logged: dials fail, and listeners keep the last usable files."""
        try:
            contents = _read(self._files)
            if contents != self._contents:
                self._not_after_s, self._contents = _chain_not_after_s(self._files, contents), contents
        except InvalidField as error:
            self._faults.note(error)
            return time.time()
        self._faults.note(None)
        return self._not_after_s


def channel_credentials(files: TlsConfig) -> grpc.ChannelCredentials:
    """Of a dial. Raises InvalidField as ``check``."""
    contents = _read(files)
    _check(files, contents)
    return grpc.ssl_channel_credentials(_latest_first(files, contents.authorities), contents.key, contents.chain)


def server_credentials(files: TlsConfig) -> grpc.ServerCredentials:
    """Of a listener. Raises InvalidField as ``check``; files that become unusable later are logged, and not used."""
    in_use = _read(files)
    _check(files, in_use)
    faults = _FaultLog("the certificate in use is kept, its files were replaced by unusable ones")

    def replaced() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake. None: nothing has changed."""
        nonlocal in_use
        try:
            contents = _read(files)
            if contents == in_use:
                faults.note(None)
                return None
            _check(files, contents)
            configuration = _configuration(files, contents)
        except InvalidField as error:
            faults.note(error)
            return None
        faults.note(None)
        in_use = contents
        return configuration

    initial = _configuration(files, in_use)
    return grpc.dynamic_ssl_server_credentials(initial, replaced, require_client_authentication=True)


def _configuration(files: TlsConfig, contents: _Contents) -> grpc.ServerCertificateConfiguration:
    authorities = _latest_first(files, contents.authorities)
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.chain)], authorities)


def _latest_first(files: TlsConfig, authorities: bytes) -> bytes:
    """The authorities, the one that expires last first, then the whole of ``ca_file``, which may hold other trusted
    certificates. Of authorities of one name and key gRPC takes the first, even if it has expired, where OpenSSL, and so
    ``_check``, takes a valid one. gRPC ignores repetitions."""
    issuers = sorted(_issuers("ca_file", files.ca_file, authorities), key=lambda one: -one.not_after_s)
    return b"".join(one.pem for one in issuers) + authorities


def _read(files: TlsConfig) -> _Contents:
    try:
        if files.key_file.stat().st_mode & stat.S_IRWXO:
            raise _invalid("key_file", files.key_file, "must not be accessible to every user of the machine (chmod o= FILE)")
    except OSError as error:
        raise _invalid("key_file", files.key_file, f"cannot be read ({error.strerror})") from error
    return _Contents(
        _pem("cert_file", files.cert_file, "CERTIFICATE"),
        _pem("key_file", files.key_file, "PRIVATE KEY"),
        _pem("ca_file", files.ca_file, "CERTIFICATE"),
    )


def _pem(name: str, path: Path, kind: str) -> bytes:
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise _invalid(name, path, f"cannot be read ({error.strerror})") from error
    if f"{kind}-----".encode() not in contents:
        raise _invalid(name, path, f"must hold a {kind.lower()} in PEM")
    if b"ENCRYPTED" in contents:
        raise _invalid(name, path, "must not be encrypted, as nobody is there to give the password")
    return contents


def _chain_not_after_s(files: TlsConfig, contents: _Contents) -> float:
    """See ``CertificateWatch.not_after_s``. Of authorities that can replace each other, the one that expires last counts.

    An authority is needed if those that expire later do not verify the chain; subjects do not tell, since a new authority
    may have the name of the old one and another key.
    """
    end_s = _check(files, contents)
    intermediates = _issuers("cert_file", files.cert_file, contents.chain)
    authorities = _issuers("ca_file", files.ca_file, contents.authorities)
    for one in intermediates:
        if not one.is_root:  # others trust roots of their own ca_file only
            end_s = min(end_s, one.not_after_s)
    for expiry_s in sorted({one.not_after_s for one in authorities if one.not_after_s < end_s}):
        later = b"".join(one.pem for one in authorities if one.not_after_s > expiry_s)
        try:
            _check(files, replace(contents, authorities=later))
        except InvalidField:
            return expiry_s
    return end_s


def _issuers(name: str, path: Path, pem: bytes) -> list[_Issuer]:
    """The certificates that may issue others."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, name, path, pem)
    try:
        texts, ders = context.get_ca_certs(), context.get_ca_certs(binary_form=True)
    except (ssl.SSLError, ValueError) as error:  # Python decodes more of a certificate than OpenSSL verifies
        raise _invalid(name, path, f"is unusable ({error})") from error
    return [
        _Issuer(one["subject"] == one["issuer"], _not_after_s(one), ssl.DER_cert_to_PEM_cert(der).encode())
        for one, der in zip(texts, ders, strict=True)
    ]


def _trust(context: ssl.SSLContext, name: str, path: Path, pem: bytes) -> None:
    # OpenSSL skips text outside of PEM blocks; Python takes ASCII only. A byte that is no ASCII is replaced, not dropped:
    # within a block, or as a byte order mark before one, it makes the file unusable for gRPC, too.
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "backslashreplace"))
    except (ssl.SSLError, ValueError) as error:  # ValueError: empty
        raise _invalid(name, path, f"is unusable ({error})") from error


def _not_after_s(certificate: Mapping[str, object]) -> float:
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def _check(files: TlsConfig, contents: _Contents) -> float:
    """Links the certificate with itself in memory, which fails as a link to another process would. Returns the POSIX time
    at which the certificate expires."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (client, server):
        try:
            context.load_cert_chain(files.cert_file, files.key_file)
        except ssl.SSLError as error:
            reason = "must be the key of cert_file" if error.reason == "KEY_VALUES_MISMATCH" else f"is unusable ({error})"
            raise _invalid("key_file", files.key_file, reason) from error
        except OSError as error:  # since _read
            raise _invalid("cert_file", files.cert_file, f"or key_file cannot be read ({error.strerror})") from error
        _trust(context, "ca_file", files.ca_file, contents.authorities)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=NODE_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(_HANDSHAKE_TURNS):
            for end in ends:
                with suppress(ssl.SSLWantReadError):  # until the other end has answered
                    end.do_handshake()
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or str(error)
        raise _invalid("cert_file", files.cert_file, f"would be refused by other processes: {reason.rstrip('.')}") from error
    certificate = ends[0].getpeercert()
    assert certificate is not None, "the handshake verified it"
    return _not_after_s(certificate)


def _invalid(name: str, path: Path, reason: str) -> InvalidField:
    return InvalidField(f"cluster.tls.{name}", str(path), reason)
