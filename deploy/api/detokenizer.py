"""Incremental detokenization."""

import codecs
from collections.abc import Collection

from deploy.api.tokenizer import Tokenizer


class Detokenizer:
    """A character that spans several tokens is returned with the last of them. Invalid bytes become U+FFFD at once, an
    incomplete character in ``flush``.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> None:
        """``shown``: special tokens that are text all the same."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._token_bytes = tokenizer.token_bytes if skip_special_tokens else tokenizer.all_token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._shown:
            return self._utf8.decode(self._tokenizer.all_token_bytes(token_id))
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
