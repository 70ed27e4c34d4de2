"""Grammars of answers with tool calls, as xgrammar's structural tags."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.grammar import Grammar, GrammarKind
from deploy.api.errors import bad_request
from deploy.api.messages import Tool

Format = dict[str, Any]

# Text that `tool_parsers.Llama3JsonParser` does not take for a call: it begins neither with a brace nor with <|python_tag|>.
_NO_CALL = r"\s*([^{<\s][\s\S]*|<([^|][\s\S]*)?)?"


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """The grammar of one call's tools, in the model's form of calls.

    Args:
        form: name of the form (`tool_parsers`).
        with_args: Mistral's newer form, ``[TOOL_CALLS]name[ARGS]{...}``.
        marker_ids: markers that are special tokens.
        parallel: several calls are possible.
    """

    form: str
    with_args: bool
    marker_ids: Mapping[str, int]
    tools: Sequence[Tool]
    parallel: bool

    def calls(self, *, strict: bool = True) -> Format:
        """One call or more, and no other text.

        Args:
            strict: all arguments match their schemas, those of tools that are not strict included.
        """
        match self.form:
            case "hermes":
                tags = [
                    _tag(self._marker("<tool_call>"), self._named(tool, strict, "\n"), self._marker("</tool_call>"))
                    for tool in self.tools
                ]
                return self._separated(tags, "\n")
            case "mistral" if self.with_args:
                return self._separated([_tag(self._marker("[TOOL_CALLS]"), self._with_args(strict), "")], "")
            case "mistral":
                return _sequence(self._marked("[TOOL_CALLS]"), self._list(strict), _const("]"))
        return self._separated(self._objects(strict), "; ")

    def text_or_calls(self) -> Format:
        """Any text, with or without calls. Arguments of strict tools match their schemas, others are objects."""
        match self.form:
            case "hermes":
                content = _any_of([self._named(tool, tool.function.strict, "\n") for tool in self.tools])
                return self._triggered("<tool_call>", content, self._marker("</tool_call>"))
            case "mistral":
                content, end = (self._with_args(False), "") if self.with_args else (self._list(False), "]")
                return self._triggered("[TOOL_CALLS]", content, end)
        return _any_of([self.calls(strict=False), {"type": "regex", "pattern": _NO_CALL}])

    def _triggered(self, marker: str, content: Format, end: str | Format) -> Format:
        begin = self._marker(marker)
        kind = "triggered_tags" if isinstance(begin, str) else "token_triggered_tags"
        triggers = {"triggers": [begin]} if isinstance(begin, str) else {"trigger_tokens": [begin["token"]]}
        return {"type": kind, **triggers, "tags": [_tag(begin, content, end)], "stop_after_first": not self.parallel}

    def _separated(self, tags: Sequence[Format], separator: str) -> Format:
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": not self.parallel,
        }

    def _named(self, tool: Tool, strict: bool | None, around: str = "") -> Format:
        """``{"name": ..., "arguments": ...}``"""
        key = "parameters" if self.form == "llama3_json" else "arguments"
        head = f'{around}{{"name": {json.dumps(tool.function.name)}, "{key}": '
        return _sequence(_const(head), _arguments(tool, strict), _const(f"}}{around}"))

    def _objects(self, strict: bool) -> list[Format]:
        return [_tag("", self._named(tool, strict or tool.function.strict), "") for tool in self.tools]

    def _list(self, strict: bool) -> Format:
        return _sequence(_const(" ["), self._separated(self._objects(strict), ", "))

    def _with_args(self, strict: bool) -> Format:
        return _any_of(
            [
                _sequence(
                    _const(tool.function.name), self._marked("[ARGS]"), _arguments(tool, strict or tool.function.strict)
                )
                for tool in self.tools
            ]
        )

    def _marker(self, marker: str) -> str | Format:
        return marker_of(marker, self.marker_ids)

    def _marked(self, marker: str) -> Format:
        found = self._marker(marker)
        return _const(found) if isinstance(found, str) else found


def marker_of(marker: str, marker_ids: Mapping[str, int]) -> str | Format:
    """A marker as text, or as the special token that it is."""
    return {"type": "token", "token": marker_ids[marker]} if marker in marker_ids else marker


def _tag(begin: str | Format, content: Format, end: str | Format) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _any_of(elements: list[Format]) -> Format:
    return {"type": "or", "elements": elements}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _arguments(tool: Tool, strict: bool | None) -> Format:
    return _json(tool.function.arguments if strict else {"type": "object"})


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def format_of(field: str, grammar: Grammar) -> Format:
    """A grammar as a part of a structural tag. Raises ApiError: 400 naming ``field`` where the source is malformed."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json({"type": "object"})
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.source}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.source}
    try:
        source = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise bad_request(field, f"is not JSON: {error}") from error
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return _json(source)
    if not isinstance(source, dict) or not isinstance(source.get("format"), dict):
        raise bad_request(field, 'must be an object with a "format"')
    found: Format = source["format"]
    return found
