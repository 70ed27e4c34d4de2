"""The reduced vocabulary: the tokens that the target really says. A full head costs a drafter more than its layers."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from drafters.training.corpus import Answer


def choose_vocabulary(answers: Iterable[Answer], size: int, vocab_size: int, always: Iterable[int] = ()) -> Tensor | None:
    """``size`` token ids, ascending, int64; None if that is the whole vocabulary.

    Those that the answers hold most often, then the lowest ids, for byte pair encoding numbers its tokens by how common
    they were. ``always`` are in it whatever was counted.
    """
    if size >= vocab_size:
        return None
    counts = Counter(token_id for answer in answers for token_id in answer.answer_token_ids)
    ranked = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))
    chosen = dict.fromkeys([*always, *ranked, *range(vocab_size)])
    return torch.tensor(sorted(list(chosen)[:size]), dtype=torch.int64)


def positions_in(vocabulary: Tensor | None, vocab_size: int) -> Tensor:
    """Of each token its place in the vocabulary, int64 [vocab_size]; -1 where it is not in it."""
    if vocabulary is None:
        return torch.arange(vocab_size)
    places = torch.full((vocab_size,), -1, dtype=torch.int64)
    places[vocabulary] = torch.arange(len(vocabulary))
    return places


def coverage(vocabulary: Tensor | None, answers: Iterable[Answer]) -> float:
    """The share of answered tokens that can be drafted."""
    known = None if vocabulary is None else set(vocabulary.tolist())
    num = num_known = 0
    for answer in answers:
        num += len(answer.answer_token_ids)
        num_known += sum(known is None or token_id in known for token_id in answer.answer_token_ids)
    return num_known / num if num else 0.0
