"""What all request bodies share: strict models, and fields that are known but not supported."""

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    """Takes no value of another type, and no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def only(*allowed: object, advice: str = "is not supported yet; leave it out") -> BeforeValidator:
    """A known but unsupported field: absent, or one of the values that disable it."""

    def check(value: object) -> object:
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise PydanticCustomError("not_supported", "{advice}", {"advice": advice})
        return value

    return BeforeValidator(check)


def text_or(lists: str, message: str) -> Discriminator:
    """Between a string, tagged <text>, and a list with the tag ``lists``."""

    def form(value: object) -> str | None:
        return "<text>" if isinstance(value, str) else lists if isinstance(value, list) else None

    return Discriminator(form, custom_error_type="form", custom_error_message=message)
