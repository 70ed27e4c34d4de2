"""Switching the routing policy while the server runs: for a limited time, by an operator."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse

from cluster.client import ClusterStatus
from cluster.config import (
    EpsilonGreedyPolicy,
    FixedPolicy,
    GreedyLengthPolicy,
    HedgePolicy,
    LbssPolicy,
    PolicyConfig,
)
from cluster.errors import LinkClosed
from deploy.api.body import BodyReader
from deploy.api.errors import ApiError
from deploy.api.fields import Strict
from deploy.api.keys import ApiKeys

PATH = "/v1/outrider/policy"
# `chain` is missing: its drafters are started for it.
_POLICIES: dict[str, PolicyConfig] = {
    "hedge": HedgePolicy(),
    "lbss": LbssPolicy(),
    "epsilon-greedy": EpsilonGreedyPolicy(),
    "greedy-length": GreedyLengthPolicy(),
    "fixed": FixedPolicy(),
    "off": FixedPolicy(chain=()),
}

# Of the cluster: the policy, None to end a trial, and its seconds. False: no router takes it now.
TryPolicy = Callable[[PolicyConfig | None, float], Awaitable[bool]]


class PolicyTrialRequest(Strict):
    """``instead_of``: the policy that the caller saw, so that two operators do not overwrite each other unseen."""

    policy: Literal["hedge", "lbss", "epsilon-greedy", "greedy-length", "fixed", "off"] | None  # None: end the trial
    instead_of: str
    for_s: Annotated[float, Field(ge=10, le=3600)] = 300.0


class PolicyTrials:
    """``operators``: the keys that may switch; None: nobody may. ``try_policy`` None: this cluster cannot."""

    def __init__(
        self,
        bodies: BodyReader,
        operators: Callable[[], ApiKeys | None],
        try_policy: TryPolicy | None,
        status: Callable[[], Awaitable[ClusterStatus]],
    ) -> None:
        self._bodies = bodies
        self._operators = operators
        self._try_policy = try_policy
        self._status = status

    async def switch(self, request: Request) -> JSONResponse:
        """Routes by another policy for a limited time. Needs an operator's key. Answers stay the same."""
        operators = self._operators()
        if operators is None or self._try_policy is None:
            message = "the policy cannot be switched: api.operator_keys_file names no operators"
            raise ApiError(HTTPStatus.FORBIDDEN, message, type="permission_error", code="no_operators")
        operators.check(request.headers.get("authorization"))
        fields = await self._bodies.read(request, PolicyTrialRequest)
        status = await self._status()
        if status.policy == "chain":
            message = "the policy is chain, whose drafters are started for it: change the file"
            raise ApiError(HTTPStatus.CONFLICT, message, code="policy_is_chain")
        if fields.instead_of != status.policy:
            message = f"instead_of: the policy is {status.policy} now, not {fields.instead_of!r}: look again"
            raise ApiError(HTTPStatus.CONFLICT, message, param="instead_of", code="policy_changed")
        policy = None if fields.policy is None else _POLICIES[fields.policy]
        if not await self._try_policy(policy, fields.for_s):
            raise LinkClosed("the router does not answer")
        return JSONResponse({"policy": fields.policy, "for_s": None if policy is None else fields.for_s})
