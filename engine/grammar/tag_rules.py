"""Which structural tags can be enforced: the JSON schemas and patterns in them are checked as those that stand alone."""

import json
from collections.abc import Iterator
from typing import Any

from cluster.errors import InvalidField
from engine.grammar.json_pattern import repeats_fault, with_plain_codes
from engine.grammar.json_rules import NEAR, is_near, is_placed_in, rules_of, with_placeholders
from engine.grammar.schema_forms import MAX_DEPTH
from engine.grammar.schema_rules import checked_schema, pattern_fault

_MAX_SHOWN = 60


def checked_tag(source: str) -> tuple[str, frozenset[str], bool]:
    """The structural tag to compile, all of whose outputs match ``source``; the names that its schemas require; and whether
    it counts the characters of strings.

    Raises:
        InvalidField: it is not JSON, not a structural tag, or holds what cannot be enforced; says in which tag.
    """
    tag, names, counts_chars = _parsed(source), set[str](), False
    written = set[str | None]()  # grammars that are none of the caller's
    for place, one in list(_formats(tag["format"], "", 0)):
        try:
            if one.get("type") == "json_schema":
                schema, required = checked_schema(one.get("json_schema"))
                names |= required
                counts_chars = _write_rules(one, schema) or counts_chars
                written.add(one.get("grammar"))
        except InvalidField as error:
            raise _refused(f"{place}{error.reason}") from error
        if one.get("type") == "regex":
            pattern = one.get("pattern")
            if not isinstance(pattern, str):
                raise _refused(f"{place}must have a pattern")
            if (fault := pattern_fault(pattern)) is not None:
                raise _refused(f"{place}{fault}")
            one["pattern"] = with_plain_codes(pattern)
        elif one.get("type") == "grammar" and isinstance(rules := one.get("grammar"), str) and rules not in written:
            fault = repeats_fault(rules, is_regex=False)
            if fault is not None:
                raise _refused(f"{place}{fault}")
    if counts_chars and is_near(source):
        raise _refused(NEAR)
    return json.dumps(tag, ensure_ascii=False), frozenset(names), counts_chars


def _write_rules(one: dict[str, Any], schema: Any) -> bool:
    """Turns the format of a schema into that of a grammar: JSON on one line. Whether it counts the characters of strings."""
    for option in ("any_order", "excludes"):
        if one.get(option):
            raise _refused(f"{option} is not supported: what the schema requires would not be enforced")
    if one.get("style", "json") != "json":
        one["json_schema"] = schema
        if is_placed_in(json.dumps(schema)) or with_placeholders(schema) != schema:
            raise _refused(
                "strings with bounds or patterns, and additionalProperties beside properties, have the style json"
            )
        return False
    rules, counts_chars = rules_of(schema)
    one.clear()
    one |= {"type": "grammar", "grammar": rules}
    return counts_chars


def schemas_of(source: str) -> list[tuple[str, str]]:
    """The JSON schemas of a structural tag that `checked_tag` lets pass, each with its place."""
    formats = _formats(_parsed(source)["format"], "", 0)
    return [(place, json.dumps(one["json_schema"])) for place, one in formats if one.get("type") == "json_schema"]


def _parsed(source: str) -> dict[str, Any]:
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _refused(f"is not JSON: {error}") from error
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise _refused('must be an object with a "format"')
    return tag


def _formats(content: Any, place: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """All formats in one, each with the text before it, which tells whose it is."""
    if not isinstance(content, dict):
        raise _refused(f"{place}must have objects as formats")
    if depth > MAX_DEPTH:
        raise _refused(f"lies deeper than {MAX_DEPTH} levels")
    yield place, content
    place = _after(content.get("begin"), place)
    inner = [content[key] for key in ("content",) if key in content]
    for key in ("elements", "tags", "rules"):
        several = content.get(key, [])
        if not isinstance(several, list):
            raise _refused(f"{place}{key} must be a list")
        inner += [one[-1] if key == "rules" and isinstance(one, list) and one else one for one in several]
    for one in inner:
        yield from _formats(one, place, depth + 1)
        if isinstance(one, dict) and one.get("type") == "const_string":
            place = _after(one.get("value"), place)


def _after(text: Any, place: str) -> str:
    return f"after {text[-_MAX_SHOWN:]!r} " if isinstance(text, str) and text else place


def _refused(reason: str) -> InvalidField:
    return InvalidField("structural_tag", "", reason)
