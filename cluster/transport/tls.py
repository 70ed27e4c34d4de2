"""Mutual TLS of links between nodes: each end needs a certificate for ``NODE_NAME`` from an authority of ``ca_file``.

All processes share the name, since addresses of nodes change. Files are read again for each dial and each accepted
connection, so that they can be replaced while processes run; links that are up stay up.
"""

import logging
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass, field
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


def check(files: TlsConfig) -> None:
    """Raises InvalidField: other processes would refuse a link with these files."""
    _check(files, _read(files))


def channel_credentials(files: TlsConfig) -> grpc.ChannelCredentials:
    """Of a dial. Raises InvalidField as ``check``."""
    contents = _read(files)
    _check(files, contents)
    return grpc.ssl_channel_credentials(contents.authorities, contents.key, contents.chain)


def server_credentials(files: TlsConfig) -> grpc.ServerCredentials:
    """Of a listener. Raises InvalidField as ``check``; files that become unusable later are logged, and not used."""
    in_use = _read(files)
    _check(files, in_use)

    def replaced() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake. None: nothing has changed."""
        nonlocal in_use
        try:
            contents = _read(files)
            if contents == in_use:
                return None
            _check(files, contents)
        except InvalidField as error:
            _log.warning("the certificate in use is kept, its files were replaced by unusable ones: %s", error)
            return None
        in_use = contents
        return _configuration(contents)

    return grpc.dynamic_ssl_server_credentials(_configuration(in_use), replaced, require_client_authentication=True)


def _configuration(contents: _Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.chain)], contents.authorities)


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


def _check(files: TlsConfig, contents: _Contents) -> None:
    """Links the certificate with itself in memory, which fails as a link to another process would."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (client, server):
        try:
            context.load_cert_chain(files.cert_file, files.key_file)
        except ssl.SSLError as error:
            reason = "must be the key of cert_file" if error.reason == "KEY_VALUES_MISMATCH" else f"is unusable ({error})"
            raise _invalid("key_file", files.key_file, reason) from error
        try:
            context.load_verify_locations(cadata=contents.authorities.decode("ascii", "replace"))
        except ssl.SSLError as error:
            raise _invalid("ca_file", files.ca_file, f"is unusable ({error})") from error
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


def _invalid(name: str, path: Path, reason: str) -> InvalidField:
    return InvalidField(f"cluster.tls.{name}", str(path), reason)
