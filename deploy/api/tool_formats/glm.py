"""``<tool_call>name<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>``, as GLM-4.5 and later write."""

import re
from collections.abc import Sequence

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format
from deploy.api.messages import Tool
from deploy.api.tool_formats.element_grammar import ElementGrammar
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.heads import NAME, Head, beginnings
from deploy.api.tool_formats.xml_call import Elements, XmlScanner

_CALL, _CALL_END, _KEY = "<tool_call>", "</tool_call>", "<arg_key>"
_ELEMENTS = Elements(
    # What follows decides whether a word after the marker is a name.
    head=Head(
        re.compile(rf"\s*(?P<name>{NAME})\s*(?={_KEY}|{_CALL_END})", re.ASCII),
        re.compile(rf"\s*(?:{NAME}\s*(?:{beginnings(_KEY)}|{beginnings(_CALL_END)}))?", re.ASCII),
    ),
    parameter=Head(
        re.compile(r"<arg_key>(?P<key>[^<>\n]{1,128})</arg_key>\s*<arg_value>"),
        re.compile(
            beginnings(_KEY, r"(?:[^<>\n]{1,128}" + beginnings("</arg_key>", r"\s*" + beginnings("<arg_value>")) + ")?")
        ),
    ),
    value_end="</arg_value>",
    end=_CALL_END,
)

_GRAMMAR = ElementGrammar(lambda key, _: f"{_KEY}{key}</arg_key>\n<arg_value>", "</arg_value>", "glm_xml")


class Glm(CallForm):
    markers = (_CALL, _CALL_END)
    inner_markers = (_KEY, "</arg_key>", "<arg_value>", "</arg_value>")
    trigger = _CALL
    separator = "\n"

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return XmlScanner(tools, _ELEMENTS, _CALL, "", is_section=False)

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return f"{_CALL}{tool.function.name}\n", _GRAMMAR.arguments(tool, strict), _CALL_END
