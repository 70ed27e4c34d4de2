"""``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``, as Kimi K2 writes."""

import re
from collections.abc import Sequence

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format, arguments, pattern
from deploy.api.messages import Tool
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.heads import NAME, Head, beginnings
from deploy.api.tool_formats.json_call import HeadedCall
from deploy.api.tool_formats.scanner import CallReader, Scanner

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
# The id names the function and counts the calls of the conversation; the template repeats it with the result.
_HEAD = Head(
    re.compile(
        rf"{re.escape(_CALL)}\s*(?P<id>(?:functions\.)?(?P<name>{NAME})(?::\d{{1,6}})?)\s*{re.escape(_ARGUMENTS)}", re.ASCII
    ),
    re.compile(beginnings(_CALL, rf"\s*(?:[\w.:-]{{1,274}}\s*{beginnings(_ARGUMENTS)})?"), re.ASCII),
)


class KimiK2(CallForm):
    markers = (_CALLS, _CALLS_END, _CALL, _ARGUMENTS, _CALL_END)
    trigger = begin = _CALLS
    end = _CALLS_END

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _KimiScanner(_CALLS, _CALL, _CALLS_END)

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        index = pattern("[0-9]{1,3}")
        return f"{_CALL}functions.{tool.function.name}:", index, _ARGUMENTS, arguments(tool, strict), _CALL_END


class _KimiScanner(Scanner):
    def __init__(self, begin: str, call_begin: str, end: str) -> None:
        super().__init__(begin, call_begin, end)
        self._ids: set[str] = set()

    def _new_call(self, index: int) -> CallReader:
        return HeadedCall(index, [_HEAD], _CALL_END, self._ids)
