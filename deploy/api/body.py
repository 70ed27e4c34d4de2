"""From the bytes of a request to a checked object, or to an error that names the field."""

import asyncio
from http import HTTPStatus
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect

from deploy.api.errors import ApiError, ClientGone, bad_request, nearest, shorten
from deploy.api.schema import FORM_TAGS
from deploy.api.settings import ApiSettings

Model = TypeVar("Model", bound=BaseModel)

_MAX_SHOWN_NAME = 100


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """The whole body, within the limits of size and time; the size is checked while reading.

    Raises:
        ApiError: 400 (not JSON by its content type), 408 (too slow), 413 (too large).
        ClientGone: the caller hung up.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise bad_request("Content-Type", f"must be application/json, got {shorten(content_type)}")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > settings.max_request_bytes:
        raise _too_large(settings)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > settings.max_request_bytes:
                    raise _too_large(settings)
    except TimeoutError as error:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"body: was not complete within {settings.body_timeout_s:g} seconds",
            param="body",
            code="timeout",
            headers={"connection": "close"},
        ) from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


def parse_body(body: bytes, model: type[Model]) -> Model:
    """Strict JSON (UTF-8, no NaN, no Infinity, nesting bounded), then the fields.

    Raises:
        ApiError: 400, naming the field; the first of them where several are wrong.
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
        return model.model_validate(document)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
        raise _field_error(details[0], model) from error


def _field_error(detail: ErrorDetails, model: type[BaseModel]) -> ApiError:
    path = [str(part) for part in detail["loc"] if part not in FORM_TAGS]
    param = ".".join(path)[:_MAX_SHOWN_NAME]
    match detail["type"]:
        case "extra_forbidden":
            hint = nearest(path[-1], model.model_fields) if len(path) == 1 else ""
            return bad_request(param, f"unknown field{hint}", code="unknown_field")
        case "missing":
            return bad_request(param, "is required", code="missing_required_parameter")
        case _:
            message = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
            return bad_request(param, f"{message}, got {shorten(detail['input'])}")


def _too_large(settings: ApiSettings) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"body: must have at most {settings.max_request_bytes} bytes",
        param="body",
        code="request_too_large",
        headers={"connection": "close"},
    )
