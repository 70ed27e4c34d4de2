"""JSON of a schema as a grammar in EBNF, on one line as json.dumps writes it: a grammar that leaves whitespace free lets a
model write it without end.

xgrammar makes the grammar, but for strings with a length or a pattern, and for the names of properties that a schema does
not list. Its own rules for the former take seconds to compile, since a mask is computed for each character of a bound, and
hold no escapes; those for the latter let listed names pass that are spelled with escapes, or that are not ASCII. A schema
gets a placeholder for each of these, and the placeholders become rules. A character is a code point, however it is spelled,
as JSON Schema counts. A pattern of so many characters, such as ``.{1,100}``, is a length, too.
"""

import copy
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from cluster.errors import InvalidField
from engine.grammar.json_pattern import counted, json_spelling

_SEPARATORS = (", ", ": ")


def rules_of(schema: Any) -> tuple[str, bool]:
    """Of a schema that `schema_rules` let pass; and whether the grammar counts the characters of strings.

    Raises InvalidField: it cannot be enforced; says why.
    """
    import xgrammar  # and with it torch, which the API's processes do without

    try:
        text = json.dumps(with_placeholders(schema), ensure_ascii=False)
        grammar = xgrammar.Grammar.from_json_schema(text, any_whitespace=False, separators=_SEPARATORS)
        return with_strings(with_names(str(grammar)))
    except (RuntimeError, ValueError) as error:  # xgrammar's own, and those of its native part
        raise InvalidField("json_schema", "", reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """What xgrammar says, without the time and the place in xgrammar's source that it begins with."""
    lines = str(error).strip().splitlines()
    return (lines[0].split(": ", 1)[-1] if lines else type(error).__name__).strip()[:300]


BLOCK = 64
# Without lone surrogates: two in a row would be one character.
_CHARS = r"""counted_any ::= [^"\\\0-\x1f\U0010FFFE] | "\\" counted_escape
counted_escape ::= ["\\/bfnrt] | "u" [0-9A-Ca-cE-Fe-f] counted_hex counted_hex counted_hex | "u" [Dd] counted_code
counted_code ::= [0-7] counted_hex counted_hex | [89ABab] counted_hex counted_hex "\\u" [Dd] [C-Fc-f] counted_hex counted_hex
counted_hex ::= [0-9A-Fa-f]
counted_line ::= [^"\\\0-\x1f\u2028\u2029\U0010FFFE] | "\\" ["\\/bft] | "\\u" line_code
line_code ::= ([13-9A-Ca-cE-Fe-f] counted_hex | [02] [1-9A-Fa-f]) counted_hex counted_hex | "00" [1-9A-Fa-f] counted_hex
"""
_MARK = f"s{secrets.token_hex(8)}"  # of placeholders; no client knows it
_COUNTED = re.compile(rf'"\\"{_MARK}_(any|line)_(\d+)_(\d*)\\""')
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
    pattern = schema.pop("pattern", None)
    bounds = (False, schema.pop("minLength", 0), schema.pop("maxLength", None)) if pattern is None else counted(pattern)
    if bounds is None:
        text = f"{_MARK}_{pattern.encode(errors='surrogatepass').hex()}"
    else:
        is_line, least, most = bounds
        text = f"{_MARK}_{'line' if is_line else 'any'}_{least}_{'' if most is None else most}"
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
    bounds, patterns = set[tuple[str, int, int | None]](), dict[str, str]()

    def named(found: re.Match[str]) -> str:
        char, least, most = f"counted_{found[1]}", int(found[2]), int(found[3]) if found[3] else None
        if most is not None and least > most:
            raise ValueError(f"minLength {least} is more than maxLength {most}")
        bounds.add((char, least, most))
        return _string_name(char, least, most)

    def matched(found: re.Match[str]) -> str:
        return patterns.setdefault(found[1], f"pattern_{len(patterns)}")

    ebnf = _PATTERN.sub(matched, _COUNTED.sub(named, ebnf))
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


def _string_name(char: str, least: int, most: int | None) -> str:
    return f"{char}_{least}_to_{'any' if most is None else most}"


def _counted_rules(bounds: set[tuple[str, int, int | None]]) -> Iterator[str]:
    yield _CHARS
    for char in sorted({char for char, *_ in bounds}):
        yield from upto_rules(char, [most - least for one, least, most in bounds if one == char and most is not None])
    for char, least, most in sorted(bounds, key=str):
        rest = "all" if most is None else str(most - least)
        yield f'{_string_name(char, least, most)} ::= "\\"" {exactly(char, least)} {char}_{rest} "\\""'


def exactly(char: str, num: int) -> str:
    """So many characters by `upto_rules`."""
    blocks, chars = divmod(num, BLOCK)
    return " ".join((*[f"{char}_block"] * blocks, *[char] * chars))


def upto_rules(char: str, nums: Iterable[int]) -> Iterator[str]:
    """Rules CHAR_N of at most N times the rule ``char``, for each of ``nums``, and CHAR_all of any number. They count in
    blocks, so that few rules are needed and few are followed at once."""
    yield f"{char}_block ::= {' '.join([char] * BLOCK)}"
    yield f'{char}_all ::= "" | {char} {char}_all'
    yield f'{char}_0 ::= ""'
    yield from (f'{char}_{num} ::= "" | {char} {char}_{num - 1}' for num in range(1, BLOCK))
    more = sorted({left for num in nums for left in range(num, BLOCK - 1, -BLOCK)})
    yield from (f"{char}_{num} ::= {char}_{BLOCK - 1} | {char}_block {char}_{num - BLOCK}" for num in more)


# Names that are not listed hold no escapes, so that none of the listed ones is spelled with one.
MAX_PREFIX = 48  # characters of a name by which it is told from others; names that begin as a longer one are left out
MAX_RULES = 48  # one for each beginning of a name by which it is told from others; each takes 8 ms to compile

_NAME_MARK = f"n{secrets.token_hex(8)}"  # of placeholders; no client knows it
_PLACEHOLDER = re.compile(rf'"\\"{_NAME_MARK}_([0-9a-f_]*)\\""')
_CHAR = r'"\\\0-\x1f'  # in a character class: what JSON escapes


def placeholder(names: Iterable[str]) -> str:
    """Stands in a schema for the names that are none of these."""
    return f"{_NAME_MARK}_{'_'.join(sorted(name.encode(errors='surrogatepass').hex() for name in names))}"


def is_placed_in(text: str) -> bool:
    return _NAME_MARK in text


def with_names(ebnf: str) -> str:
    """The grammar with rules for the placeholders, which xgrammar wrote as constants."""
    rules = dict[str, str]()

    def named(found: re.Match[str]) -> str:
        return rules.setdefault(found[1], f"other_name_{len(rules)}")

    ebnf = _PLACEHOLDER.sub(named, ebnf)
    if not rules:
        return ebnf
    lines = [f'other_name_text ::= ("\\"" | [^{_CHAR}] other_name_text) (=": ")']
    for encoded, rule in rules.items():
        names = [bytes.fromhex(one).decode(errors="surrogatepass") for one in encoded.split("_")]
        plain = sorted(name for name in names if not any(char in '"\\' or char < " " for char in name))
        lines += [f'{rule} ::= "\\"" {rule}_', *_others(rule + "_", plain, 0, _num_told(plain))]
    return "\n".join((ebnf, *lines))


def _num_told(names: list[str]) -> int:
    """Characters of a name by which it is told from others: as many as MAX_RULES allow."""
    for num in range(1, MAX_PREFIX):
        if len({name[:end] for name in names for end in range(1, num + 2)}) > MAX_RULES:
            return num
    return MAX_PREFIX


def _others(rule: str, names: list[str], at: int, num_told: int) -> Iterator[str]:
    """The rules of the rest of a name from ``at`` on, with the quote. ``names``: sorted, and equal before ``at``."""
    begins = [(char, list(group)) for char, group in groupby((one for one in names if len(one) > at), lambda one: one[at])]
    ways = [f"[^{_CHAR}{''.join(map(_escaped, dict(begins)))}] other_name_text"]
    if not any(len(name) == at for name in names):
        ways.append('"\\""')
    for i, (char, group) in enumerate(begins):
        if at < num_told:
            ways.append(f'"{_escaped(char)}" {rule}{i}_')
            yield from _others(f"{rule}{i}_", group, at + 1, num_told)
    yield f'{rule} ::= ({" | ".join(ways)}) (=": ")'


def _escaped(char: str) -> str:
    return f"\\U{ord(char):08X}"
