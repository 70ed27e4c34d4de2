"""Which structural tags can be enforced: the JSON schemas and patterns in them are checked as those that stand alone."""

import json
from collections.abc import Iterator
from typing import Any

from cluster.errors import InvalidField
from engine.grammar.schema_rules import MAX_DEPTH, check_schema, pattern_fault
from engine.grammar.string_rules import ebnf_of_strings, refuse_near

_MAX_SHOWN = 60


def checked_tag(source: str) -> tuple[str, frozenset[str]]:
    """The structural tag to compile, all of whose outputs match ``source``; and the names that its schemas require.

    Raises:
        InvalidField: it is not JSON, not a structural tag, or holds what cannot be enforced; says in which tag.
    """
    tag, names = _parsed(source), set[str]()
    for place, one in _formats(tag["format"], "", 0):
        if one.get("type") == "json_schema":
            try:
                names |= check_schema(one.get("json_schema"))
            except InvalidField as error:
                raise _refused(f"{place}{error.reason}") from error
        if one.get("type") == "regex":
            pattern = one.get("pattern")
            fault = pattern_fault(pattern) if isinstance(pattern, str) else "must have a pattern"
            if fault is not None:
                raise _refused(f"{place}{fault}")
    return json.dumps(tag, ensure_ascii=False), frozenset(names)


def with_string_rules(source: str) -> tuple[str, bool]:
    """A structural tag of ``checked_tag``, whose schemas are grammars where xgrammar's own would have wrong strings; and
    whether one counts the characters of strings. Raises as `string_rules.grammar_of_schema`."""
    tag, counts_chars = json.loads(source), False
    for place, one in _formats(tag["format"], "", 0):
        if one.get("type") != "json_schema":
            continue
        found = ebnf_of_strings(one["json_schema"], one.get("max_whitespace_cnt"), on_one_line=False)
        if found is None:
            continue
        if one.get("excludes") or one.get("any_order") or one.get("style", "json") != "json":
            raise _refused(f"{place}must have strings without bounds and patterns beside excludes, any_order and a style")
        one.clear()
        one.update(type="grammar", grammar=found[0])
        counts_chars = counts_chars or found[1]
    if counts_chars:
        refuse_near(source)
    return json.dumps(tag, ensure_ascii=False), counts_chars


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
