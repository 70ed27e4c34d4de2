"""The vocabulary of a drafter whose tokenizer is not its target's: tokens of equal bytes stand for each other.

It drafts the tokens that both have (token-level intersection: Timor et al., arXiv 2502.05202, algorithm 4), by the target's
rule and with its noise, so that confidences and scores mean what they mean for other drafters. A committed token that it has
not is read as the longest tokens that spell it. So each target token stands for the same tokens wherever it occurs, and what
is computed for a draft serves its commit.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from cluster.errors import IncompatibleTokenizer
from cluster.types import ModelInfo
from engine.models.config import DecoderConfig
from engine.models.tokenizer import read_token_bytes, read_vocabulary


class OtherVocabulary:
    """Token ids of a drafter for those of its target.

    Args:
        own, target: the bytes of each token; empty: it stands for no text.
        own_controls, target_controls: spellings of such tokens, by id.
        own_ends, target_ends: those that end a sequence. They stand for each other, whatever they are called.

    Attributes:
        output_ids: target tokens that the drafter has, ascending int64.
        columns: of the drafter's logits, for each of these.
    """

    def __init__(
        self,
        own: Sequence[bytes],
        target: Sequence[bytes],
        own_controls: dict[int, str],
        target_controls: dict[int, str],
        own_ends: Sequence[int] = (),
        target_ends: Sequence[int] = (),
    ) -> None:
        # Of tokens of equal bytes the last: SentencePiece's byte tokens come before the pieces that it chooses.
        self._own_ids = {spelled: i for i, spelled in enumerate(own) if spelled}
        target_ids = {spelled: i for i, spelled in enumerate(target) if spelled in self._own_ids}
        self._longest = max(map(len, self._own_ids))
        by_name = {content: i for i, content in own_controls.items()}
        same = {i: by_name[content] for i, content in target_controls.items() if content in by_name}
        known_ends = [i for i in own_ends if i < len(own)]
        same |= {i: known_ends[0] for i in target_ends if known_ends and same.get(i) not in known_ends}
        written = {i: self._own_ids[spelled] for spelled, i in target_ids.items()} | same
        pairs = sorted((i, own_id) for i, own_id in written.items() if i < len(target) and own_id < len(own))
        self.output_ids, self.columns = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
        self._read: dict[int, tuple[int, ...]] = {i: (own_id,) for i, own_id in same.items() if own_id < len(own)}
        self._target, self._controls = target, target_controls

    def own(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """The drafter's tokens for the target's. A token that they cannot spell has none."""
        return tuple(own_id for token_id in token_ids for own_id in self._own_of(token_id))

    def _own_of(self, token_id: int) -> tuple[int, ...]:
        if token_id not in self._read:
            spelled = self._target[token_id] if token_id < len(self._target) else b""
            self._read[token_id] = self._spelled(spelled or self._controls.get(token_id, "").encode())
        return self._read[token_id]

    def _spelled(self, text: bytes) -> tuple[int, ...]:
        found, start = list[int](), 0
        while start < len(text):
            stops = range(min(len(text), start + self._longest), start, -1)
            stop = next((stop for stop in stops if text[start:stop] in self._own_ids), None)
            if stop is None:
                return ()
            found.append(self._own_ids[text[start:stop]])
            start = stop
        return tuple(found)


def other_vocabulary(folder: Path, config: DecoderConfig, target_folder: Path, target: ModelInfo) -> OtherVocabulary:
    """Of the model in ``folder``, for a target whose tokenizer is in ``target_folder``.

    Raises ModelUnavailable: a folder has no tokenizer whose tokens spell bytes; IncompatibleTokenizer: they have no token in
    common, or the target has another one.
    """
    of_target = read_vocabulary(target_folder)
    if of_target.fingerprint() != target.tokenizer_fingerprint:
        raise IncompatibleTokenizer(
            f"{target_folder} holds another tokenizer than the one that {target.name} is served with"
        )
    own = read_token_bytes(folder, config.vocab_size)
    spelled = read_token_bytes(target_folder, target.vocab_size)
    if not {*own} & {*spelled} - {b""}:
        raise IncompatibleTokenizer(f"the tokenizers of {folder.name} and {target.name} have no token in common")
    controls, ends = read_vocabulary(folder).special, config.eos_token_ids
    return OtherVocabulary(own, spelled, controls, of_target.special, ends, target.eos_token_ids)
