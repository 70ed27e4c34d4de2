"""Certificate authorities of tests, and the files that they issue."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from cluster.config import TlsConfig
from cluster.transport.tls import NODE_NAME

DAY = timedelta(days=1)


class Authority:
    """Issues certificates of one day, from yesterday or earlier on.

    Args:
        left: until its own certificate expires.
        parent: issues it, which makes it an intermediate; None: it is a root.
        key: of another authority, which it replaces; None: a new one.
    """

    def __init__(
        self,
        name: str = "authority",
        left: timedelta = 30 * DAY,
        parent: "Authority | None" = None,
        key: ec.EllipticCurvePrivateKey | None = None,
    ) -> None:
        self.key = key or ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._parent = parent
        issuer = parent or self
        builder = _builder(self._name, issuer._name, self.key, issuer.key, datetime.now(UTC) - 30 * DAY, 30 * DAY + left)
        basic = x509.BasicConstraints(ca=True, path_length=None)
        self.pem = builder.add_extension(basic, critical=True).sign(issuer.key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(self, folder: Path, name: str = NODE_NAME, *, age: timedelta = timedelta(hours=1)) -> TlsConfig:
        """Files of a new certificate, in a folder that is made. One with an ``age`` of more than a day has expired."""
        folder.mkdir(parents=True, exist_ok=True)
        files = TlsConfig(cert_file=folder / "tls.crt", key_file=folder / "tls.key", ca_file=folder / "ca.crt")
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key, self.key, datetime.now(UTC) - age, DAY)
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        certificate = builder.add_extension(names, critical=False).sign(self.key, hashes.SHA256())
        files.key_file.touch(mode=0o600)
        files.key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        root, intermediates = self, b""
        while root._parent is not None:
            root, intermediates = root._parent, intermediates + root.pem
        files.cert_file.write_bytes(certificate.public_bytes(Encoding.PEM) + intermediates)
        files.ca_file.write_bytes(root.pem)
        return files


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    since: datetime,
    for_time: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + for_time)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def not_after_s(pem: bytes) -> float:
    """POSIX time at which the first certificate of a file expires."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
