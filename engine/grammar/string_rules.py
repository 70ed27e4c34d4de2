"""Strings of a JSON schema with a length or a pattern, as rules of a grammar in EBNF.

xgrammar's own rules for them take seconds to compile, since a mask is computed for each character of a bound, and hold no
escapes. Here a schema gets a placeholder for each such string, xgrammar turns it into a grammar, and the placeholders are
replaced by rules. A character is a code point, however it is spelled, as JSON Schema counts. Bounds are counted in blocks of
BLOCK characters, so that few rules are needed and few are followed at once.
"""

import copy
import re
import secrets
from collections.abc import Iterator
from typing import Any

from engine.grammar.json_pattern import json_spelling

BLOCK = 64
# Without lone surrogates: two in a row would be one character.
_CHAR = r"""counted_char ::= [^"\\\0-\x1f\U0010FFFE] | "\\" counted_escape
counted_escape ::= ["\\/bfnrt] | "u" [0-9A-Ca-cE-Fe-f] counted_hex counted_hex counted_hex | "u" [Dd] counted_code
counted_code ::= [0-7] counted_hex counted_hex | [89ABab] counted_hex counted_hex "\\u" [Dd] [C-Fc-f] counted_hex counted_hex
counted_hex ::= [0-9A-Fa-f]
"""
_MARK = f"s{secrets.token_hex(8)}"  # of placeholders; no client knows it
_COUNTED = re.compile(rf'"\\"{_MARK}_(\d+)_(\d*)\\""')
_PATTERN = re.compile(rf'"\\"{_MARK}_([0-9a-f]*)\\""')
_NEAR = re.compile("\\\\(?:u\\{0*|U00|U)10fff[def]|udbff|[\U0010fffd-\U0010ffff]", re.IGNORECASE)  # of `NEVER_RAW`
_KEYS = frozenset({"minLength", "maxLength", "pattern"})
NEAR = "the characters U+10FFFD to U+10FFFF are not possible beside strings with bounds"


def is_near(text: str) -> bool:
    """Whether a grammar beside counted strings tells `NEVER_RAW` from other characters, too."""
    return _NEAR.search(text) is not None


def with_placeholders(schema: Any) -> Any:
    """A copy of a schema that `schema_rules` lets pass, with constants for the strings that get rules."""
    replaced = copy.deepcopy(schema)
    for one in _schemas(replaced):
        _replace(one)
    return replaced


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """This one and those in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in ("properties", "$defs"):
        for one in schema.get(key, {}).values():
            yield from _schemas(one)
    for key in ("anyOf", "prefixItems"):
        for one in schema.get(key, ()):
            yield from _schemas(one)
    for key in ("items", "additionalProperties", "propertyNames"):
        yield from _schemas(schema.get(key))


def _replace(schema: dict[str, Any]) -> None:
    """Puts a placeholder for the string with a length or pattern, if this schema, without those in it, allows one."""
    if not schema.keys() & _KEYS:
        return
    text = f"{_MARK}_{schema.pop('minLength', 0)}_{schema.pop('maxLength', '')}"
    if "pattern" in schema:
        text = f"{_MARK}_{schema.pop('pattern').encode(errors='surrogatepass').hex()}"
    types = schema.pop("type")
    others = [one for one in types if one != "string"] if isinstance(types, list) else []
    if others:  # what is beside anyOf stays for the references to it
        schema["anyOf"] = [{"const": text}, {**schema, "type": others}]
    else:
        schema["const"] = text


def with_strings(ebnf: str) -> tuple[str, bool]:
    """The grammar with rules for the placeholders, and whether it counts characters.

    Raises ValueError: a string cannot be enforced; says why.
    """
    bounds, patterns = set[tuple[int, int | None]](), dict[str, str]()

    def counted(found: re.Match[str]) -> str:
        least, most = int(found[1]), int(found[2]) if found[2] else None
        if most is not None and least > most:
            raise ValueError(f"minLength {least} is more than maxLength {most}")
        bounds.add((least, most))
        return _string_name(least, most)

    def matched(found: re.Match[str]) -> str:
        return patterns.setdefault(found[1], f"pattern_{len(patterns)}")

    ebnf = _PATTERN.sub(matched, _COUNTED.sub(counted, ebnf))
    if bounds and is_near(ebnf):
        raise ValueError(NEAR)
    if _MARK in ebnf:
        raise ValueError("a string of the schema has no rule")
    rules = list(_counted_rules(bounds)) if bounds else []
    for encoded, name in patterns.items():
        spelled = json_spelling(bytes.fromhex(encoded).decode(errors="surrogatepass"))
        quoted = spelled.replace("\\", "\\\\").replace('"', '\\"')
        rules.append(f'{name} ::= "\\"" {name}_text "\\""\n{name}_text ::= Regex("{quoted}")\n')
    return "\n".join((ebnf, *rules)), bool(bounds)


def _string_name(least: int, most: int | None) -> str:
    return f"counted_string_{least}_{'any' if most is None else most}"


def _counted_rules(bounds: set[tuple[int, int | None]]) -> Iterator[str]:
    yield _CHAR
    yield f"counted_block ::= {' '.join(['counted_char'] * BLOCK)}"
    yield 'counted_any ::= "" | counted_char counted_any'
    yield 'counted_0 ::= ""'
    for num in range(1, BLOCK):
        yield f'counted_{num} ::= "" | counted_char counted_{num - 1}'
    known = set(range(BLOCK))
    for least, most in sorted(bounds, key=str):
        blocks, chars = divmod(least, BLOCK)
        exact = " ".join((*["counted_block"] * blocks, *["counted_char"] * chars))
        rest = "any" if most is None else str(most - least)
        yield f'{_string_name(least, most)} ::= "\\"" {exact} counted_{rest} "\\""'
        num = -1 if most is None else most - least
        while num >= 0 and num not in known:  # at most num characters
            known.add(num)
            yield f"counted_{num} ::= counted_{BLOCK - 1} | counted_block counted_{num - BLOCK}"
            num -= BLOCK
