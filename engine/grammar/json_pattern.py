"""A pattern of a JSON string as a pattern of how JSON spells the string: with escapes.

A pattern is about the decoded text. Each of its atoms becomes the spellings of the characters that it matches, and what
stands between atoms stays. Where dialects differ, an atom matches what it matches in all of them: in ECMAScript, which JSON
Schema names, and in Python's re, which validates most schemas.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included; sorted, and apart from each other

# A string whose characters a grammar counts cannot hold this one as it is, and any other text can hold it where it can
# hold the next: `StringMasks` tells counted strings by it.
NEVER_RAW = "\U0010fffe"
_LAST = sys.maxunicode
_SURROGATES = (0xD800, 0xDFFF)
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\})")
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(,\d*)?\}")
# Behind one character: a repetition and the end.
_BOUNDS = re.compile(r"([*+?]|\{(\d+)(?:,(\d*))?\})?\$?")
_ANY = tuple(f"[{one}]" for kind in "swd" for one in (rf"\{kind}\{kind.upper()}", rf"\{kind.upper()}\{kind}"))
_MAX_SPELLED = 2**20  # characters
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))


def with_plain_codes(pattern: str) -> str:
    """A pattern whose hexadecimal codes have braces: xgrammar reads the digits behind \\xHH as a part of it."""
    return re.sub(
        r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|.)",
        lambda found: rf"\u{{{found[1] or found[2]}}}" if found[1] or found[2] else found[0],
        pattern,
        flags=re.DOTALL,
    )


def repeated(pattern: str, least: int, most: int | None) -> str | None:
    """The pattern of the texts of ``least`` to ``most`` characters that match a pattern of one repeated character, such as
    ``^[a-z]+$``; None: the pattern is another one, or nothing matches both."""
    bare = pattern.removeprefix("^")
    try:
        _, end = _atom(bare, 0) if bare and bare[0] not in "()|*+?{$" else ((), 0)
    except ValueError:
        return None
    found = _BOUNDS.fullmatch(bare, end)
    if not end or found is None:
        return None
    first, last = {"*": ("0", ""), "+": ("1", ""), "?": ("0", "1"), None: ("1", "1")}.get(found[1], (found[2], found[3]))
    last = first if last is None else last
    least = max(least, int(first))
    if last:
        most = int(last) if most is None else min(most, int(last))
    return None if most is not None and most < least else f"^{bare[:end]}{{{least},{'' if most is None else most}}}$"


def counted(pattern: str) -> tuple[bool, int, int | None] | None:
    """Of a pattern of so many characters, such as ``^.{1,100}$``: whether none of them ends a line, the least and the most
    number. None: the pattern is another one."""
    bare = pattern.removeprefix("^")
    atom = next((one for one in (".", *_ANY) if bare.startswith(one)), "")
    found = _BOUNDS.fullmatch(bare, len(atom)) if atom else None
    if found is None or found[2] is None:
        return None
    return atom == ".", int(found[2]), int(found[3] or found[2]) if found[3] != "" else None


def json_spelling(pattern: str) -> str:
    """Raises ValueError: the pattern cannot be spelled; says why."""
    return _respelled(pattern, _spelled)


def plain_spelling(pattern: str, excluded: str) -> str:
    """A pattern of the texts that match and hold none of the characters ``excluded``.

    Raises ValueError: there are none, or the pattern cannot be spelled; says why.
    """

    def spelled(ranges: Ranges) -> str:
        possible = _within(_possible(ranges), 0, ord(NEVER_RAW) - 2)  # none near it, beside which no string is counted
        kept = _without([(ord(char), ord(char)) for char in sorted(excluded)], possible)
        if not kept:
            raise ValueError(f"it has a character that no text here holds: {excluded!r} is not possible")
        return f"[{''.join(map(_range, kept))}]"

    return _respelled(pattern, spelled)


def _respelled(pattern: str, spelled: Callable[[Ranges], str]) -> str:
    pattern, at, out, size = pattern.removeprefix("^"), 0, list[str](), 0
    while at < len(pattern):
        size += len(out[-1]) if out else 0
        if size > _MAX_SPELLED:
            raise ValueError(f"it takes more than {_MAX_SPELLED} characters when its classes are spelled out")
        char = pattern[at]
        quantifier = _QUANTIFIER.match(pattern, at)
        if char == "$" and at == len(pattern) - 1:
            break
        if pattern.startswith("(?:", at):
            out.append("(?:")
            at += 3
        elif char in "()|":
            out.append(char)
            at += 1
        elif quantifier is not None:
            # xgrammar skips what precedes the last repetition in an optional group: (ab*)? takes "b".
            is_group = quantifier[0] == "?" and out and out[-1].endswith(")")
            out.append("{0,1}" if is_group else quantifier[0])
            at = quantifier.end()
        else:
            matched, at = _atom(pattern, at)
            out.append(spelled(matched))
    return "".join(out)


def _atom(pattern: str, at: int) -> tuple[Ranges, int]:
    """What one atom matches, and where it ends."""
    if pattern[at] == "[":
        return _class(pattern, at + 1)
    if pattern[at] == ".":
        return _without(_lines_end()), at + 1
    (surely, _), at = _element(pattern, at)
    return surely, at


def _class(pattern: str, at: int) -> tuple[Ranges, int]:
    negated = pattern.startswith("^", at)
    at += negated
    surely, perhaps = list[tuple[int, int]](), list[tuple[int, int]]()
    while not pattern.startswith("]", at):
        (sure, possible), at = _element(pattern, at)
        is_char = len(sure) == 1 and sure[0][0] == sure[0][1]
        if is_char and pattern.startswith("-", at) and not pattern.startswith("-]", at):
            (end, _), at = _element(pattern, at + 1)
            if len(end) != 1 or end[0][0] != end[0][1] or end[0][0] < sure[0][0]:
                raise ValueError("a range of its characters has no end")
            sure = possible = ((sure[0][0], end[0][0]),)
        surely += sure
        perhaps += possible
    return (_without(_joined(perhaps)) if negated else _joined(surely)), at + 1


def _element(pattern: str, at: int) -> tuple[tuple[Ranges, Ranges], int]:
    """What a character or escape matches in all dialects, and in any of them; and where it ends."""
    if at >= len(pattern):
        raise ValueError("a class of characters has no end")
    if pattern[at] != "\\":
        return _only(ord(pattern[at])), at + 1
    code = _CODE.match(pattern, at)
    if code is not None:
        return _only(int(code[1] or code[2] or code[3], 16)), code.end()
    kind = pattern[at + 1 : at + 2]
    if kind.lower() in ("d", "w", "s") and kind:
        surely, perhaps = _kinds()[kind.lower()]
        return ((surely, perhaps) if kind.islower() else (_without(perhaps), _without(surely))), at + 2
    if kind in _CONTROL:
        return _only(_CONTROL[kind]), at + 2
    if not kind or kind.isalnum():
        raise ValueError(f"\\{kind} is not supported in it")
    return _only(ord(kind)), at + 2


def _only(code: int) -> tuple[Ranges, Ranges]:
    return ((code, code),), ((code, code),)


@cache
def _kinds() -> dict[str, tuple[Ranges, Ranges]]:
    """What \\d, \\w and \\s match in all dialects, and in any of them. Python's \\w holds letters of all languages: it is
    taken to hold whatever is not ASCII."""
    every = range(0x20000)  # the other planes have neither
    digits = _joined((code, code) for code in every if chr(code).isdecimal())
    spaces = _joined((code, code) for code in every if chr(code).isspace() or code == 0xFEFF)
    space = ((0x09, 0x0D), (0x20, 0x20))
    return {"d": (((0x30, 0x39),), digits), "w": (_WORD, (*_WORD, (0x80, _LAST))), "s": (space, spaces)}


def _lines_end() -> Ranges:
    return ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    out = list[tuple[int, int]]()
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], high)
        else:
            out.append((low, high))
    return tuple(out)


def _without(ranges: Iterable[tuple[int, int]], whole: Ranges = ((0, _LAST),)) -> Ranges:
    out = list[tuple[int, int]]()
    for low, high in whole:
        for first, last in ranges:
            if first > high or last < low:
                continue
            if low < first:
                out.append((low, first - 1))
            low = last + 1
        if low <= high:
            out.append((low, high))
    return tuple(out)


def _within(ranges: Ranges, low: int, high: int) -> Ranges:
    return tuple((max(one, low), min(other, high)) for one, other in ranges if one <= high and other >= low)


def _possible(ranges: Ranges) -> Ranges:
    ranges = _without((_SURROGATES,), ranges)
    return ranges if _within(ranges, ord(NEVER_RAW), ord(NEVER_RAW)) else _within(ranges, 0, ord(NEVER_RAW) - 1)


def _spelled(ranges: Ranges) -> str:
    ranges = _possible(ranges)
    raw = _without(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)), ranges)
    ways = [f"[{''.join(map(_range, raw))}]"] if raw else []
    short = [name for code, name in _SHORT.items() if _within(ranges, code, code)]
    if short:
        ways.append(rf"\\[{''.join(map(re.escape, short))}]")
    # As writers of ASCII spell them.
    hexadecimal = _hex(4, (*_within(ranges, 0, 0x1F), *_within(ranges, 0x80, 0xFFFF)))
    if hexadecimal:
        ways.append(rf"\\u{hexadecimal}")
    if not ways:
        raise ValueError("it has a character that no text holds")
    if len(ways) > 1:
        return f"(?:{'|'.join(ways)})"
    return f"(?:{ways[0]})" if not raw else ways[0]


def _range(codes: tuple[int, int]) -> str:
    low, high = (chr(code) if chr(code).isascii() and chr(code).isalnum() else rf"\u{{{code:x}}}" for code in codes)
    return low if codes[0] == codes[1] else f"{low}-{high}"


def _hex(num_digits: int, ranges: Ranges) -> str:
    """A pattern of the hexadecimal numbers of so many digits in these ranges; empty: there are none."""
    if not ranges or not num_digits:
        return ""
    size = 16 ** (num_digits - 1)
    rests: dict[Ranges, str] = {}  # by what may follow: the digits
    for digit in range(16):
        rest = tuple((a - digit * size, b - digit * size) for a, b in _within(ranges, digit * size, (digit + 1) * size - 1))
        if rest:
            rests[rest] = rests.get(rest, "") + "".join(sorted({f"{digit:x}", f"{digit:X}"}))
    return f"(?:{'|'.join(_alternatives(rests, num_digits))})"


def _alternatives(rests: dict[Ranges, str], num_digits: int) -> Iterator[str]:
    for rest, digits in rests.items():
        yield f"[{digits}]{_hex(num_digits - 1, rest)}"


MAX_REPEATS = 16384  # of the innermost of nested repetitions

# A class without an end takes all that follows: to look for its end again at each of its brackets takes quadratic time.
CLASS = r"\[\^?(?:\](?:\\.|[^\]\\])*+\]|(?:\\.|[^\]\\])*+(?:\]|\\?\Z))"
# A class, an escape, a bracket, or a repetition; in EBNF also a quoted text.
_OF_REGEX = rf"{CLASS}|\\.|[()]|\{{(\d+)(,(\d*))?\}}"
_REGEX = re.compile(_OF_REGEX, re.DOTALL)
_EBNF = re.compile(rf'"(?:\\.|[^"\\])*"|{_OF_REGEX}', re.DOTALL)


def repeats_fault(source: str, *, is_regex: bool) -> str | None:
    """Why a source is refused; None: it is not."""
    inner = [1]  # the most repeats within each open group
    last, end = 1, 0  # within the last group, and where it ends
    for found in (_REGEX if is_regex else _EBNF).finditer(source):
        if found[0] == "(":
            inner.append(1)
        elif found[0] == ")":
            last, end = inner.pop() if len(inner) > 1 else 1, found.end()
            inner[-1] = max(inner[-1], last)
        elif found[1] is not None:
            is_group = not source[end : found.start()].strip()
            repeats = (last if is_group else 1) * max(1, int(found[3] or found[1]))
            if repeats > MAX_REPEATS:
                return f"repeats a part up to {repeats} times by nested repetitions, at most {MAX_REPEATS} are possible"
            inner[-1] = max(inner[-1], repeats)
    return None
