"""What operators change while the server runs: LoRA adapters, by vLLM's endpoints, and the routing policy for a time."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Literal

from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse

from cluster.client import ClusterStatus, EngineClient
from cluster.config import PolicyConfig
from cluster.errors import LinkClosed
from cluster.sampling_params import SamplingParams
from cluster.types import Adapter, Request
from deploy.api.body import BodyReader, Strict, only
from deploy.api.errors import ApiError, bad_request, shorten, timed_out
from deploy.api.settings import ApiSettings
from deploy.api.tenants import ApiKeys

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

# Of the cluster: the adapter that goes, if any, and the one that comes. False: others have changed them meanwhile.
SwapAdapter = Callable[[Adapter | None, Adapter | None], Awaitable[bool]]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(Strict):
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]  # below `api.lora_folder`
    load_inplace: bool = False  # replaces an adapter of this name
    is_3d_lora_weight: Annotated[bool | None, only(False)] = None


class UnloadAdapterRequest(Strict):
    lora_name: Name
    lora_int_id: int | None = None  # vLLM's; the name is enough


POLICY = "/v1/outrider/policy"
# Of the cluster: the policy, None to end a trial, and its seconds. False: no router takes it now.
TryPolicy = Callable[[PolicyConfig | None, float], Awaitable[bool]]


class PolicyTrialRequest(Strict):
    """``instead_of``: the policy that the caller saw, so that two operators do not overwrite each other unseen."""

    # `chain` is missing: its drafters are started for it. off: the target alone; None: end the trial.
    policy: Literal["epsilon-greedy", "hedge", "lbss", "greedy-length", "fixed", "off"] | None
    instead_of: str
    for_s: Annotated[float, Field(ge=10, le=3600)] = 300.0


class Operators:
    """``keys``: those that may change anything; None: there are none. ``swap_adapter``, ``try_policy`` None: this cluster
    cannot."""

    def __init__(
        self,
        bodies: BodyReader,
        keys: Callable[[], ApiKeys | None],
        client: EngineClient,
        status: Callable[[], Awaitable[ClusterStatus]],
        swap_adapter: SwapAdapter | None,
        try_policy: TryPolicy | None,
        settings: ApiSettings,
    ) -> None:
        self._bodies = bodies
        self._keys = keys
        self._client = client
        self._status = status
        self._swap = swap_adapter
        self._try_policy = try_policy
        self._settings = settings
        self._changing = asyncio.Lock()

    async def load(self, request: HttpRequest) -> PlainTextResponse:
        """Loads a LoRA adapter, whose name becomes a model. Its files must fit the model."""
        folder, swap = self._permitted(request)
        fields = await self._bodies.read(request, LoadAdapterRequest)
        async with self._changing:
            info, name = await self._client.model(), fields.lora_name
            known = info.adapter(name)
            if name in (info.name, *info.aliases):
                raise bad_request("lora_name", f"{shorten(name)} is a name of the served model")
            if known is not None and not fields.load_inplace:
                raise bad_request("lora_name", f"{shorten(name)} is loaded already; load_inplace = true replaces it")
            if known is None and len(info.adapters) >= info.max_adapters:
                most = f"this server takes {info.max_adapters} adapters at once (target.vllm.max_loras)"
                raise bad_request("lora_name", most if info.max_adapters else "this server was started without enable_lora")
            adapter = Adapter(name, str(_below(folder, fields.lora_path)), secrets.token_hex(8))
            await self._try(adapter)
            await self._change(swap, known, adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: HttpRequest) -> PlainTextResponse:
        """Removes a LoRA adapter. Calls that it is answering end as they would have."""
        _, swap = self._permitted(request)
        fields = await self._bodies.read(request, UnloadAdapterRequest)
        async with self._changing:
            known = (await self._client.model()).adapter(fields.lora_name)
            if known is None:
                message = f"lora_name: no adapter {shorten(fields.lora_name)} is loaded"
                raise ApiError(HTTPStatus.NOT_FOUND, message, param="lora_name", code="model_not_found")
            await self._change(swap, known, None)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    def _permitted(self, request: HttpRequest) -> tuple[Path, SwapAdapter]:
        """Raises ApiError: 403 without `api.lora_folder`, or with keys and without operators; 401 for another's key."""
        folder = self._settings.lora_folder
        if folder is None or self._swap is None:
            raise _forbidden(
                "adapters cannot be changed while this server runs: api.lora_folder is not set", "no_lora_folder"
            )
        if self._settings.api_keys_file is not None or self._keys() is not None:
            self._check_operator(request, "adapters are changed by operators")
        return folder, self._swap

    def _check_operator(self, request: HttpRequest, what: str) -> None:
        """Raises ApiError: 403 without operators, 401 for another's key."""
        keys = self._keys()
        if keys is None:
            raise _forbidden(f"{what}, and api.operator_keys_file names none", "no_operators")
        keys.check(request.headers.get("authorization"), request.headers.get("x-api-key"))

    async def _try(self, adapter: Adapter) -> None:
        """A token of a target shows whether its files fit; other targets load it with its first request there."""
        probe = Request(f"lora-{adapter.key}", (0,), SamplingParams(1), time.monotonic(), chain=(), adapter=adapter)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                async for commit in self._client.generate(probe):
                    if commit.error is not None:
                        raise bad_request("lora_path", commit.error)
        except TimeoutError as error:
            raise timed_out(self._settings.request_timeout_s, "try again") from error

    async def _change(self, swap: SwapAdapter, old: Adapter | None, new: Adapter | None) -> None:
        if not await swap(old, new):
            raise ApiError(HTTPStatus.CONFLICT, "the adapters have changed meanwhile: look again", code="adapters_changed")

    async def switch_policy(self, request: HttpRequest) -> JSONResponse:
        """Routes by another policy for a limited time. Needs an operator's key. Answers stay the same."""
        self._check_operator(request, "the policy is switched by operators")
        if self._try_policy is None:
            raise _forbidden("the policy of this cluster cannot be switched", "no_operators")
        fields = await self._bodies.read(request, PolicyTrialRequest)
        status = await self._status()
        if status.policy == "chain":
            message = "the policy is chain, whose drafters are started for it: change the file"
            raise ApiError(HTTPStatus.CONFLICT, message, code="policy_is_chain")
        if fields.instead_of != status.policy:
            message = f"instead_of: the policy is {status.policy} now, not {shorten(fields.instead_of)}: look again"
            raise ApiError(HTTPStatus.CONFLICT, message, param="instead_of", code="policy_changed")
        asked = {"kind": "fixed", "chain": ()} if fields.policy == "off" else {"kind": fields.policy}
        policy = None if fields.policy is None else PolicyConfig(**asked)
        if not await self._try_policy(policy, fields.for_s):
            raise LinkClosed("the router does not answer")
        return JSONResponse({"policy": fields.policy, "for_s": None if policy is None else fields.for_s})


def _below(folder: Path, path: str) -> Path:
    """Raises ApiError (400) for a path out of ``folder``."""
    try:
        found = (folder / path).resolve()
        if found.is_relative_to(folder.resolve()):
            return found
    except (OSError, ValueError, RuntimeError):  # a null byte, a name too long, a loop of links
        pass
    raise bad_request("lora_path", f"{shorten(path)} is not below the folder of adapters (api.lora_folder)")


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, type="permission_error", code=code)
