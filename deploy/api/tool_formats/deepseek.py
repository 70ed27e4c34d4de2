"""DeepSeek's forms: V3 and R1 with arguments in a block of code, V3.1 with bare JSON, V3.2 and V4 with elements."""

from collections.abc import Sequence

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format, arguments
from deploy.api.messages import Tool
from deploy.api.tool_formats.element_grammar import ElementGrammar
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.heads import NAME, Head
from deploy.api.tool_formats.json_call import HeadedCall
from deploy.api.tool_formats.scanner import CallReader, Scanner
from deploy.api.tool_formats.xml_call import Elements, XmlScanner

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DSML = "｜DSML｜"


class DeepSeekV31(CallForm):
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` between markers of all calls."""

    markers = (_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END)
    trigger = begin = _CALLS
    end = _CALLS_END
    head = Head.of(_CALL, ("name", NAME), _SEPARATOR)
    call_end = _CALL_END

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _DeepSeekScanner(self.head, self.call_end)

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return f"{_CALL}{tool.function.name}{_SEPARATOR}", arguments(tool, strict), _CALL_END


class DeepSeekV3(DeepSeekV31):
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, and the arguments in a block of code."""

    separator = "\n"
    head = Head.of(_CALL, "function", _SEPARATOR, ("name", NAME), "\n```json")
    call_end = "```" + _CALL_END

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        head = f"{_CALL}function{_SEPARATOR}{tool.function.name}\n```json\n"
        return head, arguments(tool, strict), f"\n```{_CALL_END}"


class _DeepSeekScanner(Scanner):
    def __init__(self, head: Head, call_end: str) -> None:
        super().__init__(_CALLS, _CALL, _CALLS_END)
        self._head = head
        self._call_end = call_end

    def _new_call(self, index: int) -> CallReader:
        return HeadedCall(index, [self._head], self._call_end)


def _written(key: str, is_string: bool) -> str:
    return f'<{_DSML}parameter name="{key}" string="{str(is_string).lower()}">'


_GRAMMAR = ElementGrammar(_written, f"</{_DSML}parameter>", "deepseek_xml")


class DeepSeekElements(CallForm):
    """``<｜DSML｜invoke name="...">`` with an element for each argument, which says whether it is a string."""

    inner_markers = (_DSML,)
    elements = Elements(
        head=Head.of(f'<{_DSML}invoke name="', ("name", NAME), '">'),
        parameter=Head.of(
            f'<{_DSML}parameter name="', ("key", r'[^"<>\n]{1,128}'), '" string="', ("is_string", "[a-z]{1,5}"), '">'
        ),
        value_end=f"</{_DSML}parameter>",
        end=f"</{_DSML}invoke>",
    )

    def __init__(self, section: str) -> None:
        """``section``: name of the element around all calls."""
        self.trigger = f"<{_DSML}{section}>"
        self.begin = f"{self.trigger}\n"
        self.separator = "\n"
        self.end = f"\n</{_DSML}{section}>"

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return XmlScanner(tools, self.elements, self.trigger, f"<{_DSML}invoke", self.end.strip())

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        head = f'<{_DSML}invoke name="{tool.function.name}">\n'
        return head, _GRAMMAR.arguments(tool, strict), f"</{_DSML}invoke>"
