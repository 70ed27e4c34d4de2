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
    """Issues certificates of one day, from yesterday or earlier on."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        basic = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key, datetime.now(UTC) - 30 * DAY, 60 * DAY)
        self.pem = builder.add_extension(basic, critical=True).sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(self, folder: Path, name: str = NODE_NAME, *, age: timedelta = timedelta(hours=1)) -> TlsConfig:
        """Files of a new certificate, in a folder that is made. One with an ``age`` of more than a day has expired."""
        folder.mkdir(parents=True, exist_ok=True)
        files = TlsConfig(cert_file=folder / "tls.crt", key_file=folder / "tls.key", ca_file=folder / "ca.crt")
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key, datetime.now(UTC) - age, DAY)
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        certificate = builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        files.key_file.touch(mode=0o600)
        files.key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        files.cert_file.write_bytes(certificate.public_bytes(Encoding.PEM))
        files.ca_file.write_bytes(self.pem)
        return files


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, since: datetime, for_time: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + for_time)
    )
