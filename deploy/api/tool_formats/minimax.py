"""``<minimax:tool_call><invoke name="..."><parameter name="city">Paris</parameter></invoke></minimax:tool_call>``, as
MiniMax M2 writes."""

from collections.abc import Sequence

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format
from deploy.api.messages import Tool
from deploy.api.tool_formats.element_grammar import ElementGrammar
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.heads import NAME, Head
from deploy.api.tool_formats.xml_call import Elements, XmlScanner

_CALLS, _CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
_ELEMENTS = Elements(
    head=Head.of('<invoke name="', ("name", NAME), '">'),
    parameter=Head.of('<parameter name="', ("key", r'[^"<>\n]{1,128}'), '">'),
    value_end="</parameter>",
    end="</invoke>",
)

_GRAMMAR = ElementGrammar(lambda key, _: f'<parameter name="{key}">', "</parameter>", "minimax_xml")


class MiniMaxM2(CallForm):
    markers = (_CALLS, _CALLS_END)
    trigger = _CALLS
    begin = f"{_CALLS}\n"
    separator = "\n"
    end = f"\n{_CALLS_END}"

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return XmlScanner(tools, _ELEMENTS, _CALLS, "<invoke", _CALLS_END)

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        head = f'<invoke name="{tool.function.name}">\n'
        return head, _GRAMMAR.arguments(tool, strict), "</invoke>"
