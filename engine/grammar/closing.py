"""The shortest end of an output that one can find quickly: how a request ends within its max_tokens.

JSON, alone or in a structural tag, is closed greedily: at each byte a string, array or object ends where the grammar lets
it; where it does not, the text of the string or number is searched breadth first. Where a rest of a known output fits, it is
taken. Other grammars are searched breadth first. All searches give up at a fixed cost: every other stream waits for them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from xgrammar import GrammarMatcher

from cluster.sampling_params import GrammarKind
from engine.grammar.vocabulary import GrammarVocabulary, chars_left

MAX_BYTES = 4096  # of an end
MAX_WIDTH = 24  # states of one length
FEW, MANY = 6, 24  # bytes that are all tried after a state; of more, some are
MAX_DETOURS = 12  # choices of a greedy end that are tried another way
MAX_COST = 3072  # of one search; the cost of asking a matcher, about 5 us. Every other stream waits meanwhile
FILL_COST = 8  # of a mask
MAX_RESTS = 8  # first steps of a greedy end at which the rests of a known output are tried
SHORT = 512  # bytes of an output of which all rests are tried, and not those alone that begin with a bracket or quote
PROBE_LEN = 16  # bytes of a rest that are tried before all of it
MAX_FORCED_WORDS = 16  # of a mask that leaves no choice

_CLOSERS = (b"}", b"]", b",", b":")
_VALUES = tuple(bytes([byte]) for byte in b'0123456789ntf"-[{')  # how a value begins, the shortest first

_SEPARATORS = "-@.:/_ "  # that patterns often demand
_AFTER_VALUES = b"}],"
_RESTS = b'"}],'  # what a rest begins with
_ONLY_IN_STRINGS = frozenset(b"#!qZ")
_STRUCTURE = frozenset(b'"'.join((*_CLOSERS, *_VALUES)))
_FILLERS = (b"a", b"0", b"A")
_NUM_FILLERS: tuple[int, ...] = (*range(1, 17), 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


Goal = Callable[[NDArray[np.int32], bytes], bool]  # of the mask at a place, and of the bytes that lead there


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


class _TooDearError(Exception):
    """A search has cost MAX_COST."""


class Closing:
    """Finds ends for one vocabulary. Not thread-safe.

    Args:
        kind: of the grammar.
        fill: writes the mask of a matcher's place into the first of masks.
        names: the property names that are tried first where an object needs one more: the required ones.
        whole: a short output. A rest of it may end another one.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        kind: GrammarKind,
        fill: Callable[[GrammarMatcher, torch.Tensor], None],
        names: Sequence[bytes] = (),
        whole: bytes = b"",
    ) -> None:
        self._vocabulary = vocabulary
        self._is_greedy = kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT, GrammarKind.STRUCTURAL_TAG)
        self._is_tag = kind is GrammarKind.STRUCTURAL_TAG
        self._names = names
        self._fill_masks = fill
        self._whole = whole
        self._starts = [i for i in reversed(range(len(whole))) if not i or len(whole) <= SHORT or whole[i] in _RESTS]
        self._masks = vocabulary.new_masks(1)
        self._mask: NDArray[np.int32] = self._masks[0].numpy()
        self._cost_left = 0
        self._known_texts: dict[bytes, bytes] = {}  # of this search: by what a string may hold next, a text that ends it

    def shortest(self, matcher: GrammarMatcher, scan: JsonScan, max_cost: int = MAX_COST) -> bytes | None:
        """An end of the output that ``matcher`` has followed; b"" if it may end here. None: none was found at that cost.

        A function of the matcher's place alone. ``matcher`` is left as it was.
        """
        self._cost_left = max_cost
        self._known_texts.clear()
        try:
            if not self._is_greedy:
                return self._search(matcher, lambda mask, _: self._vocabulary.allows_end(mask))
            return self._of_json(matcher, scan)
        except _TooDearError:
            return None

    def _of_json(self, matcher: GrammarMatcher, scan: JsonScan) -> bytes | None:
        end, num_choices = self._greedy(matcher, scan, {})
        for i in range(min(num_choices, MAX_DETOURS) if end is None else 0):
            for option in range(1, len(_VALUES) + len(self._names)):
                try:
                    found, _ = self._greedy(matcher, scan, {i: option})
                except IndexError:  # there are no more options
                    break
                if found is not None and (end is None or len(found) < len(end)):
                    end = found
            if end is not None:
                break
        return end

    def _greedy(self, matcher: GrammarMatcher, scan: JsonScan, detours: dict[int, int]) -> tuple[bytes | None, int]:
        """The end, and how many choices there were on the way. ``detours``: by choice, the option to take; otherwise it is
        the first. Raises IndexError: there are not so many options."""
        matcher, scan, out, num_choices = matcher.fork(), scan.copy(), bytearray(), 0
        has_closed = False  # a string, by the last byte
        for num_steps in range(MAX_BYTES):
            self._pay(1)
            if matcher.is_completed() or len(out) > MAX_BYTES:
                return (bytes(out) if matcher.is_completed() else None), num_choices
            if num_steps < MAX_RESTS:
                rest = self._rest(matcher)
                if rest is not None:
                    return bytes(out) + rest, num_choices
            in_string, step = scan.in_string, b""
            if not self._is_tag:
                step = next((one for one in ((b'"',) if in_string else _CLOSERS) if matcher.accept_string(one)), b"")
            if not step:
                allowed, _ = self._next(matcher)
                step = self._forced()
                if step:
                    has_closed = False
                elif self._is_tag:
                    in_string = _is_in_string(allowed)
                    closes = in_string and 0x22 in allowed
                    if closes and has_closed:
                        return None, num_choices  # no string was closed: this is free text, which nothing here ends
                    has_closed = closes
                    closers = (b'"',) if in_string else (*_CLOSERS, b'"')
                    step = next((one for one in closers if one[0] in allowed), b"")
                if not step:
                    options = self._in_string(matcher) if in_string else self._outside(matcher)
                    skipped = detours.get(num_choices, 0)
                    step = next(islice(options, skipped, None), b"")
                    if not step and skipped:
                        raise IndexError
                    num_choices += 1
                if not step or not matcher.accept_string(step):
                    return None, num_choices
            out += step
            scan.feed(step)
        return None, num_choices

    def _rest(self, matcher: GrammarMatcher) -> bytes | None:
        """The shortest rest of ``whole`` that ends the output."""
        self._pay(1 + len(self._starts) // 4)
        trial = matcher.fork()
        for start in self._starts:
            rest = self._whole[start:]
            if trial.accept_string(rest[:PROBE_LEN]):
                self._pay(1 + len(rest) // 64)
                if (len(rest) <= PROBE_LEN or trial.accept_string(rest[PROBE_LEN:])) and trial.is_completed():
                    return rest
                trial = matcher.fork()
        return None

    def _forced(self) -> bytes:
        """The longest of the tokens that the mask allows, if the others are parts of it: text without a choice."""
        words = np.flatnonzero(self._mask).tolist()
        if len(words) > MAX_FORCED_WORDS:
            return b""
        bits = [(word, int(self._mask[word])) for word in words]
        token_ids = [32 * word + bit for word, value in bits for bit in range(32) if value >> bit & 1]
        spelled = [self._vocabulary.token_bytes[i] for i in token_ids if i < self._vocabulary.size]
        longest = max(spelled, key=len, default=b"")
        if not all(one and longest.startswith(one) for one in spelled):
            return b""
        # No token may show the choice behind a value: with `""` and `"",` but no `""}` in a vocabulary, only `""` is forced.
        cut = next((i for i in range(1, len(longest)) if longest[i] in _AFTER_VALUES), len(longest))
        return longest[:cut]

    def _outside(self, matcher: GrammarMatcher) -> Iterator[bytes]:
        """Ways to begin or go on with a value."""
        found = False
        for step in _VALUES:
            self._pay(1)
            if matcher.fork().accept_string(step):
                found = True
                yield step
        if not found and len(allowed := self._next(matcher)[0]):
            yield bytes([int(allowed[0])])

    def _in_string(self, matcher: GrammarMatcher) -> Iterator[bytes]:
        """Ways to end a string that cannot end here: first as the name of a property, then as a value."""
        found = False
        for name in self._names:
            self._pay(1)
            if matcher.fork().accept_string(name + b'":'):
                found = True
                yield name + b'"'
        text = None if found else self._text(matcher)
        if text:
            yield text

    def _text(self, matcher: GrammarMatcher) -> bytes | None:
        self._fill(matcher)
        place = self._mask.tobytes()
        known = self._known_texts.get(place)
        if known is not None and matcher.fork().accept_string(known + b'"'):
            return known
        found = self._repeated(matcher) or self._search(matcher, self._ends_text)
        if found:
            self._known_texts[place] = found
        return found

    def _ends_text(self, mask: NDArray[np.int32], out: bytes) -> bool:
        is_escaped = (len(out) - len(out.rstrip(b"\\"))) % 2 == 1
        return not is_escaped and 0x22 in self._vocabulary.allowed_bytes(mask)

    def _repeated(self, matcher: GrammarMatcher) -> bytes | None:
        """One character as often as it takes."""
        if chars_left(matcher):
            return self._counted(matcher)
        for char in _FILLERS:
            if not matcher.fork().accept_string(char):
                continue
            for num in _NUM_FILLERS:
                self._pay(1)
                if matcher.fork().accept_string(char * num + b'"'):
                    return char * num
        return None

    def _counted(self, matcher: GrammarMatcher) -> bytes | None:
        """Of a string whose characters are counted: any character will do."""
        trial, char = matcher.fork(), _FILLERS[0]
        for num in range(MAX_BYTES):
            self._pay(num % 2)
            if trial.accept_string(b'"'):
                return char * num
            if not trial.accept_string(char):
                return None
        return None

    def _search(self, matcher: GrammarMatcher, is_goal: Goal) -> bytes | None:
        """Over few bytes first, then, if that has found nothing at two thirds of what may still be spent, over more."""
        spared = self._cost_left // 3
        self._cost_left -= spared
        try:
            found = self._search_over(FEW, matcher, is_goal)
        except _TooDearError:
            found = None
        self._cost_left += spared
        return self._search_over(MANY, matcher, is_goal) if found is None else found

    def _search_over(self, num_bytes: int, matcher: GrammarMatcher, is_goal: Goal) -> bytes | None:
        """Breadth first, states with the same mask once per length."""
        self._fill(matcher)
        nodes = [(matcher.fork(), self._mask.copy(), b"")]
        for _ in range(MAX_BYTES):
            following: dict[bytes, tuple[GrammarMatcher, NDArray[np.int32], bytes]] = {}
            for state, mask, out in nodes:
                if is_goal(mask, out):
                    return out
                for byte in samples(self._vocabulary.allowed_bytes(mask), num_bytes):
                    child = state.fork()
                    if child.accept_string(bytes([byte])):
                        self._fill(child)
                        mask_after = self._mask.copy()
                        following.setdefault(mask_after.tobytes(), (child, mask_after, out + bytes([byte])))
            nodes = list(following.values())[:MAX_WIDTH]
            if not nodes:
                return None
        return None

    def _next(self, matcher: GrammarMatcher) -> tuple[NDArray[np.int64], bool]:
        """The bytes that may follow, and whether the output may end."""
        self._fill(matcher)
        return self._vocabulary.allowed_bytes(self._mask), self._vocabulary.allows_end(self._mask)

    def _pay(self, cost: int) -> None:
        """Raises _TooDearError: the search has cost too much."""
        self._cost_left -= cost
        if self._cost_left < 0:
            raise _TooDearError

    def _fill(self, matcher: GrammarMatcher) -> None:
        self._pay(FILL_COST)
        self._fill_masks(matcher, self._masks)


def _is_in_string(allowed: NDArray[np.int64]) -> bool:
    """Whether a place in text with JSON is inside a string: it allows bytes that no place outside does; or no quote, bracket
    or value, as inside of names."""
    known = set(allowed.tolist())
    return bool(known & _ONLY_IN_STRINGS) or not known & _STRUCTURE


def samples(allowed: NDArray[np.int64], num_bytes: int = MANY) -> list[int]:
    """Bytes to try for all allowed ones: of letters and digits a few, since patterns seldom tell them apart; a backslash
    last, where many are tried."""
    every: list[int] = allowed.tolist()
    plain = [byte for byte in every if byte < 128 and byte != 0x5C]
    if not plain:
        return every[:num_bytes]
    escape = [0x5C] if num_bytes == MANY and 0x5C in every else []
    if len(plain) <= num_bytes:
        return [*plain, *escape]
    chars = [chr(byte) for byte in plain]
    few = [
        char
        for kind in (str.islower, str.isupper, str.isdigit)
        for char in list(filter(kind, chars))[: 2 if num_bytes == MANY else 1]
    ]
    others = sorted((char for char in chars if not char.isalnum()), key=lambda char: (char not in _SEPARATORS, char))
    return [*(ord(char) for char in (*few, *(others if num_bytes == MANY else others[:num_bytes]))), *escape]
