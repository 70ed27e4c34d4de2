"""Structured output: the grammar that a call asks for, in any of the fields of OpenAI and vLLM, and the parts of xgrammar's
structural tags, of which grammars of answers are made."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from cluster.errors import InvalidField
from cluster.sampling_params import Grammar, GrammarKind
from deploy.api.errors import bad_request
from deploy.api.messages import Tool
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


Format = dict[str, Any]

ANY_TEXT: Format = {"type": "any_text"}


def sequence(elements: Iterable[Format]) -> Format:
    found = list(elements)
    return found[0] if len(found) == 1 else {"type": "sequence", "elements": found}


def any_of(elements: Iterable[Format]) -> Format:
    found = list(elements)
    return found[0] if len(found) == 1 else {"type": "or", "elements": found}


def tag(begin: str | Format, content: Format, end: str | list[str] | Format) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def pattern(source: str) -> Format:
    return {"type": "regex", "pattern": source}


def marker_of(marker: str, marker_ids: Mapping[str, int]) -> str | Format:
    """A marker as text, or as the special token that it is."""
    return {"type": "token", "token": marker_ids[marker]} if marker in marker_ids else marker


def spelled(pieces: Iterable[str | Format], marker_ids: Mapping[str, int]) -> list[Format]:
    """Formats as they are, and text as constant strings and the special tokens in it."""
    longest_first = sorted(marker_ids, key=len, reverse=True)
    borders = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if marker_ids else re.compile("($^)")
    found: list[Format] = []
    for piece in pieces:
        if not isinstance(piece, str):
            found.append(piece)
            continue
        for text in filter(None, borders.split(piece)):
            marker = marker_of(text, marker_ids)
            found.append({"type": "const_string", "value": marker} if isinstance(marker, str) else marker)
    return found


def arguments(tool: Tool, strict: bool | None) -> Format:
    """The arguments as JSON. ``strict``: they match the schema."""
    return json_format(tool.function.arguments if strict else {"type": "object"})


def json_format(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def format_of(field: str, grammar: Grammar) -> Format:
    """A grammar as a part of a structural tag. Raises ApiError: 400 naming ``field`` where the source is malformed."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return json_format({"type": "object"})
        case GrammarKind.REGEX:
            return pattern(grammar.source)
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.source}
    try:
        source = from_json(grammar.source)
    except ValueError as error:
        raise bad_request(field, f"is not JSON: {error}") from error
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return json_format(source)
    if not isinstance(source, dict) or not isinstance(source.get("format"), dict):
        raise bad_request(field, 'must be an object with a "format"')
    found: Format = source["format"]
    return found
