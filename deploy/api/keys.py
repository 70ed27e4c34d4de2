"""API keys."""

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Collection
from http import HTTPStatus
from pathlib import Path

from cluster.errors import InvalidField
from deploy.api.errors import ApiError

logger = logging.getLogger(__name__)

_HASHED = re.compile(r"([\w.@-]+):([0-9a-fA-F]{64})")


class ApiKeys:
    """SHA-256 digests of the keys in a file; the keys themselves are neither kept nor logged."""

    def __init__(self, digests: Collection[bytes]) -> None:
        self._digests = tuple(digests)

    @classmethod
    def from_file(cls, path: Path) -> "ApiKeys":
        """One key per line, plain or as ``name:sha256-hex``; blank lines and lines that start with ``#`` are skipped.

        Raises InvalidField: the file is missing, has no key or an invalid line; gives the line's number, not its text.
        """
        try:
            if path.stat().st_mode & stat.S_IROTH:
                logger.warning("every user of this machine can read the API keys in %s; run chmod o= on it", path)
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidField("api_keys_file", str(path), f"cannot be read ({type(error).__name__})") from error
        digests: dict[str, bytes] = {}
        for number, line in enumerate(map(str.strip, lines), start=1):
            if not line or line.startswith("#"):
                continue
            hashed = _HASHED.fullmatch(line)
            name = hashed[1] if hashed else f"line-{number}"
            if name in digests:
                raise InvalidField("api_keys_file", str(path), f"names {name!r} twice (line {number})")
            if not hashed and not (line.isascii() and line.isprintable() and " " not in line):
                raise InvalidField("api_keys_file", str(path), f"line {number} is not a key: spaces or unusual characters")
            digests[name] = bytes.fromhex(hashed[2]) if hashed else hashlib.sha256(line.encode()).digest()
        if not digests:
            raise InvalidField("api_keys_file", str(path), "has no key; leave the setting out to serve without keys")
        return cls(digests.values())

    def plus(self, others: "ApiKeys") -> "ApiKeys":
        """These keys and ``others``."""
        return ApiKeys((*self._digests, *others._digests))

    def knows(self, key: str) -> bool:
        """Compares with every key in constant time, against timing attacks."""
        presented = _digest(key)
        return sum(hmac.compare_digest(presented, digest) for digest in self._digests) > 0

    def check(self, authorization: str | None) -> str:
        """Returns the tenant: an id of the key that does not reveal it.

        Raises ApiError (401) if the ``Authorization`` header has no known key.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("no API key given; send it as 'Authorization: Bearer KEY'")
        if not self.knows(key.strip()):
            raise _unauthorized("the API key is unknown")
        return hashlib.sha256(b"tenant " + _digest(key.strip())).hexdigest()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
