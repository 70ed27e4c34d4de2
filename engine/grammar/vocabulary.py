"""The vocabulary as grammars see it: the bytes of each token, and the tokens of given bytes."""

import re
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray
from tokenizers import Tokenizer
from xgrammar import GrammarMatcher

from engine.grammar.json_pattern import NEVER_RAW
from engine.models.tokenizer import read_token_bytes, read_vocabulary


class GrammarVocabulary:
    """Immutable, so threads can share it.

    Args:
        folder: of a Hugging Face model.
        vocab_size: the number of logits; ids beyond the tokenizer's are padding.
        eos_token_ids: the tokens that end an output.

    Raises:
        ModelUnavailable: the tokenizer cannot be read, or its bytes are not known.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.folder = folder
        self.size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.token_bytes = read_token_bytes(folder, vocab_size)
        special = read_vocabulary(folder).special.keys() - set(eos_token_ids)
        self.special_ids = frozenset(i for i in special if i < vocab_size)
        # xgrammar accepts no token without bytes. Special tokens get bytes that are no UTF-8, so that a grammar allows one
        # where it names its id, and never as text.
        named = (b"\xff%d" % i if i in self.special_ids else spelled for i, spelled in enumerate(self.token_bytes))
        self.info = xgrammar.TokenizerInfo(
            list(named), xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._ids = {spelled: i for i, spelled in reversed(list(enumerate(self.token_bytes))) if spelled}
        self._longest = max(map(len, self._ids))
        # The bits of the one-byte tokens in a mask, by byte; bytes without a token have the word of no allowed token.
        ids = [self._ids.get(bytes([byte])) for byte in range(256)]
        self._has_token = np.array([token_id is not None for token_id in ids])
        known = np.array([token_id or 0 for token_id in ids])
        self._words, self._bits = known // 32, (known % 32).astype(np.int32)
        self._eos_words = np.array([token_id // 32 for token_id in eos_token_ids])
        self._eos_bits = np.array([token_id % 32 for token_id in eos_token_ids], np.int32)

    @cached_property
    def string_masks(self) -> "StringMasks":
        """Takes a while at the first call."""
        return StringMasks(self.token_bytes, self._ids)

    def ends(self, token_id: int) -> bool:
        return token_id in self.eos_token_ids

    def new_masks(self, num_rows: int) -> torch.Tensor:
        """Masks that allow all tokens, (num_rows, ceil(size / 32)) int32: bit i of word w is token 32 w + i."""
        return torch.full((num_rows, -(-self.size // 32)), -1, dtype=torch.int32)

    def allowed_bytes(self, mask: NDArray[np.int32]) -> NDArray[np.int64]:
        """The bytes whose one-byte token a mask row allows, ascending."""
        return np.flatnonzero(((mask[self._words] >> self._bits) & 1).astype(bool) & self._has_token)

    def allows_end(self, mask: NDArray[np.int32]) -> bool:
        return bool(((mask[self._eos_words] >> self._eos_bits) & 1).any())

    def tokens_of(self, spelled: bytes) -> list[int]:
        """The longest tokens from the left. The tokens of a rest are then the rest of the tokens."""
        token_ids, at = [], 0
        while at < len(spelled):
            for end in range(min(len(spelled), at + self._longest), at, -1):
                token_id = self._ids.get(spelled[at:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    at = end
                    break
            else:
                raise ValueError(f"no token has the byte {spelled[at]}")
        return token_ids

    def usual_tokens_of(self, text: str) -> list[int]:
        """As the tokenizer splits it, which is how the model most likely writes it."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids


# Masks of the places in strings whose characters a grammar counts (`json_rules`). xgrammar would check every token of the
# vocabulary at each of these places. What fits there depends only on how many characters may follow, so that the tokens are
# sorted by that once a vocabulary. The masks are a part of what the grammar allows: tokens of more than MAX_CHARS characters
# are left out, and some that go on behind the end of the string.
MAX_CHARS = 32  # of a token
MAX_CLOSING = 2  # characters of a token before the quote that ends the string
_ANY = "\U0010ffff".encode()  # a character that counted strings can hold
_LINE_END = b"\\n"  # one that those on one line cannot hold
_NEVER = NEVER_RAW.encode()
_CHAR = re.compile(
    rf'[^"\\\x00-\x1f{NEVER_RAW}]|\\(?:["\\/bfnrt]|u(?:[0-9A-Ca-cEFef][0-9A-Fa-f]{{3}}|[Dd](?:[0-7][0-9A-Fa-f]{{2}}'
    r"|[89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2})))"
)
# What tokens of a string on one line do not hold: ends of lines, and codes that may be one.
_LINE_ENDS = re.compile(rb"\\[nru]|\xe2\x80[\xa8\xa9]")
_PLAIN = re.compile(rb"[ !#-\[\]-\x7f]*")
_BEGUN = ("\\", "\\u")  # escapes


class StringMasks:
    """Immutable. ``ids``: of tokens by their bytes."""

    def __init__(self, token_bytes: Sequence[bytes], ids: dict[bytes, int]) -> None:
        kinds = [_chars(spelled) if spelled else (0, b"") for spelled in token_bytes]
        self._of_any = _TokensByLength(token_bytes, ids, kinds)
        ends_line = (_LINE_ENDS.search(spelled) for spelled in token_bytes)
        self._of_line = _TokensByLength(
            token_bytes, ids, [(0, b"") if ends else kind for ends, kind in zip(ends_line, kinds, strict=True)]
        )

    def fill(self, matcher: GrammarMatcher, masks: torch.Tensor, row: int = 0) -> None:
        """As ``matcher.fill_next_token_bitmask``. ``matcher``: not terminated; it is left as it was."""
        num_left = chars_left(matcher)
        if not num_left:
            matcher.fill_next_token_bitmask(masks, row)
            return
        mask: NDArray[np.int32] = masks[row].numpy()
        if _fits(matcher, num_left * _LINE_END):
            mask[:] = self._of_any.of_text[num_left]
            self._allow_ends(self._of_any, matcher, num_left * [_ANY], masks, row)
            return
        num_any = _num_fitting(matcher, _LINE_END, num_left)
        mask[:] = self._of_line.of_text[num_left] | self._of_any.of_text[num_any]
        self._allow_ends(self._of_line, matcher, num_left * [_ANY], masks, row)
        self._allow_ends(self._of_any, matcher, num_any * [_LINE_END], masks, row)

    @staticmethod
    def _allow_ends(
        tokens: "_TokensByLength", matcher: GrammarMatcher, chars: Sequence[bytes], masks: torch.Tensor, row: int
    ) -> None:
        """Of strings that may go on by ``chars``."""
        mask: NDArray[np.int32] = masks[row].numpy()
        after = torch.empty_like(masks[:1])
        for num_chars in range(min(len(chars), MAX_CLOSING) + 1):
            if matcher.accept_string(b"".join(chars[:num_chars]) + b'"'):
                _allow(mask, tokens.ends[num_chars])
                token_ids, rest_ids = tokens.passes[num_chars]
                matcher.fill_next_token_bitmask(after)
                allowed = after[0].numpy()[rest_ids // 32] >> (rest_ids % 32) & 1
                _allow(mask, token_ids[allowed.astype(bool)])
                matcher.rollback(1)


class _TokensByLength:
    """Tokens by how many characters of a string they hold, and what of the end.

    Args:
        kinds: of each token, as of `_chars`.
    """

    def __init__(self, token_bytes: Sequence[bytes], ids: dict[bytes, int], kinds: Sequence[tuple[int, bytes]]) -> None:
        texts, ends, passes = (defaultdict[int, list[Any]](list) for _ in range(3))
        for token_id, (num_chars, rest) in enumerate(kinds):
            if rest == b'"' and num_chars <= MAX_CLOSING:
                ends[num_chars].append(token_id)
            elif rest and num_chars <= MAX_CLOSING and rest[1:] in ids:
                passes[num_chars].append((token_id, ids[rest[1:]]))
            elif not rest and 0 < num_chars <= MAX_CHARS:
                texts[num_chars].append(token_id)
        of_text = np.zeros((MAX_CHARS + 1, -(-len(token_bytes) // 32)), np.int32)
        for num_chars, token_ids in texts.items():
            _allow(of_text[num_chars], np.array(token_ids))
        self.of_text = np.bitwise_or.accumulate(of_text, axis=0)  # by characters that may follow
        # By the characters of a token before the quote: those that end with it, and those that go on, with the ids of that.
        self.ends = [np.array(ends[num], np.int64) for num in range(MAX_CLOSING + 1)]
        self.passes = [np.array(passes[num], np.int64).reshape(-1, 2).T for num in range(MAX_CLOSING + 1)]


def chars_left(matcher: GrammarMatcher) -> int:
    """The characters that a counted string may still have here, at most MAX_CHARS; 0: it has ended, or this is no place
    between characters of one."""
    if not _fits(matcher, _ANY) or _fits(matcher, _NEVER):
        return 0
    return _num_fitting(matcher, _ANY, MAX_CHARS)


def _num_fitting(matcher: GrammarMatcher, char: bytes, most: int) -> int:
    """How often the character may follow, at most ``most`` times."""
    fits, exceeds, middle = 0, most + 1, most
    while exceeds - fits > 1:
        if _fits(matcher, middle * char):
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
