"""What all request bodies share: strict models, fields that are refused, and fields that are taken without effect."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator
from pydantic_core import PydanticCustomError


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
