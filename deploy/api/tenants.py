"""Tenants: who calls, with which keys, and how much of the server each may use."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from cluster import strict_yaml
from cluster.config.section import Count, Name, Section
from router.planning.token_budgets import UNLIMITED, Limits

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
