"""Structured output: the grammar that a call asks for, in any of the fields of OpenAI and vLLM."""

import json
from collections.abc import Iterator
from typing import Any

from cluster.errors import InvalidField
from cluster.sampling_params import Grammar, GrammarKind
from deploy.api.errors import bad_request
from deploy.api.schema import GenerationFields, ResponseFormat, StructuredOutputs

# How GBNF writes the characters that a quoted string cannot hold as they are.
_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', **{code: f"\\x{code:02X}" for code in (*range(32), 127)}}


def grammar_of(fields: GenerationFields) -> tuple[str, Grammar] | None:
    """The grammar of a call, and the path of the field that asks for it. None: any text.

    Raises:
        ApiError: 400 for two grammars at once, or one that is too long.
    """
    found = list(_asked(fields))
    if len(found) > 1:
        raise bad_request(found[1][0], f"contradicts {found[0][0]}; give one of them")
    if not found:
        return None
    field, kind, source = found[0]
    if fields.allowed_token_ids is not None:
        raise bad_request("allowed_token_ids", f"is not possible together with {field}")
    return field, grammar_named(field, kind, source)


def grammar_named(field: str, kind: GrammarKind, source: str) -> Grammar:
    """Raises ApiError: 400 naming ``field``, for a source that is too long."""
    try:
        return Grammar(kind, source)
    except InvalidField as error:
        raise bad_request(field, f"{error.reason}, got {error.value}") from error


def _asked(fields: GenerationFields) -> Iterator[tuple[str, GrammarKind, str]]:
    """The path, kind and source of each grammar that is given."""
    structured = fields.structured_outputs
    if (form := fields.response_format) is not None:
        yield from _of_response_format(form)
    if structured is not None:
        found = list(_of_fields("structured_outputs.", structured))
        if not found:
            raise bad_request("structured_outputs", f"must have one of {', '.join(_KINDS)}")
        yield from found
    yield from _of_fields("guided_", fields)


def _of_response_format(form: ResponseFormat) -> Iterator[tuple[str, GrammarKind, str]]:
    if form.type == "json_object":
        yield "response_format", GrammarKind.JSON_OBJECT, ""
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise bad_request("response_format.json_schema.schema", "is missing")
        yield "response_format.json_schema.schema", GrammarKind.JSON_SCHEMA, _source(form.json_schema.schema_)
    if form.type == "structural_tag":
        if form.format is None:
            raise bad_request("response_format.format", "is missing")
        tag = {"type": "structural_tag", "format": form.format}
        yield "response_format.format", GrammarKind.STRUCTURAL_TAG, _source(tag)


def _of_fields(prefix: str, fields: GenerationFields | StructuredOutputs) -> Iterator[tuple[str, GrammarKind, str]]:
    for name, kind in _KINDS.items():
        attribute = f"guided_{name}" if isinstance(fields, GenerationFields) else "json_" if name == "json" else name
        value = getattr(fields, attribute, None)
        if value is not None and value is not False:
            yield f"{prefix}{name}", kind, "" if value is True else _source(value)


def _source(value: Any) -> str:
    """Of a schema, or of a list of choices."""
    if isinstance(value, list):
        return "root ::= " + " | ".join(f'"{choice.translate(_ESCAPES)}"' for choice in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "json_object": GrammarKind.JSON_OBJECT,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.EBNF,
    "grammar": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
