"""The vocabulary as grammars see it: the bytes of each token, and the tokens of given bytes."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.grammar.string_masks import StringMasks
from engine.models.token_bytes import read_token_bytes
from engine.models.tokenizer import read_vocabulary


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
    def string_masks(self) -> StringMasks:
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
