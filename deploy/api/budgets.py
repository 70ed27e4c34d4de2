"""Budgets of tenants: refusals, refunds, and OpenAI's headers."""

import math
from collections.abc import Callable, Iterable
from http import HTTPStatus

from deploy.api.errors import ApiError, overloaded
from deploy.api.tenants import Tenant
from router.planning.token_budgets import UNLIMITED, Budget, TokenBucket

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
