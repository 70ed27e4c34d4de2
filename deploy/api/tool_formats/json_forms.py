"""Forms with arguments as JSON: in an object beside the name, or after it."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deploy.api.answer_parts import Part, PartParser
from deploy.api.grammar_parts import Format, arguments, pattern
from deploy.api.messages import Tool
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.heads import Head
from deploy.api.tool_formats.json_call import HeadedCall, ObjectCall
from deploy.api.tool_formats.scanner import CallReader, LeadingScanner, Scanner


@dataclass(frozen=True, kw_only=True)
class ObjectForm(CallForm):
    """``{"name": ..., "arguments": {...}}``, each between ``call_begin`` and ``call_end``."""

    key: str = "arguments"
    call_begin: str = ""
    call_end: str = ""

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _ObjectScanner(self.trigger, end=self.call_end.strip(), skipped="[],")

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        head = f'{self.call_begin}{{"name": {json.dumps(tool.function.name)}, "{self.key}": '
        return head, arguments(tool, strict), f"}}{self.call_end}"


class _ObjectScanner(Scanner):
    """A call of an unknown tool is a call: the caller sees which."""

    def _new_call(self, index: int) -> CallReader:
        return ObjectCall(index)


class LlamaForm(ObjectForm):
    """The whole answer is calls. One that begins with JSON may be none: only known tools, with parameters, are called."""

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _LlamaScanner([tool.function.name for tool in tools])


class _LlamaScanner(LeadingScanner):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__("<|python_tag|>", "{", "{", "", skipped=";", keeps_first=True)
        self._names = names

    def _new_call(self, index: int) -> CallReader:
        return ObjectCall(index, self._names or None, needs_arguments=True)


class MistralForm(ObjectForm):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``. Its parser reads the later form, too."""

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _MistralScanner(self.trigger, skipped="[],")


class Mistral11Form(MistralForm):
    """``[TOOL_CALLS]name[ARGS]{...}``, from version 11 of the tokenizer on."""

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return f"{self.trigger}{tool.function.name}[ARGS]", arguments(tool, strict)


class _MistralScanner(_ObjectScanner):
    heads = tuple(map(Head.of, ("{name}", "{name}[ARGS]", "{name}[CALL_ID]{other_id}[ARGS]")))

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
        self._begin_call(HeadedCall(self._num_calls, self.heads))
        return True


@dataclass(frozen=True, kw_only=True)
class HeadedForm(CallForm):
    """The arguments stand between ``head`` and ``tail``."""

    head: Head
    tail: str

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _HeadedScanner(self)

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        # An id names the function and counts the calls of the conversation; the template repeats it with the result.
        first, *others = self.head.written(name=tool.function.name).split("{id}")
        counted = [part for other in others for part in (f"functions.{tool.function.name}:", pattern("[0-9]{1,3}"), other)]
        return first, *counted, arguments(tool, strict), self.tail


class _HeadedScanner(Scanner):
    def __init__(self, form: HeadedForm) -> None:
        super().__init__(form.trigger, form.head.template.partition("{")[0], form.end)
        self._form = form
        self._ids: set[str] = set()

    def _new_call(self, index: int) -> CallReader:
        return HeadedCall(index, [self._form.head], self._form.tail.strip(), self._ids)


HERMES = ObjectForm(
    markers=("<tool_call>", "</tool_call>"),
    trigger="<tool_call>",
    separator="\n",
    call_begin="<tool_call>\n",
    call_end="\n</tool_call>",
)
GRANITE = ObjectForm(markers=("<|tool_call|>",), trigger="<|tool_call|>", begin="<|tool_call|>[", separator=", ", end="]")
LLAMA3_JSON = LlamaForm(
    markers=("<|python_tag|>",),
    separator="; ",
    no_call=r"\s*([^{<\s][\s\S]*|<([^|][\s\S]*)?)?",  # begins neither with a brace nor with <|python_tag|>
    key="parameters",
)
_MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL = MistralForm(
    markers=_MISTRAL_MARKERS, trigger="[TOOL_CALLS]", begin="[TOOL_CALLS] [", separator=", ", end="]", short_ids=True
)
MISTRAL_11 = Mistral11Form(markers=_MISTRAL_MARKERS, trigger="[TOOL_CALLS]", short_ids=True)


def _section(calls: tuple[str, str], head: str, tail: str, *inner: str, separator: str = "") -> HeadedForm:
    """Calls between two markers. ``inner``: markers of a call."""
    begin, end = calls
    return HeadedForm(
        markers=(*calls, *inner), trigger=begin, begin=begin, end=end, separator=separator, head=Head.of(head), tail=tail
    )


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL, _SEPARATOR, _CALL_END = _IN_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_V3 = _section(
    _DEEPSEEK,
    f"{_CALL}function{_SEPARATOR}{{name}}\n```json\n",
    f"\n```{_CALL_END}",
    *_IN_CALL,
    separator="\n",
)
DEEPSEEK_V31 = _section(_DEEPSEEK, f"{_CALL}{{name}}{_SEPARATOR}", _CALL_END, *_IN_CALL)
KIMI_K2 = _section(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>{id}<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
