"""The reduced vocabulary: the target's most frequent tokens. A full head costs a drafter more than its layers."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from training.corpus import TargetAnswer


def choose_vocabulary(
    answers: Iterable[TargetAnswer], size: int, vocab_size: int, always: Iterable[int] = ()
) -> Tensor | None:
    """``size`` token ids, ascending, or None for all: ``always``, the most frequent in the answers, then the lowest ids."""
    if size >= vocab_size:
        return None
    counts = Counter(token_id for answer in answers for token_id in answer.answer_token_ids)
    ranked = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))
    chosen = dict.fromkeys([*always, *ranked, *range(vocab_size)])
    return torch.tensor(sorted(list(chosen)[:size]), dtype=torch.int64)


def coverage(vocabulary: Tensor | None, answers: Iterable[TargetAnswer]) -> float:
    """The share of answer tokens that are in the vocabulary."""
    token_ids = [token_id for answer in answers for token_id in answer.answer_token_ids]
    known = set(token_ids) if vocabulary is None else set(vocabulary.tolist())
    return sum(token_id in known for token_id in token_ids) / max(1, len(token_ids))
