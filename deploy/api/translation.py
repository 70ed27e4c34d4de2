"""Calls of other APIs as chat calls, and the errors of those under the names that the caller wrote."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pydantic import ValidationError

from cluster.errors import InvalidField
from deploy.api.body import field_error
from deploy.api.errors import ApiError, as_api_error, bad_request
from deploy.api.fields import TranslatedRequest
from deploy.api.schema import ChatRequest


def as_chat(fields: TranslatedRequest) -> ChatRequest:
    """Raises ApiError (400), naming the field of the chat: of what only the chat checks, such as tools of one name."""
    try:
        return ChatRequest.model_validate(fields.chat_fields())
    except ValidationError as error:
        raise field_error(error.errors(include_url=False)[0], ChatRequest) from error


@contextmanager
def own_names(fields: TranslatedRequest) -> Iterator[None]:
    """Errors of the chat call name the fields of the translated one."""
    try:
        yield
    except (ApiError, InvalidField) as error:
        known = as_api_error(error, retry_after_s=0.0)
        assert known is not None, "both are expected failures"
        raise _renamed(known, fields.own_names) from error


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Several items of the body may be one message of the chat, so what is below ``messages`` is left out."""
    param = error.param or ""
    for name, own in names.items():
        if param == name or param.startswith(f"{name}."):
            own = own if name == "messages" else own + param.removeprefix(name)
            return bad_request(own, str(error).removeprefix(f"{param}: "), error.code)
    return error
