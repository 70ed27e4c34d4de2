"""Calls as Python: ``[get_weather(city="Paris")]`` (Llama 3.2 and 4, Gemma 3), or in a block (Gemma 3, OLMo 3)."""

import json
import re
from collections.abc import Collection, Sequence

from cluster.grammar import MAX_GRAMMAR_CHARS
from deploy.api.answer_parts import Arguments, CallStart, PartParser
from deploy.api.grammar_parts import Format, any_of, arguments, json_format, sequence, spelled
from deploy.api.messages import Tool
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.parameters import Parameters
from deploy.api.tool_formats.python_text import NAME, TOKEN, json_of_arguments
from deploy.api.tool_formats.scanner import CallReader, LeadingScanner, Scanner

_QUOTES = "\"'"


class PythonCall(CallReader):
    """Read as a whole: until its end, a text may turn out to be another expression. Only known tools are called."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        super().__init__(index)
        self._names = names
        self._name: str | None = None
        self._at = 0  # of ``raw``, how far it is read
        self._depth = 1
        self._tokens: list[re.Match[str]] = []
        self._awaits = ""  # the quote that ends the string at ``_at``

    def feed(self, text: str) -> str:
        self.raw += text
        if self._awaits and self._awaits not in text and "\\" not in text:
            return ""
        self._awaits = ""
        if self._name is None:
            self._read_name()
        while self._name is not None and not self.done and self._read_token():
            pass
        if not self.done:
            return ""
        rest = self.raw[self._at :]
        self.raw = "" if self.started else self.raw[: self._at]
        return rest

    def _read_name(self) -> None:
        name, bracket, _ = self.raw.partition("(")
        if bracket and name in self._names:
            self._name, self._at = name, len(name) + 1
        elif bracket or not any(known.startswith(name) for known in self._names):
            self.done, self._at = True, len(self.raw)

    def _read_token(self) -> bool:
        while self._at < len(self.raw) and self.raw[self._at].isspace():
            self._at += 1
        if self._at == len(self.raw):
            return False
        found = TOKEN.match(self.raw, self._at)
        if found is None:
            return self._wait_or_give_up()
        self._depth += (found[0] in "([{") - (found[0] in ")]}")
        self._at = found.end()
        if self._depth:
            self._tokens.append(found)
            return True
        self.done = True
        written = json_of_arguments(self._tokens) if found[0] == ")" else None
        if written is not None and self._name is not None:
            self.started = True
            self.parts += [CallStart(self.index, self._name), Arguments(self.index, written)]
        return False

    def _wait_or_give_up(self) -> bool:
        rest = self.raw[self._at :]
        if rest[0] in _QUOTES:
            self._awaits = rest[0] if len(rest) > 2 else ""
        elif rest != "*" and not re.fullmatch(r"[\w.+-]+", rest):
            self.done, self._at = True, len(self.raw)
        return False


class _ListScanner(LeadingScanner):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__("<|python_start|>", "[", "", "]", skipped=",", keeps_first=False)
        self._names = names

    def _new_call(self, index: int) -> CallReader:
        return PythonCall(index, self._names)


class _BlockScanner(Scanner):
    def __init__(self, begin: str, end: str, names: Collection[str]) -> None:
        super().__init__(begin, "", end, skipped="[],;")
        self._names = names

    def _new_call(self, index: int) -> CallReader:
        return PythonCall(index, self._names)


class PythonForm(CallForm):
    """The whole answer is a list of calls; with a trigger, calls stand on lines between two markers."""

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        names = [tool.function.name for tool in tools]
        return _BlockScanner(self.trigger, self.end.strip(), names) if self.trigger else _ListScanner(names)

    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        return f"{tool.function.name}(", _python_arguments(tool, strict), ")"


def _block(begin: str, end: str) -> PythonForm:
    return PythonForm(markers=(begin, end), trigger=begin, begin=f"{begin}\n", separator="\n", end=f"\n{end}")


PYTHONIC = PythonForm(
    markers=("<|python_start|>", "<|python_end|>"),
    begin="[",
    separator=", ",
    end="]",
    no_call=r"\s*([^\[<\s][\s\S]*|<([^|][\s\S]*)?)?",  # begins neither with a bracket nor with <|python_start|>
)
GEMMA3, OLMO3 = _block("```tool_code", "```"), _block("<function_calls>", "</function_calls>")


def _python_arguments(tool: Tool, strict: bool | None) -> Format:
    """``a=1, b=2``, the required ones first. Where the schema is more than a list of properties, ``**{"a": 1, "b": 2}``."""
    whole = sequence(spelled(["**", arguments(tool, strict)], {}))
    known = Parameters(tool.function.arguments)
    names = list(dict.fromkeys([*known.required, *known.properties]))
    if not strict or not known.is_listed or not all(map(NAME.fullmatch, names)):
        return whole
    if not names:
        empty: Format = {"type": "const_string", "value": ""}
        return any_of([whole, empty] if known.others is not False else [empty])
    num_required = len(set(known.required))
    num_copies, num_chars, parts = 1 if num_required else len(names) // 2 + 1, 0, []
    for name in names:
        parts.append(known.part(known.properties[name]))
        num_chars += num_copies * len(json.dumps(parts[-1]))
        if num_chars > MAX_GRAMMAR_CHARS:  # definitions are repeated for each property
            return whole
    written = [sequence(spelled([f"{name}=", json_format(part)], {})) for name, part in zip(names, parts, strict=True)]
    after = [sequence(spelled([", ", one], {})) for one in written]
    optional = [{"type": "optional", "content": one} for one in after]
    if num_required:
        return sequence([written[0], *after[1:num_required], *optional[num_required:]])
    # Any of them may be the first.
    starts = [sequence([written[i], *optional[i + 1 :]]) for i in range(len(written))]
    return any_of([*starts, {"type": "const_string", "value": ""}])
