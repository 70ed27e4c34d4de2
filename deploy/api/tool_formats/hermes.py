"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen and SmolLM2 write; lists, too."""

import json
from collections.abc import Sequence

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format, arguments
from deploy.api.messages import Tool
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.json_call import ObjectCall
from deploy.api.tool_formats.scanner import CallReader, Scanner


class ObjectScanner(Scanner):
    """A call of an unknown tool is a call: the caller sees which."""

    def _new_call(self, index: int) -> CallReader:
        return ObjectCall(index)


class Hermes(CallForm):
    markers = ("<tool_call>", "</tool_call>")
    trigger = "<tool_call>"
    separator = "\n"

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return ObjectScanner("<tool_call>", end="</tool_call>", skipped="[],")

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return "<tool_call>\n", *named(tool, strict, "arguments"), "\n</tool_call>"


def named(tool: Tool, strict: bool | None, key: str) -> tuple[str, Format, str]:
    """``{"name": ..., "arguments": ...}``"""
    return f'{{"name": {json.dumps(tool.function.name)}, "{key}": ', arguments(tool, strict), "}"
