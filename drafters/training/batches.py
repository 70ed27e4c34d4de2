"""Batches: whole answers, packed one after another, with the positions from which drafts are learned."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.training.corpus import Answer
from drafters.training.hidden_states import HiddenStateReader


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of ``lens`` tokens, rows in all, with the target's reading of them.

    ``anchors`` are rows, ascending: the last committed token of a round that begins there, so the last prompt token at the
    earliest. ``ends``: of each anchor's sequence, the row behind its last token.
    """

    token_ids: Tensor  # int64 [rows]
    lens: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    features: Tensor  # [rows, layers * hidden], in the target's dtype
    normalisers: Tensor  # fp32 [rows]
    anchors: Tensor  # int64 [A]
    ends: Tensor  # int64 [A]
    block_len: int  # of the block at each anchor


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """``max_rows`` of packed sequences, and of drafted positions at most ``max_positions`` (one per answer at least), which
    bound the memory of the logits.

    The blocks of a batch are equally long. Their length is drawn for each batch: a position follows with probability
    ``persistence``, so what is spent on a position falls like the chance that drafting comes to it. A batch of shorter
    blocks has more of them.
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


def epoch(answers: Sequence[Answer], plan: BatchPlan, seed: int, number: int) -> Iterator[tuple[list[Answer], int]]:
    """The batches of an epoch, a function of the arguments: answers, and the seed from which their anchors are drawn."""
    rng = random.Random(f"{seed} epoch {number}")
    order = list(answers)
    rng.shuffle(order)
    part: list[Answer] = []
    rows = 0
    for answer in order:
        num_rows = len(answer.token_ids)
        if part and rows + num_rows > plan.max_rows:
            yield part, rng.getrandbits(48)
            part, rows = [], 0
        part.append(answer)
        rows += num_rows
    if part:
        yield part, rng.getrandbits(48)


def assemble(
    answers: Sequence[Answer], readings: HiddenStateReader, plan: BatchPlan, seed: int, device: torch.device
) -> Batch:
    """``seed`` decides how long the blocks are, and which positions are anchors: of every answer the same share."""
    rng = random.Random(seed)
    read = readings.of(answers)
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
    return Batch(
        token_ids=torch.tensor([t for a in answers for t in a.token_ids], device=device),
        lens=tuple(len(a.token_ids) for a in answers),
        prompt_lens=tuple(a.prompt_len for a in answers),
        features=torch.cat([reading.features for reading in read]),
        normalisers=torch.cat([reading.normalisers for reading in read]),
        anchors=torch.tensor(anchors, device=device),
        ends=torch.tensor(ends, device=device),
        block_len=block_len,
    )
