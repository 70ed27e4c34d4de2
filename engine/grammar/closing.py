"""The shortest end of an output that one can find quickly: how a request ends within its max_tokens.

JSON, alone or in a structural tag, is closed greedily: at each byte a string, array or object ends where the grammar lets
it; where it does not, the text of the string or number is searched breadth first. Other grammars are searched breadth first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xgrammar import GrammarMatcher

from cluster.grammar import GrammarKind
from engine.grammar.vocabulary import GrammarVocabulary

MAX_BYTES = 4096  # of an end
MAX_NODES = 4096  # of one search breadth first
MAX_WIDTH = 24  # states of one length, and bytes tried after each
MAX_DETOURS = 12  # choices of a greedy end that are tried another way

_CLOSERS = b"}],:"
_ONLY_IN_STRINGS = b"#!qZ"
_VALUES = b'0123456789ntf"-[{'  # how a value begins, the shortest first


@dataclass(slots=True)
class JsonScan:
    """Whether bytes end inside a string of JSON."""

    in_string: bool = False
    escaped: bool = False

    def feed(self, spelled: bytes) -> None:
        for byte in spelled:
            if self.escaped:
                self.escaped = False
            elif byte == 0x22:
                self.in_string = not self.in_string
            elif byte == 0x5C and self.in_string:
                self.escaped = True

    def copy(self) -> "JsonScan":
        return JsonScan(self.in_string, self.escaped)


class Closing:
    """Finds ends for one vocabulary. Not thread-safe.

    Args:
        kind: of the grammar.
        allowed: mask of the tokens that outputs can hold; None: what the grammar allows.
        names: the property names that are tried first where an object needs one more: the required ones.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        kind: GrammarKind,
        names: Sequence[bytes] = (),
        allowed: NDArray[np.int32] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._is_greedy = kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT, GrammarKind.STRUCTURAL_TAG)
        self._is_tag = kind is GrammarKind.STRUCTURAL_TAG
        self._names = names
        self._allowed = allowed
        self._masks = vocabulary.new_masks(1)
        self._mask: NDArray[np.int32] = self._masks[0].numpy()

    def shortest(self, matcher: GrammarMatcher, scan: JsonScan) -> bytes | None:
        """An end of the output that ``matcher`` has followed; b"" if it may end here. None: none was found.

        A function of the matcher's place alone. ``matcher`` is left as it was.
        """
        if not self._is_greedy:
            return self._search(matcher, self._vocabulary.allows_end)
        end, choices = self._greedy(matcher, scan, {})
        for i, options in enumerate(choices[:MAX_DETOURS] if end is None else ()):
            for option in range(1, options):
                found, _ = self._greedy(matcher, scan, {i: option})
                if found is not None and (end is None or len(found) < len(end)):
                    end = found
            if end is not None:
                break
        return end

    def _greedy(self, matcher: GrammarMatcher, scan: JsonScan, detours: dict[int, int]) -> tuple[bytes | None, list[int]]:
        """The end, and how many options each choice on the way had. ``detours``: by choice, the option to take."""
        matcher, scan, out = matcher.fork(), scan.copy(), bytearray()
        choices: list[int] = []
        has_closed = False  # a string, by the last byte
        while len(out) < MAX_BYTES:
            allowed, may_end = self._next(matcher)
            if may_end:
                return bytes(out), choices
            if not len(allowed):
                return None, choices
            if len(allowed) == 1:
                step = bytes(allowed.astype(np.uint8))
            else:
                in_string = _is_in_string(allowed) if self._is_tag else scan.in_string
                closes = in_string and 0x22 in allowed
                if self._is_tag and closes and has_closed:
                    return None, choices  # no string was closed: this is free text, which nothing here ends
                has_closed = closes
                options = self._in_string(matcher, allowed) if in_string else self._outside(allowed)
                if not options:
                    return None, choices
                step = options[min(detours.get(len(choices), 0), len(options) - 1)]
                if len(options) > 1:
                    choices.append(len(options))
            if not matcher.accept_string(step):
                return None, choices
            out += step
            scan.feed(step)
        return None, choices

    def _outside(self, allowed: NDArray[np.int64]) -> list[bytes]:
        """Outside strings: the one byte that closes, or else each way to go on."""
        known = set(allowed.tolist())
        if self._is_tag and 0x22 in known and not known & set(_CLOSERS):
            return [b'"']
        for closer in _CLOSERS:
            if closer in known:
                return [bytes([closer])]
        return [bytes([byte]) for byte in _VALUES if byte in known] or [bytes([int(allowed[0])])]

    def _in_string(self, matcher: GrammarMatcher, allowed: NDArray[np.int64]) -> list[bytes]:
        if 0x22 in allowed:
            return [b'"']
        names = [name + b'"' for name in self._names if self._is_name(matcher.fork(), name + b'"')]
        return names or self._texts(matcher)

    def _is_name(self, matcher: GrammarMatcher, text: bytes) -> bool:
        """Whether the string may end by ``text`` as the name of a property, and not as a value."""
        return bool(matcher.accept_string(text)) and 0x3A in self._next(matcher)[0]

    def _texts(self, matcher: GrammarMatcher) -> list[bytes]:
        found = self._search(matcher, lambda mask: 0x22 in self._vocabulary.allowed_bytes(mask))
        return [found] if found else []

    def _search(self, matcher: GrammarMatcher, is_goal: Callable[[NDArray[np.int32]], bool]) -> bytes | None:
        """Breadth first, states with the same mask once per length."""
        nodes, num_nodes = [(matcher.fork(), b"")], 0
        for _ in range(MAX_BYTES):
            following: dict[bytes, tuple[GrammarMatcher, bytes]] = {}
            for state, out in nodes:
                allowed, _ = self._next(state)
                if is_goal(self._mask):
                    return out
                for byte in samples(allowed):
                    num_nodes += 1
                    child = state.fork()
                    if child.accept_string(bytes([byte])):
                        self._fill(child)
                        following.setdefault(self._mask.tobytes(), (child, out + bytes([byte])))
            nodes = list(following.values())[:MAX_WIDTH]
            if not nodes or num_nodes > MAX_NODES:
                return None
        return None

    def _next(self, matcher: GrammarMatcher) -> tuple[NDArray[np.int64], bool]:
        """The bytes that may follow, and whether the output may end."""
        self._fill(matcher)
        return self._vocabulary.allowed_bytes(self._mask), self._vocabulary.allows_end(self._mask)

    def _fill(self, matcher: GrammarMatcher) -> None:
        matcher.fill_next_token_bitmask(self._masks)
        if self._allowed is not None:
            self._mask &= self._allowed


def _is_in_string(allowed: NDArray[np.int64]) -> bool:
    """Whether a place in text with JSON is inside a string: it allows bytes that no place outside does; or no quote, bracket
    or value, as inside of names."""
    known = set(allowed.tolist())
    return bool(known & set(_ONLY_IN_STRINGS)) or not known & set(b'"' + _CLOSERS + _VALUES)


def samples(allowed: NDArray[np.int64]) -> list[int]:
    """Bytes to try for all allowed ones: of letters and digits a few, since patterns seldom tell them apart."""
    every: list[int] = allowed.tolist()
    plain = [byte for byte in every if byte < 128 and byte != 0x5C]
    if not plain:
        return every[:MAX_WIDTH]
    if len(plain) <= MAX_WIDTH:
        return plain
    chars = [chr(byte) for byte in plain]
    few = [char for kind in (str.islower, str.isupper, str.isdigit) for char in list(filter(kind, chars))[:2]]
    return [ord(char) for char in (*few, *(char for char in chars if not char.isalnum()))]
