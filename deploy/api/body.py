"""Request bodies: how they are read and validated, with errors that name the field, and what all of them share: strict
models, fields that are refused, and fields that are taken without effect."""

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from starlette.requests import ClientDisconnect

from cluster.cpu_scheduling import without_collection
from deploy.api.errors import ApiError, ClientGone, bad_request, nearest, overloaded, shorten
from deploy.api.settings import ApiSettings
from deploy.api.tasks import ThreadShares, unless_disconnected
from deploy.api.tenants import NOBODY, Tenant
from router.planning.fair_share import SharedLimit


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise PydanticCustomError("form", "holds a number out of range, or is nested too deeply") from None
    return value


FreeObject = Annotated[dict[str, Any], AfterValidator(_finite)]  # of any fields, which answers may repeat


class Strict(BaseModel):
    """Takes no value of another type, and no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    def without_effect(self) -> Iterator[str]:
        """The paths of given fields that are a `Hint`."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Strict):
                yield from (f"{name}.{path}" for path in value.without_effect())
            hint = next((one for one in field.metadata if isinstance(one, Hint)), None)
            if hint is not None and value is not None and value not in hint.neutral:
                yield name


class Hint:
    """Marks a field that is taken without effect, which makes no answer wrong. The warning header names it, unless its value
    is one of ``neutral``."""

    def __init__(self, *neutral: object) -> None:
        self.neutral = neutral


def only(*allowed: object, advice: str = "is not supported yet; leave it out") -> BeforeValidator:
    """A known but unsupported field: absent, or one of the values that disable it."""

    def check(value: object) -> object:
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise PydanticCustomError("not_supported", "{advice}", {"advice": advice})
        return value

    return BeforeValidator(check)


def type_of(value: object) -> object:
    """What a union is told apart by, of JSON or of a model."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def text_or(lists: str, message: str) -> Discriminator:
    """Between a string, tagged <text>, and a list with the tag ``lists``."""

    def form(value: object) -> str | None:
        return "<text>" if isinstance(value, str) else lists if isinstance(value, list) else None

    return Discriminator(form, custom_error_type="form", custom_error_message=message)


Model = TypeVar("Model", bound=Strict)

_MAX_SHOWN_NAME = 100
_TAG = re.compile("<[a-z_ -]+>")
# Types of content parts of OpenAI's and vLLM's clients.
_MEDIA = {
    *("image_url", "image_pil", "image_embeds", "input_image", "audio_url", "input_audio", "audio_embeds"),
    *("video_url", "file", "input_file"),
}
AT_ONCE_BYTES = 64 * 2**10  # a longer body is parsed on a thread of the tenant's share
MAX_FAULTS = 10_000  # unknown or invalid fields of one body; the details of each take some microseconds
_CLOSE = {"connection": "close"}  # the rest of a body is not read, so its connection cannot be reused


class BodyReader:
    """Reads and parses bodies within limits on size, time, and the memory of all bodies being read, which tenants share."""

    def __init__(self, settings: ApiSettings, threads: ThreadShares) -> None:
        self._settings = settings
        self._threads = threads
        self.held = SharedLimit(settings.max_held_bytes)

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The validated fields of a call.

        Raises ApiError: 400, naming the field; 408 (too slow), 413 (too large), 429 (too many large ones); ClientGone.
        """
        tenant: Tenant = getattr(request.state, "tenant", NOBODY)
        self._check_headers(request)
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for part in request.stream():
                    self.held.hold(tenant.name, len(part))
                    body += part
                    self._check_size(len(body))
                    if self.held.is_exceeded(tenant.name, least=len(body)):
                        refusal = overloaded(
                            "too many large requests at once; try again later", self._settings.retry_after_s
                        )
                        refusal.headers.update(_CLOSE)
                        raise refusal
                is_strict = self._settings.unknown_fields == "refuse"
                if len(body) <= AT_ONCE_BYTES:
                    fields, ignored = parse_body(bytes(body), model, strict=is_strict)
                else:
                    # pydantic lets the event loop run whenever it calls Python, as for each part of a message; collections
                    # took three quarters of the time of 4 MiB of short parts.
                    work = without_collection()(parse_body)
                    parse = partial(asyncio.to_thread, work, bytes(body), model, strict=is_strict)
                    fields, ignored = await unless_disconnected(request.receive, self._threads.run(tenant.name, parse))
            request.state.unknown_fields = ignored
            request.state.fields_without_effect = tuple(fields.without_effect())
            request.state.body_len = len(body)
            return fields
        except TimeoutError as error:
            message = f"body: was not received and read within {self._settings.body_timeout_s:g} seconds"
            raise _unread(HTTPStatus.REQUEST_TIMEOUT, message, "timeout") from error
        except ClientDisconnect as error:
            raise ClientGone from error
        finally:
            self.held.give_back(tenant.name, len(body))

    def _check_headers(self, request: Request) -> None:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise bad_request("Content-Type", f"must be application/json, got {shorten(content_type)}")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal():
            self._check_size(int(declared[:20]))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._settings.max_request_bytes:
            message = f"body: must have at most {self._settings.max_request_bytes} bytes"
            raise _unread(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, "request_too_large")


def _unread(status: HTTPStatus, message: str, code: str) -> ApiError:
    return ApiError(status, message, param="body", code=code, headers=_CLOSE)


def parse_body(body: bytes, model: type[Model], *, strict: bool) -> tuple[Model, tuple[str, ...]]:
    """The fields of strict JSON (UTF-8, no NaN or Infinity, bounded nesting), and the paths of unknown fields, which
    ``strict`` refuses. Raises ApiError (400), naming the first wrong field.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request("body", f"is not valid UTF-8 at byte {error.start}") from error
    try:
        document = from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad_request("body", f"is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise bad_request("body", f"must be a JSON object, got {shorten(document)}")
    try:
        return model.model_validate(document), ()
    except ValidationError as error:
        if error.error_count() > MAX_FAULTS:
            raise bad_request("body", f"has more than {MAX_FAULTS} unknown or invalid fields") from None
        details = error.errors(include_url=False, include_context=True)
        known = [detail for detail in details if detail["type"] != "extra_forbidden"]
        if strict or known:
            raise field_error((details if strict else known)[0], model, document.get("model")) from error
    try:
        return model.model_validate(document, extra="ignore"), tuple(_path(detail) for detail in details)
    except ValidationError as error:  # of a check of a whole list, which did not run while a part had an unknown field
        raise field_error(error.errors(include_url=False, include_context=True)[0], model) from error


def _path(detail: ErrorDetails) -> str:
    """Without the tags of unions, such as <text>, which pydantic inserts, but never behind the name of an unknown field."""
    *above, last = map(str, detail["loc"] or ("",))
    parts = [part for part in above if not _TAG.fullmatch(part)]
    is_name = detail["type"] == "extra_forbidden" or not _TAG.fullmatch(last)
    return ".".join([*parts, last] if is_name else parts)[:_MAX_SHOWN_NAME]


def field_error(detail: ErrorDetails, model: type[Strict], served: object = None) -> ApiError:
    """``served``: the model that the call names, if any."""
    param, given = _path(detail), detail["input"]
    match detail["type"]:
        case "literal_error" if isinstance(given, str) and given in _MEDIA:
            name = shorten(served) if isinstance(served, str) else "this server's model"
            return bad_request(
                param, f"{given} parts are not supported: {name} is served as text alone", "unsupported_content"
            )
        case "extra_forbidden":
            hint = nearest(param, model.model_fields) if len(detail["loc"]) == 1 else ""
            return bad_request(param, f"unknown field{hint}", code="unknown_field")
        case "missing":
            return bad_request(param, "is required", code="missing_required_parameter")
        case _:
            message = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
            return bad_request(param, f"{message}, got {shorten(detail['input'])}")
