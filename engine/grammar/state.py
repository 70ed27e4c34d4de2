"""Where the output of one request stands in its grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from xgrammar import GrammarMatcher

if TYPE_CHECKING:
    from engine.grammar.compiling import CompiledGrammar


MAX_FORCED_BYTES = 128  # of one proposal


class GrammarState:
    """Follows committed tokens. Drafts are tried and rolled back, in time by their number and not by the output's length.

    Args:
        token_ids: the output so far.
    """

    def __init__(self, grammar: "CompiledGrammar", token_ids: Sequence[int] = ()) -> None:
        self.grammar = grammar
        self._matcher = GrammarMatcher(grammar.compiled)
        self.advance(token_ids)

    @property
    def has_ended(self) -> bool:
        """Whether the end of sequence was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follows committed tokens. What comes behind the end is ignored.

        Raises:
            ValueError: the grammar does not allow them, which is a bug: the masks do not allow them either.
        """
        num = self._accept(token_ids)
        if num < len(token_ids) and not self.has_ended:
            raise ValueError(f"token {token_ids[num]} does not fit the grammar of the request")

    def num_valid(self, draft_ids: Sequence[int]) -> int:
        """How many of these draft tokens the grammar allows, from the first on."""
        num = self._accept(draft_ids)
        self._matcher.rollback(num)
        return num

    def masks(self, draft_ids: Sequence[int], num_before: int, masked_ids: Sequence[int], num_masked: int) -> torch.Tensor:
        """The allowed tokens of rows ``num_before`` to len(draft_ids), packed as of `GrammarVocabulary.new_masks`.

        Row i follows draft_ids[:i]. Rows behind a draft that the grammar forbids, or behind the end, allow all tokens:
        they are never reached.

        Args:
            masked_ids: not allowed in the first ``num_masked`` of these rows, unless the grammar allows nothing else.
        """
        masks = self.grammar.vocabulary.new_masks(len(draft_ids) + 1 - num_before)
        num_accepted = self._accept(draft_ids[:num_before])
        if num_accepted == num_before:
            for row in range(len(masks)):
                if self._matcher.is_terminated():
                    break
                self._matcher.fill_next_token_bitmask(masks, row)
                if row < num_masked:
                    _forbid(masks[row], masked_ids)
                drafts = draft_ids[num_before + row : num_before + row + 1]
                if not drafts or not self._accept(drafts):
                    break
                num_accepted += 1
        self._matcher.rollback(num_accepted)
        return masks

    def forced(self) -> list[int]:
        """The tokens of the text that the grammar leaves no choice about, as the tokenizer splits it, with the end."""
        vocabulary, matcher, text = self.grammar.vocabulary, self._matcher.fork(), bytearray()
        masks = vocabulary.new_masks(1)
        mask, end = masks[0].numpy(), list[int]()
        while len(text) < MAX_FORCED_BYTES and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(masks)
            allowed, may_end = vocabulary.allowed_bytes(mask), vocabulary.allows_end(mask)
            if may_end and not len(allowed):
                end = [vocabulary.eos_token_ids[0]]
                break
            if may_end or len(allowed) != 1:
                break
            byte = bytes(allowed.astype(np.uint8))
            matcher.accept_string(byte)
            text += byte
        return vocabulary.usual_tokens_of(text.decode(errors="ignore")) + end if text or end else []

    def fork(self) -> GrammarMatcher:
        """A matcher of its own at this place."""
        return self._matcher.fork()

    def _accept(self, token_ids: Sequence[int]) -> int:
        """How many were accepted. The matcher has followed them."""
        matcher, vocabulary = self._matcher, self.grammar.vocabulary
        for i, token_id in enumerate(token_ids):
            # xgrammar logs a warning for each token that it is asked for after the end, and for each special one.
            is_possible = not matcher.is_terminated() and (vocabulary.token_bytes[token_id] or vocabulary.ends(token_id))
            if not is_possible or not matcher.accept_token(token_id):
                return i
        return len(token_ids)


def _forbid(mask: torch.Tensor, token_ids: Sequence[int]) -> None:
    rest = mask.numpy().copy()
    for token_id in token_ids:
        rest[token_id // 32] &= ~(1 << (token_id % 32)) if token_id % 32 < 31 else 0x7FFFFFFF
    if rest.any():
        mask.copy_(torch.from_numpy(rest))
