"""Formats of strings that are enforced, each as a pattern of which every text is valid. xgrammar's own rules take leading
zeros, the 31st of February, and backslashes that no escape follows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_NOT_ZERO = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # years; Python knows no year 0
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DAYS = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_NOT_ZERO}-{_DAYS}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_SHORT_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,22}[0-9A-Za-z])?"
# At most 253 characters: 3 labels of 63, or 10 of 24.
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL}){{0,2}}|{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{3,9}})"
_MAIL_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})?|{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{2,6}})"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,20}}){{1,2}})@{_MAIL_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": "|".join(
        [f"{_HEX}(?::{_HEX}){{7}}", f"(?:{_HEX}:){{7}}:"]
        + [f"{':'.join([_HEX] * num)}::(?:{_HEX}(?::{_HEX}){{0,{6 - num}}})?" for num in range(7)]
    ),
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
# Characters of the shortest and of the longest text that the pattern takes.
LENGTHS = {
    "date": (10, 10),
    "time": (9, 24),
    "date-time": (20, 35),
    "email": (3, 239),
    "hostname": (1, 249),
    "ipv4": (7, 15),
    "ipv6": (2, 39),
    "uuid": (36, 36),
}


class _Part(NamedTuple):
    """What a pattern says of texts from ``least`` to ``most`` characters. ``of``: the pattern of a part of these lengths."""

    of: Callable[[int, int], str]
    least: int
    most: int


def _fixed(pattern: str, num_chars: int) -> _Part:
    return _Part(lambda *_: pattern, num_chars, num_chars)


def _run(char: str, least: int, most: int, before: str = "") -> _Part:
    """A character that is repeated. ``before``: another one, which counts."""
    return _Part(lambda low, high: f"{before}{char}{{{low - bool(before)},{high - bool(before)}}}", least, most)


def _label(least: int, most: int) -> str:
    """Of a host's name."""
    inner = f"[0-9A-Za-z-]{{{max(0, least - 2)},{most - 2}}}[0-9A-Za-z]"
    return "[0-9A-Za-z]" if most == 1 else f"[0-9A-Za-z](?:{inner})" + ("?" if least < 2 else "")


def _octet(least: int, most: int) -> str:
    ways = {3: "25[0-5]|2[0-4][0-9]|1[0-9]{2}", 2: "[1-9][0-9]", 1: "[0-9]"}
    return f"(?:{'|'.join(way for num, way in ways.items() if least <= num <= most)})"


def _joined(separator: str, part: _Part, num: int) -> list[_Part]:
    return [one for _ in range(num) for one in (_fixed(separator, 1), part)][1:]


_SECOND = _fixed(rf"{_HOUR}:[0-5][0-9]", 8)
_TIMES = [
    [_SECOND, *fraction, zone]
    for fraction in ([], [_run("[0-9]", 2, 10, before=r"\.")])
    for zone in (_fixed("Z", 1), _fixed(f"[+-]{_HOUR}", 6))
]
_PART_OF_HOST = _Part(_label, 1, 63)
_HOSTS = [_joined(r"\.", _PART_OF_HOST, num) for num in (1, 2, 3)]
# Where lengths are bounded: alternatives of parts, which need not make all texts of the format.
_PARTS: dict[str, Sequence[Sequence[_Part]]] = {
    "date": [[_fixed(_DATE, 10)]],
    "time": _TIMES,
    "date-time": [[_fixed(f"{_DATE}T", 11), *time] for time in _TIMES],
    "email": [[_run(_ATOM, 1, 64), _fixed("@", 1), *host] for host in _HOSTS[:2]],
    "hostname": _HOSTS,
    "ipv4": [_joined(r"\.", _Part(_octet, 1, 3), 4)],
    "ipv6": [_joined(":", _run("[0-9A-Fa-f]", 1, 4), 8), [_fixed("::", 2), *_joined(":", _run("[0-9A-Fa-f]", 1, 4), 3)]],
    "uuid": [[_fixed(FORMATS["uuid"], 36)]],
}


def format_pattern(name: str, least: int, most: int | None) -> str | None:
    """A pattern of texts of the format that have ``least`` to ``most`` characters: all of them where these bounds take all,
    else some. None: there are none."""
    if least <= LENGTHS[name][0] and (most is None or most >= LENGTHS[name][1]):
        return FORMATS[name]
    found = [_within(parts, least, most) for parts in _PARTS[name]]
    return "|".join(one for one in found if one is not None) or None


def _within(parts: Sequence[_Part], least: int, most: int | None) -> str | None:
    """The longest parts are shortened until all fit, the first are lengthened until they are enough."""
    lows, highs = [part.least for part in parts], [part.most for part in parts]
    while most is not None and sum(highs) > most:
        i = max(range(len(parts)), key=lambda i: highs[i] - lows[i])
        if highs[i] == lows[i]:
            return None
        highs[i] -= 1
    for i, high in enumerate(highs):
        lows[i] += max(0, min(high - lows[i], least - sum(lows)))
    if sum(lows) < least:
        return None
    return "".join(part.of(low, high) for part, low, high in zip(parts, lows, highs, strict=True))
