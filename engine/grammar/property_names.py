"""The names of properties that a schema does not list, as rules of a grammar in EBNF. They hold no escapes, so that none of
the listed names is spelled with one.

xgrammar's own rules for them let listed names pass that are spelled with escapes, or that are not ASCII.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from itertools import groupby

MAX_PREFIX = 48  # characters of a name by which it is told from others; names that begin as a longer one are left out
MAX_RULES = 48  # one for each beginning of a name by which it is told from others; each takes 8 ms to compile

_MARK = f"n{secrets.token_hex(8)}"  # of placeholders; no client knows it
_PLACEHOLDER = re.compile(rf'"\\"{_MARK}_([0-9a-f_]*)\\""')
_CHAR = r'"\\\0-\x1f'  # in a character class: what JSON escapes


def placeholder(names: Iterable[str]) -> str:
    """Stands in a schema for the names that are none of these."""
    return f"{_MARK}_{'_'.join(sorted(name.encode(errors='surrogatepass').hex() for name in names))}"


def is_placed_in(text: str) -> bool:
    return _MARK in text


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
