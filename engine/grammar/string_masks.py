"""Masks of the places in strings whose characters a grammar counts (`string_rules`).

xgrammar would check every token of the vocabulary at each of these places. What fits there depends only on how many
characters may follow, so that the tokens are sorted by that once a vocabulary. The masks are a part of what the grammar
allows: tokens of more than MAX_CHARS characters are left out, and some that go on behind the end of the string.
"""

import re
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from xgrammar import GrammarMatcher

from engine.grammar.json_pattern import NEVER_RAW

MAX_CHARS = 32  # of a token
MAX_CLOSING = 2  # characters of a token before the quote that ends the string
_ANY = "\U0010ffff".encode()  # a character that counted strings can hold
_NEVER = NEVER_RAW.encode()
_CHAR = re.compile(
    rf'[^"\\\x00-\x1f{NEVER_RAW}]|\\(?:["\\/bfnrt]|u(?:[0-9A-Ca-cEFef][0-9A-Fa-f]{{3}}|[Dd](?:[0-7][0-9A-Fa-f]{{2}}'
    r"|[89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2})))"
)
_PLAIN = re.compile(rb"[ !#-\[\]-\x7f]*")
_BEGUN = ("\\", "\\u")  # escapes


class StringMasks:
    """Immutable. ``ids``: of tokens by their bytes."""

    def __init__(self, token_bytes: Sequence[bytes], ids: dict[bytes, int]) -> None:
        num_words = -(-len(token_bytes) // 32)
        texts: defaultdict[int, list[int]] = defaultdict(list)
        ends: defaultdict[int, list[int]] = defaultdict(list)
        passes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for token_id, spelled in enumerate(token_bytes):
            num_chars, rest = _chars(spelled) if spelled else (0, b"")
            if rest == b'"' and num_chars <= MAX_CLOSING:
                ends[num_chars].append(token_id)
            elif rest and num_chars <= MAX_CLOSING and rest[1:] in ids:
                passes[num_chars].append((token_id, ids[rest[1:]]))
            elif not rest and 0 < num_chars <= MAX_CHARS:
                texts[num_chars].append(token_id)
        of_text = np.zeros((MAX_CHARS + 1, num_words), np.int32)
        for num_chars, token_ids in texts.items():
            _allow(of_text[num_chars], np.array(token_ids))
        self._of_text = np.bitwise_or.accumulate(of_text, axis=0)  # by characters that may follow
        # By the characters of a token before the quote: those that end with it, and those that go on, with the ids of that.
        self._ends = [np.array(ends[num], np.int64) for num in range(MAX_CLOSING + 1)]
        self._passes = [np.array(passes[num], np.int64).reshape(-1, 2).T for num in range(MAX_CLOSING + 1)]

    def fill(self, matcher: GrammarMatcher, masks: torch.Tensor, row: int = 0) -> None:
        """As ``matcher.fill_next_token_bitmask``. ``matcher``: not terminated; it is left as it was."""
        num_left = chars_left(matcher)
        if not num_left:
            matcher.fill_next_token_bitmask(masks, row)
            return
        mask: NDArray[np.int32] = masks[row].numpy()
        mask[:] = self._of_text[num_left]
        after = torch.empty_like(masks[:1])
        for num_chars in range(min(num_left, MAX_CLOSING) + 1):
            if matcher.accept_string(num_chars * _ANY + b'"'):
                _allow(mask, self._ends[num_chars])
                token_ids, rest_ids = self._passes[num_chars]
                matcher.fill_next_token_bitmask(after)
                allowed = after[0].numpy()[rest_ids // 32] >> (rest_ids % 32) & 1
                _allow(mask, token_ids[allowed.astype(bool)])
                matcher.rollback(1)


def chars_left(matcher: GrammarMatcher) -> int:
    """The characters that a counted string may still have here, at most MAX_CHARS; 0: it has ended, or this is no place
    between characters of one."""
    if not _fits(matcher, _ANY) or _fits(matcher, _NEVER):
        return 0
    fits, exceeds = 1, MAX_CHARS + 1
    middle = MAX_CHARS
    while exceeds - fits > 1:
        if _fits(matcher, middle * _ANY):
            fits = middle
        else:
            exceeds = middle
        middle = (fits + exceeds) // 2
    return fits


def _fits(matcher: GrammarMatcher, text: bytes) -> bool:
    if not matcher.accept_string(text):
        return False
    matcher.rollback(1)
    return True


def _chars(spelled: bytes) -> tuple[int, bytes]:
    """How many characters of a counted string these bytes begin with, one that is begun at their end included; and the rest
    from the quote that ends the string on. (0, b""): a string cannot hold them."""
    if _PLAIN.fullmatch(spelled):
        return len(spelled), b""
    decoder = getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(spelled)
    except UnicodeDecodeError:
        return 0, b""
    num_chars, at = 0, 0
    while found := _CHAR.match(text, at):
        num_chars, at = num_chars + 1, found.end()
    begun, rest = decoder.getstate()[0], text[at:]
    if rest.startswith('"'):
        return num_chars, rest.encode() + begun
    if rest and (begun or rest not in _BEGUN):
        return 0, b""
    return num_chars + bool(rest or begun), b""


def _allow(mask: NDArray[np.int32], token_ids: NDArray[np.int64]) -> None:
    np.bitwise_or.at(mask, token_ids // 32, (np.int64(1) << token_ids % 32).astype(np.uint32).view(np.int32))
