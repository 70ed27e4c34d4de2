"""Tenants: who calls, with which keys, how much of the server each may use, and the budgets of this."""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from cluster import strict_yaml
from cluster.config.section import Count, Name, Section
from deploy.api.errors import ApiError, overloaded
from router.planning.token_budgets import UNLIMITED, Budget, Limits, TokenBucket

_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


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
    hashed = [_HASHED.fullmatch(key) for key in keys]
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
