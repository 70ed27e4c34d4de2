"""Calls and literals of Python as JSON."""

import ast
import json
import re
from collections.abc import Sequence

# Strings may hold line breaks, which some models leave unescaped. An empty string needs the character after it.
TOKEN = re.compile(
    r'(?P<string>"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|\'\'\'[^\'\\]*(?:(?:\\.|\'(?!\'\'))[^\'\\]*)*\'\'\'"
    r'|"(?!")[^"\\]*(?:\\.[^"\\]*)*"|\'(?!\')[^\'\\]*(?:\\.[^\'\\]*)*\''
    r'|""(?=[^"])|\'\'(?=[^\']))'
    r"|(?P<number>[+-]?(?:\d[\d_]*+(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?)(?=[^\w.])"
    r"|(?P<name>[^\W\d]\w*)(?=\W)"
    r"|(?P<mark>\*\*|[\[\](){},:=])",
    re.DOTALL,
)
NAME = re.compile(r"[^\W\d]\w*")  # of an argument
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
        found = TOKEN.match(text, at)
        if found is None:
            return None
        tokens.append(found)
        at = found.end()
    return checked_json("".join(_translated(tokens, in_call=False)))


def json_of_arguments(tokens: Sequence[re.Match[str]]) -> str | None:
    """JSON of a call's arguments, ``a=1, b="x"`` or ``**{...}``; None if they are not names and literals."""
    if tokens and tokens[0][0] == "**":
        return checked_json("".join(_translated(tokens[1:], in_call=False)))
    return checked_json("{" + "".join(_translated(tokens, in_call=True)) + "}")


def checked_json(text: str) -> str | None:
    """``text`` if it is JSON of one value."""
    try:
        json.loads(text, parse_constant=_refuse, parse_int=len)  # which has no limit of digits
    except (ValueError, RecursionError):
        return None
    return text


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
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError):
        return "?"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
