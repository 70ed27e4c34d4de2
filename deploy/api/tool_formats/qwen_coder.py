"""``<tool_call><function=name><parameter=city>Paris</parameter></function></tool_call>``, as Qwen3-Coder writes."""

from collections.abc import Sequence

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format
from deploy.api.messages import Tool
from deploy.api.tool_formats.element_grammar import ElementGrammar
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.heads import NAME, Head
from deploy.api.tool_formats.xml_call import Elements, XmlScanner

_ELEMENTS = Elements(
    head=Head.of("<function=", ("name", NAME), ">"),
    parameter=Head.of("<parameter=", ("key", r"[^<>\n]{1,128}"), ">"),
    value_end="</parameter>",
    end="</function>",
    on_lines=True,
)

_GRAMMAR = ElementGrammar(lambda key, _: f"<parameter={key}>", "</parameter>", "qwen_xml", on_lines=True)


class QwenCoder(CallForm):
    markers = ("<tool_call>", "</tool_call>")
    trigger = "<tool_call>"
    separator = "\n"

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return XmlScanner(tools, _ELEMENTS, "<tool_call>", "<function=", "</tool_call>")

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        head = f"<tool_call>\n<function={tool.function.name}>\n"
        return head, _GRAMMAR.arguments(tool, strict), "</function>\n</tool_call>"
