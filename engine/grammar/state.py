"""Where the output of one request stands in its grammar."""

import json
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch
from xgrammar import GrammarMatcher

from cluster.sampling_params import GrammarKind
from engine.grammar.closing import MAX_COST, Closing, JsonScan

if TYPE_CHECKING:
    from engine.grammar.compiling import CompiledGrammar


MAX_FORCED_BYTES = 128  # of one proposal


class GrammarState:
    """Follows committed tokens. Drafts are tried and rolled back, in time by their number and not by the output's length.

    Args:
        token_ids: the output so far.
        max_tokens: of the whole output.
    """

    def __init__(self, grammar: "CompiledGrammar", token_ids: Sequence[int] = (), max_tokens: int = 0) -> None:
        self.grammar = grammar
        self._num_free = max(
            max_tokens // 2, 2 * (grammar.shortest_len or 0)
        )  # of the tokens left: ends are looked for then
        self._matcher = GrammarMatcher(grammar.compiled)
        names = [json.dumps(name, ensure_ascii=False)[1:-1].encode() for name in sorted(grammar.required_names)]
        self._closing = Closing(grammar.vocabulary, grammar.grammar.kind, grammar.fill, names, grammar.shortest)
        self._scan = JsonScan()  # of the committed output
        self.advance(token_ids)

    @property
    def kind(self) -> GrammarKind:
        return self.grammar.grammar.kind

    @property
    def has_ended(self) -> bool:
        """Whether the end of sequence was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follows committed tokens. What comes behind the end is ignored.

        Raises:
            ValueError: the grammar does not allow them, which is a bug: the sampler ends such a request (``first_refused``).
        """
        num = self._accept(token_ids)
        for token_id in token_ids[:num] if self.grammar.is_json else ():
            self._scan.feed(self.grammar.vocabulary.token_bytes[token_id])
        if num < len(token_ids) and not self.has_ended:
            raise ValueError(f"token {token_ids[num]} does not fit the grammar of the request")

    def num_valid(self, draft_ids: Sequence[int]) -> int:
        """How many of these draft tokens the grammar allows, from the first on."""
        num = self._accept(draft_ids)
        self._matcher.rollback(num)
        return num

    def first_refused(self, token_ids: Sequence[int]) -> int | None:
        """The index of the first of these tokens that the grammar refuses; those behind its end do not count."""
        num = self._accept(token_ids)
        has_ended = self.has_ended
        self._matcher.rollback(num)
        return None if has_ended or num == len(token_ids) else num

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
                self.grammar.fill(self._matcher, masks, row)
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
            self.grammar.fill(matcher, masks)
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

    def end_in_time(self, draft_ids: Sequence[int], num_before: int, chosen: list[int], num_left: int) -> list[int]:
        """The tokens chosen for the rows from ``num_before`` on. Those after which the output could not end are replaced by
        the next token of the shortest end.

        A function of drafts, chosen tokens and ``num_left`` alone. Rows are looked at from half of the tokens on, and
        from the beginning where few tokens are left for the shortest output.

        Args:
            num_left: tokens that may follow the committed ones.
        """
        grammar, vocabulary = self.grammar, self.grammar.vocabulary
        if grammar.shortest_len is None or num_left - num_before - len(chosen) >= self._num_free:
            return chosen
        matcher, scan, kept = self._matcher.fork(), self._scan.copy(), list(chosen)
        for row, token_id in enumerate((*draft_ids[:num_before], *chosen), start=-num_before):
            if vocabulary.ends(token_id) or not 0 <= token_id < vocabulary.size:
                break
            num_after = num_left - num_before - row - 1
            before, scan_before = matcher.fork(), scan.copy()
            if not matcher.accept_token(token_id):
                break
            scan.feed(vocabulary.token_bytes[token_id])
            if row < 0:
                continue
            if num_after < self._num_free and self._end_len(matcher, scan) > num_after:
                end = self._closing.shortest(before, scan_before)
                token_ids = [] if end is None else [*vocabulary.tokens_of(end), vocabulary.eos_token_ids[0]]
                if 0 < len(token_ids) <= num_after + 1:
                    token_id = kept[row] = token_ids[0]
                    matcher, scan = before, scan_before
                    if vocabulary.ends(token_id) or not matcher.accept_token(token_id):
                        break
                    scan.feed(vocabulary.token_bytes[token_id])
            if tuple(draft_ids[num_before + row : num_before + row + 1]) != (token_id,):
                break  # the next rows are not reached
        return kept

    def _end_len(self, matcher: GrammarMatcher, scan: JsonScan) -> float:
        """Tokens of the shortest end, with the end of sequence."""
        end = self._closing.shortest(matcher, scan)
        return inf if end is None else len(self.grammar.vocabulary.tokens_of(end)) + 1

    def shortest_end(self, max_cost: int = MAX_COST) -> bytes | None:
        """The rest of a short output from here; None: none was found at that cost (`engine.grammar.closing`)."""
        return self._closing.shortest(self._matcher, self._scan, max_cost)

    def fork(self) -> GrammarMatcher:
        """A matcher of its own at this place."""
        return self._matcher.fork()

    def _accept(self, token_ids: Sequence[int]) -> int:
        """How many were accepted. The matcher has followed them."""
        matcher, vocabulary = self._matcher, self.grammar.vocabulary
        for i, token_id in enumerate(token_ids):
            # xgrammar logs a warning for each token that it is asked for after the end, and for each without bytes.
            spelled = vocabulary.token_bytes[token_id]
            is_named = vocabulary.ends(token_id) or token_id in vocabulary.special_ids
            is_possible = not matcher.is_terminated() and (spelled or is_named)
            if not is_possible or not matcher.accept_token(token_id):
                return i
        return len(token_ids)


def _forbid(mask: torch.Tensor, token_ids: Sequence[int]) -> None:
    rest = mask.numpy().copy()
    for token_id in token_ids:
        rest[token_id // 32] &= ~(1 << (token_id % 32)) if token_id % 32 < 31 else 0x7FFFFFFF
    if rest.any():
        mask.copy_(torch.from_numpy(rest))
