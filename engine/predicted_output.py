"""Drafts from the output that a request's caller predicted (OpenAI's `prediction`)."""

from collections.abc import Sequence

from cluster.types import MAX_DRAFT_LEN
from engine.acceptance import common_prefix_len

LONGEST_MATCH = 8  # last tokens of the output that are looked for, from the longest match to one token
NEAR = 64  # tokens behind the present place within which a single token counts as a match
FIRST_MATCH = 8  # a prediction counts as right for so many tokens at first


class PredictedOutput:
    """Where the output stands in its prediction. Behind a difference that is where its last tokens occur next, or anywhere.

    Args:
        token_ids: the prediction, at least one token of less than 0x110000.
        output: the tokens so far.
    """

    def __init__(self, token_ids: Sequence[int], output: Sequence[int] = ()) -> None:
        self._token_ids = tuple(token_ids)
        self._text = "".join(map(chr, token_ids))  # a character per token: finding in it takes 1 ns per token or less
        self._tail = ""  # last tokens of the output, likewise
        self._at = 0  # the token of the prediction that should come next
        self._num_matched = FIRST_MATCH  # tokens before it that the output has, too; 0: the place is lost
        self.advance(output)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follows committed tokens."""
        num = common_prefix_len(token_ids, self._token_ids[self._at : self._at + len(token_ids)])
        self._at += num
        self._tail = (self._tail + "".join(map(chr, token_ids[-LONGEST_MATCH:])))[-LONGEST_MATCH:]
        if num == len(token_ids):
            self._num_matched += num
        else:
            self._find()

    def draft(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The next tokens, as many as one proposal may have, and their confidences: after m matches m / (m + 1)."""
        num = self._num_matched
        token_ids = self._token_ids[self._at : self._at + MAX_DRAFT_LEN] if num else ()
        return token_ids, tuple([m / (m + 1) for m in range(num, num + len(token_ids))])

    def _find(self) -> None:
        text, tail, start = self._text, self._tail, self._at
        near = text.find(tail[-1:], start, start + NEAR)
        self._num_matched = 0
        if near >= 0:
            self._at, self._num_matched = near + 1, 1
        for num in range(2, len(tail) + 1):  # where few tokens do not occur, more do not either
            last = tail[-num:]
            found = text.find(last, max(0, start + 1 - num))  # a match ends behind the present place
            if found < 0 and (found := text.find(last)) < 0:
                break
            self._at, self._num_matched = found + num, num
