"""Tenants: who calls, with which API keys, how much of the server each may use, and the budgets of this."""

import hashlib
import hmac
import logging
import math
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from cluster import strict_yaml
from cluster.config.section import Count, Name, Section
from cluster.errors import InvalidField
from cluster.strict_yaml import ConfigError
from deploy.api.errors import ApiError, overloaded
from router.planning.token_budgets import UNLIMITED, Budget, Limits, TokenBucket


@dataclass(frozen=True, slots=True)
class Tenant:
    """Calls with one of its keys share budgets, cached prefixes, what drafters learn, and one share of the queue."""

    name: str = ""
    salt: str = ""  # of what it caches; empty: shared with all without one
    weight: float = 1.0  # of its share
    max_concurrent: int | None = None  # sequences in flight in all replicas of the API; further calls wait
    limits: Limits = UNLIMITED
    sees_all: bool = False  # the timelines of others' calls


NOBODY = Tenant(sees_all=True)  # where no keys are configured


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def is_key(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _digests(keys: object) -> tuple[str, ...]:
    """Keys as hexadecimal digests. Errors and the model hold no key."""
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) and is_key(key) for key in keys):
        raise ValueError("must list keys: strings without spaces, plain or as sha256:HEX")
    hashed = [re.fullmatch("sha256:([0-9a-fA-F]{64})", key) for key in keys]
    if any(found is None and key.startswith("sha256:") for key, found in zip(keys, hashed, strict=True)):
        raise ValueError("must have 64 hexadecimal digits after each sha256:")
    return tuple(found[1].lower() if found else digest_of(key).hex() for key, found in zip(keys, hashed, strict=True))


class _TenantSection(Section):
    name: Name
    keys: Annotated[tuple[str, ...], BeforeValidator(_digests)]
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    burst_minutes: Annotated[float, Field(gt=0, le=1440)] = 1.0
    max_concurrent_requests: Count | None = None

    def tenant(self) -> Tenant:
        limits = Limits(self.requests_per_minute, self.tokens_per_minute, self.burst_minutes)
        return Tenant(self.name, salt_of(self.name), self.weight, self.max_concurrent_requests, limits)


class _TenantsFile(Section):
    tenants: tuple[_TenantSection, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _all_different(self) -> Self:
        names, keys = [one.name for one in self.tenants], [key for one in self.tenants for key in one.keys]
        if len(set(names)) < len(names):
            raise ValueError("tenants: names must differ")
        if len(set(keys)) < len(keys):
            raise ValueError("tenants: a key is listed twice")
        return self


_PATH = re.compile(rf"(tenants(\[\d+\](\.({'|'.join(_TenantSection.model_fields)})(\[\d+\])?)?)?)?")


def without_text(problem: strict_yaml.Problem) -> strict_yaml.Problem:
    """A problem without names and values that the file has and this program does not know: they may be keys."""
    path = problem.path if _PATH.fullmatch(problem.path) else ""
    message = "is not YAML" if problem.message.startswith("is not YAML") else problem.message.split(", got ")[0]
    return replace(problem, path=path, message=message)


def read_tenants(text: str, path: Path) -> Mapping[bytes, Tenant]:
    """By the digest of the key. Raises ``cluster.strict_yaml.ConfigError``."""
    sections = strict_yaml.parse(text, _TenantsFile, str(path)).tenants
    return {bytes.fromhex(key): section.tenant() for section in sections for key in section.keys}


def salt_of(name: str) -> str:
    """The salt of a tenant that is known by ``name``, which it does not reveal."""
    return hashlib.sha256(b"tenant " + name.encode()).hexdigest()[:32]


BUDGET_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class Budgets:
    """Of this process. ``on_refusal`` is told the tenant and "requests" or "tokens"."""

    def __init__(self, on_refusal: Callable[[str, str], None]) -> None:
        self._budgets: dict[str, Budget] = {}
        self._on_refusal = on_refusal

    def set_tenants(self, tenants: Iterable[Tenant], num_replicas: int, now_s: float) -> None:
        """Keeps the budgets whose limits stay, also where another number of replicas divides them."""
        before, self._budgets = self._budgets, {}
        for one in tenants:
            if one.limits != UNLIMITED:
                budget = before.get(one.name)
                if budget is None or budget.limits != one.limits:
                    budget = Budget(one.limits, num_replicas)
                budget.divide(num_replicas, now_s)
                self._budgets[one.name] = budget

    def take_request(self, tenant: Tenant, now_s: float) -> None:
        """Raises ApiError (429) if there were too many."""
        budget = self._budgets.get(tenant.name)
        if budget is not None and budget.requests is not None:
            self._take(tenant, budget.requests, 1, f"{budget.limits.requests_per_minute} requests", now_s)

    def reserve(self, tenant: Tenant, num_tokens: int, now_s: float) -> None:
        """Raises ApiError: 429 if they are not there now, 400 if there are never that many."""
        budget = self._budgets.get(tenant.name)
        if budget is None or budget.tokens is None:
            return
        if num_tokens > budget.tokens.size:
            asked = f"{num_tokens} tokens of prompts and of the longest possible answers exceed"
            message = f"{asked} the {budget.tokens.size:g} that {tenant.name} may use at once"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, code="tokens_per_minute_exceeded")
        self._take(tenant, budget.tokens, num_tokens, f"{budget.limits.tokens_per_minute} tokens", now_s)

    def give_back(self, tenant: Tenant, num_tokens: int) -> None:
        """Of what was reserved."""
        budget = self._budgets.get(tenant.name)
        if budget is not None and budget.tokens is not None:
            budget.tokens.give_back(num_tokens)

    def headers(self, tenant: Tenant, now_s: float) -> list[tuple[bytes, bytes]]:
        """BUDGET_HEADERS of the limits that the tenant has, each with the limit of a minute."""
        budget = self._budgets.get(tenant.name)
        if budget is None:
            return []
        values: list[str | None] = []
        for per_minute, bucket in (
            (budget.limits.requests_per_minute, budget.requests),
            (budget.limits.tokens_per_minute, budget.tokens),
        ):
            if bucket is None:
                values += (None, None, None)
            else:
                full_s = bucket.wait_s(bucket.size, now_s)
                values += (str(per_minute), str(math.floor(bucket.level(now_s))), _duration(full_s))
        pairs = zip(BUDGET_HEADERS, values, strict=True)
        return [(name.encode(), value.encode()) for name, value in pairs if value is not None]

    def _take(self, tenant: Tenant, bucket: TokenBucket, amount: int, per_minute: str, now_s: float) -> None:
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 0:
            self._on_refusal(tenant.name, per_minute.split()[1])
            raise _refusal(tenant, per_minute, wait_s)
        bucket.take(amount, now_s)


def _refusal(tenant: Tenant, per_minute: str, wait_s: float) -> ApiError:
    message = f"{tenant.name} may use {per_minute} per minute; try again in {_duration(wait_s)}"
    return overloaded(message, wait_s, "rate_limit_exceeded")


def _duration(seconds: float) -> str:
    """As OpenAI's headers have it, in the form of Go's durations, rounded up to milliseconds: ``17ms``, ``1.5s``, ``6m0s``,
    ``1h0m0s``."""
    num_ms = math.ceil(seconds * 1e3)
    if 0 < num_ms < 1000:
        return f"{num_ms}ms"
    minutes, left_ms = divmod(num_ms, 60_000)
    hours, of_hour = divmod(minutes, 60)
    return f"{f'{hours}h' if hours else ''}{f'{of_hour}m' if minutes else ''}{left_ms / 1e3:g}s"


logger = logging.getLogger(__name__)


_NAMED = re.compile(r"([\w.@-]+):([0-9a-fA-F]{64})")
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
        hashed = _NAMED.fullmatch(line)
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
