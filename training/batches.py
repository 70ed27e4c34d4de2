"""Training batches: whole answers packed one after another, and the positions from which drafts are learned."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.corpus import TargetAnswer, packed
from training.hidden_states import HiddenStateReader


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Sequences with the target's hidden states. An anchor is the row of the last committed token of a round."""

    token_ids: Tensor  # int64 [rows]
    lens: tuple[int, ...]
    features: Tensor  # [rows, layers * hidden], in the target's dtype
    normalisers: Tensor  # fp32 [rows]
    anchors: Tensor  # int64 [A], ascending
    ends: Tensor  # int64 [A], the row behind the last token of each anchor's sequence
    block_len: int  # of the block at each anchor


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Bounds memory by ``max_rows`` of packed sequences and ``max_positions`` with logits (at least one block per answer).

    All blocks of a batch are equally long: each further position follows with probability ``persistence``, so that a
    position is trained about as often as drafting reaches it.
    """

    max_rows: int
    max_positions: int
    block_size: int = 1
    persistence: float = 1.0

    def draw_block_len(self, rng: random.Random) -> int:
        length = 1
        while length < self.block_size and rng.random() < self.persistence:
            length += 1
        return length


def epoch(
    answers: Sequence[TargetAnswer], plan: BatchPlan, seed: int, number: int
) -> Iterator[tuple[list[TargetAnswer], int]]:
    """The batches of an epoch: answers, and the seed of their anchors. Deterministic."""
    rng = random.Random(f"{seed} epoch {number}")
    order = list(answers)
    rng.shuffle(order)
    return ((part, rng.getrandbits(48)) for part in packed(order, plan.max_rows))


def assemble(
    answers: Sequence[TargetAnswer], reader: HiddenStateReader, plan: BatchPlan, seed: int, device: torch.device
) -> AnswerBatch:
    """``seed`` determines the block length and the anchors, the same share of each answer's positions."""
    rng = random.Random(seed)
    states = reader.read(answers)
    block_len = plan.draw_block_len(rng)
    share = min(1.0, plan.max_positions / block_len / sum(len(answer.answer_token_ids) for answer in answers))
    anchors: list[int] = []
    ends: list[int] = []
    start = 0
    for answer in answers:
        first, end = start + answer.prompt_len - 1, start + len(answer.token_ids)
        chosen = sorted(rng.sample(range(first, end - 1), max(1, int(share * (end - 1 - first)))))
        anchors += chosen
        ends += [end] * len(chosen)
        start = end
    return AnswerBatch(
        token_ids=torch.tensor([t for a in answers for t in a.token_ids], device=device),
        lens=tuple(len(a.token_ids) for a in answers),
        features=torch.cat([one.features for one in states]),
        normalisers=torch.cat([one.normalisers for one in states]),
        anchors=torch.tensor(anchors, device=device),
        ends=torch.tensor(ends, device=device),
        block_len=block_len,
    )
