"""Forms with an element for each argument: GLM, Qwen3-Coder, MiniMax, and DeepSeek from V3.2 on."""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format
from deploy.api.messages import Tool
from deploy.api.tool_formats.element_grammar import ElementGrammar
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.heads import Head
from deploy.api.tool_formats.xml_call import Elements, XmlScanner


@dataclass(frozen=True, kw_only=True)
class ElementForm(CallForm):
    """``call_begin`` and ``call_end`` are written around each call; the calls between ``trigger`` and ``last`` are read."""

    elements: Elements
    call_begin: str = ""
    call_end: str = ""
    last: str = ""
    separator: str = "\n"

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return XmlScanner(tools, self.elements, self.trigger, self.last)

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        head = f"{self.call_begin}{self.elements.head.written(name=tool.function.name)}"
        arguments = ElementGrammar(self.elements, tool, strict=bool(strict)).arguments()
        return head, arguments, f"{self.elements.end}{self.call_end}"


# <tool_call>name<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>
GLM = ElementForm(
    markers=("<tool_call>", "</tool_call>"),
    inner_markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    trigger="<tool_call>",
    call_begin="<tool_call>",
    elements=Elements(
        # What follows decides whether a word after the marker is a name.
        head=Head.of("{name}\n", before=("<arg_key>", "</tool_call>")),
        parameter=Head.of("<arg_key>{key}</arg_key>\n<arg_value>"),
        value_end="</arg_value>",
        end="</tool_call>",
    ),
)

# <tool_call><function=name><parameter=city>Paris</parameter></function></tool_call>
QWEN_CODER = ElementForm(
    markers=("<tool_call>", "</tool_call>"),
    trigger="<tool_call>",
    last="</tool_call>",
    call_begin="<tool_call>\n",
    call_end="\n</tool_call>",
    elements=Elements(
        head=Head.of("<function={name}>\n"),
        parameter=Head.of("<parameter={key}>"),
        value_end="</parameter>",
        end="</function>",
        on_lines=True,
    ),
)


def _invocations(section: str, mark: str = "", is_string: str = "", markers: tuple[str, ...] = ()) -> ElementForm:
    """``<invoke name="..."><parameter name="city">Paris</parameter></invoke>`` within the element ``section``.

    Args:
        mark: before the names of the elements within.
        is_string: the attribute of a parameter that says whether it is a string.
    """
    return ElementForm(
        markers=markers,
        inner_markers=(mark,) if mark else (),
        trigger=f"<{section}>",
        begin=f"<{section}>\n",
        end=f"\n</{section}>",
        last=f"</{section}>",
        elements=Elements(
            head=Head.of(f'<{mark}invoke name="{{name}}">\n'),
            parameter=Head.of(f'<{mark}parameter name="{{key}}"{is_string}>'),
            value_end=f"</{mark}parameter>",
            end=f"</{mark}invoke>",
        ),
    )


MINIMAX_M2 = _invocations("minimax:tool_call", markers=("<minimax:tool_call>", "</minimax:tool_call>"))
_DSML = "｜DSML｜"
DEEPSEEK_V32, DEEPSEEK_V4 = (
    _invocations(f"{_DSML}{section}", _DSML, ' string="{is_string}"') for section in ("function_calls", "tool_calls")
)
