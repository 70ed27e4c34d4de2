"""The whole answer is ``{"name": ..., "parameters": {...}}``, several separated by ";", as Llama 3 writes."""

from collections.abc import Collection, Sequence

from deploy.api.answer_parts import Part, PartParser, Text
from deploy.api.grammar_parts import Format
from deploy.api.messages import Tool
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.hermes import named
from deploy.api.tool_formats.json_call import ObjectCall
from deploy.api.tool_formats.scanner import CallReader, Scanner


class Llama3Json(CallForm):
    """An answer that begins with JSON may be no call: only calls of known tools, with parameters, count."""

    markers = ("<|python_tag|>",)
    separator = "; "
    no_call = r"\s*([^{<\s][\s\S]*|<([^|][\s\S]*)?)?"  # begins neither with a brace nor with <|python_tag|>

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _Llama3Scanner([tool.function.name for tool in tools])

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return named(tool, strict, "parameters")


class LeadingScanner(Scanner):
    """Calls stand at the begin of an answer alone.

    Args:
        first: how they begin, which belongs to the first call if ``keeps_first``.
        begin: marker that may stand before.
    """

    def __init__(self, begin: str, first: str, call_begin: str, end: str, *, skipped: str, keeps_first: bool) -> None:
        super().__init__(begin, call_begin, end, skipped=skipped)
        self._first = first
        self._keeps_first = keeps_first
        self._begins = True

    def _read_text(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        marked = rest.removeprefix(self.begin).lstrip() if rest.startswith(self.begin) else rest
        if not self._begins:
            if self._held and not (self._num_calls and self._held.isspace()):
                parts.append(Text(self._held))
                self._held = ""
            return False
        if marked.startswith(self._first):
            self._begins = False
            kept = marked if self._keeps_first else marked[len(self._first) :]
            self._open(self._held[: len(self._held) - len(kept)], kept)
            return True
        if not marked or (marked is rest and self.begin.startswith(rest)):
            return False
        self._begins = False
        return True


class _Llama3Scanner(LeadingScanner):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__("<|python_tag|>", "{", "{", "", skipped=";", keeps_first=True)
        self._names = names

    def _new_call(self, index: int) -> CallReader:
        return ObjectCall(index, self._names or None, needs_arguments=True)
