"""Parts of xgrammar's structural tags, of which grammars of answers are made."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import from_json

from cluster.sampling_params import Grammar, GrammarKind
from deploy.api.errors import bad_request
from deploy.api.messages import Tool

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
