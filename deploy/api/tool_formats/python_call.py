"""Calls as Python: ``[get_weather(city="Paris")]``. Their arguments and literals are read as JSON."""

import ast
import json
import re
from collections.abc import Collection, Sequence

from cluster.sampling_params import MAX_GRAMMAR_CHARS
from deploy.api.answer_parts import Arguments, CallStart, whole_characters
from deploy.api.messages import Tool
from deploy.api.structured import Format, any_of, arguments, json_format, sequence, spelled
from deploy.api.tool_formats import CallReader

_QUOTES = "\"'"
# Strings may hold line breaks, which some models leave unescaped. An empty string needs the character after it.
_TOKEN = re.compile(
    r'(?P<string>"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|\'\'\'[^\'\\]*(?:(?:\\.|\'(?!\'\'))[^\'\\]*)*\'\'\'"
    r'|"(?!")[^"\\]*(?:\\.[^"\\]*)*"|\'(?!\')[^\'\\]*(?:\\.[^\'\\]*)*\''
    r'|""(?=[^"])|\'\'(?=[^\']))'
    r"|(?P<number>[+-]?(?:\d[\d_]*+(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?)(?=[^\w.])"
    r"|(?P<name>[^\W\d]\w*)(?=\W)"
    r"|(?P<mark>\*\*|[\[\](){},:=])",
    re.DOTALL,
)
_NAME = re.compile(r"[^\W\d]\w*")  # of an argument
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_AS_JSON = {"(": "[", ")": "]", ",": ", ", ":": ": "}


def json_of_literal(text: str) -> str | None:
    """JSON of a Python literal; None if it is none that JSON can write."""
    tokens, at = [], 0
    text = text.strip() + " "  # so that the last token is complete
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        found = _TOKEN.match(text, at)
        if found is None:
            return None
        tokens.append(found)
        at = found.end()
    return checked_json("".join(_translated(tokens, in_call=False)))


def checked_json(text: str) -> str | None:
    """``text`` if it is JSON of one value."""
    try:
        json.loads(text, parse_constant=_refuse, parse_int=len)  # which has no limit of digits
    except (ValueError, RecursionError):
        return None
    return text


def _json_of_arguments(tokens: Sequence[re.Match[str]]) -> str | None:
    """JSON of a call's arguments, ``a=1, b="x"`` or ``**{...}``; None if they are not names and literals."""
    if tokens and tokens[0][0] == "**":
        return checked_json("".join(_translated(tokens[1:], in_call=False)))
    return checked_json("{" + "".join(_translated(tokens, in_call=True)) + "}")


def _translated(tokens: Sequence[re.Match[str]], in_call: bool) -> list[str]:
    """Pieces of JSON text, which is invalid where the tokens are no literals."""
    pieces: list[str] = []
    depth = 0
    for i, token in enumerate(tokens):
        mark, after = token["mark"], tokens[i + 1][0] if i + 1 < len(tokens) else ""
        depth += (mark is not None and mark in "[({") - (mark is not None and mark in "])}")
        if token["name"] is not None and after == "=" and in_call and depth == 0:
            pieces.append(json.dumps(token["name"]))
        elif mark == "=" and in_call and depth == 0:
            pieces.append(": ")
        elif mark == "," and after in ("", "]", ")", "}"):
            pieces.append("" if i else ",")  # a trailing comma
        elif mark is not None:
            pieces.append(_AS_JSON.get(mark, mark))
        else:
            pieces.append(_scalar(token))
    return pieces


def _scalar(token: re.Match[str]) -> str:
    if token["name"] is not None:
        return _CONSTANTS.get(token["name"], "?")
    text = token[0]
    if checked_json(text) is not None:  # as a grammar writes: it has other escapes, and numbers of any size
        return text
    if token["string"] is not None and text[:3] not in ('"""', "'''"):
        text = text.replace("\r", "\\r").replace("\n", "\\n") if "\\\n" not in text else text
    try:
        return whole_characters(json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False))
    except (ValueError, SyntaxError):
        return "?"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


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
        found = _TOKEN.match(self.raw, self._at)
        if found is None:
            return self._wait_or_give_up()
        self._depth += (found[0] in "([{") - (found[0] in ")]}")
        self._at = found.end()
        if self._depth:
            self._tokens.append(found)
            return True
        self.done = True
        written = _json_of_arguments(self._tokens) if found[0] == ")" else None
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


def python_arguments(tool: Tool, strict: bool) -> Format:
    """``a=1, b=2``, the required ones first. Where the schema is more than a list of properties, ``**{"a": 1, "b": 2}``."""
    whole = sequence(spelled(["**", arguments(tool, strict)], {}))
    known = tool.function.parameters_read
    names = list(dict.fromkeys([*known.required, *known.properties]))
    if not strict or not known.is_listed or not all(map(_NAME.fullmatch, names)):
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
