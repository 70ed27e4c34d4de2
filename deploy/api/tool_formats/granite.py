"""``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``, as Granite 3 writes."""

from collections.abc import Sequence

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format
from deploy.api.messages import Tool
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.hermes import ObjectScanner, named


class Granite(CallForm):
    markers = ("<|tool_call|>",)
    trigger = "<|tool_call|>"
    begin = "<|tool_call|>["
    separator = ", "
    end = "]"

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return ObjectScanner(self.trigger, skipped="[],")

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return named(tool, strict, "arguments")
