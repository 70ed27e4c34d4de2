"""API keys."""

import hmac
import logging
import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from cluster.errors import InvalidField
from cluster.strict_yaml import ConfigError
from deploy.api.errors import ApiError
from deploy.api.tenants import Tenant, digest_of, is_key, read_tenants, salt_of, without_text

logger = logging.getLogger(__name__)


_HASHED = re.compile(r"([\w.@-]+):([0-9a-fA-F]{64})")
_TENANTS = re.compile(r"^tenants:(\s|$)", re.MULTILINE)
_Stamp = tuple[int, int, int, int]


class ApiKeys:
    """Tenants by SHA-256 digests of their keys; the keys themselves are neither kept nor logged."""

    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        self._tenants = dict(tenants)

    @classmethod
    def from_file(cls, path: Path, most: int = 1) -> "ApiKeys":
        """One key per line, plain, as ``sha256:HEX`` or as ``name:HEX``, each a tenant without limits; blank lines and lines
        that start with ``#`` are skipped. A key without a name is named by its digest: the name decides which timelines a
        tenant sees. Or YAML, as in docs/operations.md.

        Raises InvalidField: the file is missing, has no key or an invalid line; gives the line's number, not its text. Or a
        limit cannot be divided by ``most``, the replicas of the API at any time.
        """
        try:
            text = path.read_text("utf-8")
            tenants = read_tenants(text, path) if _TENANTS.search(text) else _lines(text, path)
            if path.stat().st_mode & stat.S_IROTH:
                logger.warning("every user of this machine can read the API keys in %s; run chmod o= on it", path)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidField("api_keys_file", str(path), f"cannot be read ({type(error).__name__})") from error
        except ConfigError as error:
            faults = "; ".join(str(without_text(problem)) for problem in error.problems)
            raise InvalidField("api_keys_file", str(path), faults) from None
        for tenant in tenants.values():
            if tenant.max_concurrent is not None and tenant.max_concurrent < most:
                few = f"must be at least the most replicas of the API ({most}), got {tenant.max_concurrent}"
                raise InvalidField("api_keys_file", str(path), f"max_concurrent_requests of {tenant.name} {few}")
        return cls(tenants)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """By name."""
        return {tenant.name: tenant for tenant in self._tenants.values()}

    def plus(self, operators: "ApiKeys") -> "ApiKeys":
        """These keys, and those of ``operators``, who are tenants of other names and share nothing with these."""
        others = {
            digest: replace(one, name=f"operator {one.name}", salt=salt_of(f"operator {one.salt}"), sees_all=True)
            for digest, one in operators._tenants.items()
        }
        return ApiKeys(others | self._tenants)

    def find(self, key: str) -> Tenant | None:
        """Compares with every key in constant time, against timing attacks."""
        presented = digest_of(key)
        found = [tenant for digest, tenant in self._tenants.items() if hmac.compare_digest(presented, digest)]
        return found[0] if found else None

    def check(self, authorization: str | None, api_key: str | None = None) -> Tenant:
        """Of the headers ``Authorization`` and, where it is missing, Anthropic's ``x-api-key``.

        Raises ApiError (401): no known key.
        """
        if authorization is None and api_key is not None:
            authorization = f"Bearer {api_key}"
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("no API key given; send it as 'Authorization: Bearer KEY'")
        tenant = self.find(key.strip())
        if tenant is None:
            raise _unauthorized("the API key is unknown")
        return tenant


class KeyFiles:
    """The keys of callers and operators, read again when their files change.

    Raises InvalidField: a file cannot be used. Later that is only logged, once for each reason: the former keys stay, and
    the files are tried again every ``refresh_s``.
    """

    def __init__(self, keys_file: Path | None, operators_file: Path | None, most: int = 1, refresh_s: float = 5.0) -> None:
        """``most``: as of ``ApiKeys.from_file``."""
        self._files = keys_file, operators_file
        self._most = most
        self._looked_s, self._refresh_s = float("-inf"), refresh_s
        self._seen: list[_Stamp | None] | None = self._stamps()  # None: the last try failed
        self._fault: str | None = None  # of the last try
        self.operators: ApiKeys | None = None
        self.callers: ApiKeys | None = None  # with the operators; None: no key is asked for
        self._read()

    def refresh(self, now_s: float) -> bool:
        """Looks at the files at most every ``refresh_s``. Returns whether there are other keys."""
        if now_s < self._looked_s + self._refresh_s:
            return False
        self._looked_s = now_s
        before, self._seen = self._seen, self._stamps()
        if self._seen == before:
            return False
        try:
            self._read()
        except InvalidField as error:
            self._seen = None
            if str(error) != self._fault:
                logger.error("the former API keys stay in use: %s", error)
            self._fault = str(error)
            return False
        self._fault = None
        logger.info("the API keys were read again")
        return True

    def _read(self) -> None:
        keys, operators = (None if file is None else ApiKeys.from_file(file, self._most) for file in self._files)
        self.operators = operators
        self.callers = keys if keys is None or operators is None else keys.plus(operators)

    def _stamps(self) -> list[_Stamp | None]:
        return [None if file is None else _stamp(file) for file in self._files]


def _stamp(file: Path) -> _Stamp | None:
    """Differs after a change; None: it cannot be read."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


def _lines(text: str, path: Path) -> Mapping[bytes, Tenant]:
    """A tenant for each line. Raises InvalidField."""
    digests: dict[str, bytes] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        hashed = _HASHED.fullmatch(line)
        if not hashed and not is_key(line):
            raise InvalidField("api_keys_file", str(path), f"line {number} is not a key: spaces or unusual characters")
        if not hashed and line.startswith("sha256:"):
            raise InvalidField("api_keys_file", str(path), f"line {number} must have 64 hexadecimal digits after sha256:")
        digest = bytes.fromhex(hashed[2]) if hashed else digest_of(line)
        is_named = hashed is not None and hashed[1] != "sha256"
        name = hashed[1] if hashed and is_named else f"key-{digest.hex()[:8]}"
        if name in digests and (is_named or digests[name] != digest):
            raise InvalidField("api_keys_file", str(path), f"names {name!r} twice (line {number})")
        digests[name] = digest
    if not digests:
        raise InvalidField("api_keys_file", str(path), "has no key; leave the setting out to serve without keys")
    return {digest: Tenant(name, salt_of(digest.hex())) for name, digest in digests.items()}


def _unauthorized(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
