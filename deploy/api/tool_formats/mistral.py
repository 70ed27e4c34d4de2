"""``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, and from version 11 of the tokenizer on
``[TOOL_CALLS]name[ARGS]{...}``, as Mistral's models write."""

from collections.abc import Sequence

from deploy.api.answer_parts import Part, PartParser
from deploy.api.grammar_parts import Format, arguments
from deploy.api.messages import Tool
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.heads import NAME, Head
from deploy.api.tool_formats.hermes import ObjectScanner, named
from deploy.api.tool_formats.json_call import HeadedCall

_HEADS = (
    Head.of(("name", NAME)),
    Head.of(("name", NAME), "[ARGS]"),
    Head.of(("name", NAME), "[CALL_ID]", ("other_id", r"\w{1,64}"), "[ARGS]"),
)


class Mistral(CallForm):
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    trigger = "[TOOL_CALLS]"
    begin = "[TOOL_CALLS] ["
    separator = ", "
    end = "]"
    short_ids = True

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _MistralScanner("[TOOL_CALLS]", skipped="[],")

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return named(tool, strict, "arguments")


class Mistral11(Mistral):
    begin = separator = end = ""

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return f"[TOOL_CALLS]{tool.function.name}[ARGS]", arguments(tool, strict)


class _MistralScanner(ObjectScanner):
    """Reads both forms."""

    def _read_between(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip(" \t\r\n],")
        if rest.startswith(self.begin) and not self._opening:  # the next call of version 11
            self._take_skipped()
            self._open(self.begin, rest[len(self.begin) :])
            return True
        if rest and self.begin.startswith(rest):
            return False
        return super()._read_between(parts)

    def _read_other(self, rest: str, parts: list[Part]) -> bool:
        if not self._opening:
            return super()._read_other(rest, parts)
        self._begin_call(HeadedCall(self._num_calls, _HEADS))
        return True
