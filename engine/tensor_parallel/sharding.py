"""Which part of a model each rank holds (Megatron-LM, arXiv 1909.08053).

    q, k, v, gate, up         by rows: whole KV groups, whole columns of the feed-forward     (column parallel)
    out, down                 by columns, and their products are summed over the ranks        (row parallel)
    embedding, LM head        by rows: parts of the vocabulary
    norms                     on every rank

A KV group is a key-value head with the query heads that read it. Groups that do not divide by the ranks are split unevenly,
the first ranks taking one more: SmolLM2-135M has 3 groups of 3 query heads, so that two ranks hold 2 groups and 1.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from cluster.errors import InvalidField
from engine.models.config import DecoderConfig

_COLUMNS = 64  # kernels read whole vectors and cache lines of a row


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranges of the rows or columns of the whole model that rank ``rank`` holds."""

    rank: int
    num_ranks: int
    heads: range  # of the queries
    kv_heads: range
    columns: range  # of the feed-forward
    token_ids: range  # of embedding and LM head

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what must be added once, such as the biases of row parallel products."""
        return self.rank == 0

    def config_of(self, config: DecoderConfig) -> DecoderConfig:
        """The shape of this rank's layers."""
        return replace(
            config, num_heads=len(self.heads), num_kv_heads=len(self.kv_heads), intermediate_size=len(self.columns)
        )


def check_ranks(config: DecoderConfig, num_ranks: int) -> None:
    """Raises InvalidField: ``config`` cannot be split over so many ranks."""
    if num_ranks > config.num_kv_heads:
        reason = f"must be at most {config.num_kv_heads}, the key-value heads of the model: each rank holds whole ones"
        raise InvalidField("target.tensor_parallel", num_ranks, reason)
    if num_ranks > (most := min(config.vocab_size, config.intermediate_size)):
        raise InvalidField("target.tensor_parallel", num_ranks, f"must be at most {most} for a model of this size")


def shard_of(config: DecoderConfig, rank: int, num_ranks: int) -> Shard:
    """The part of rank ``rank``. The first rank's is the largest.

    Raises InvalidField: the model cannot be split over so many ranks.
    """
    check_ranks(config, num_ranks)
    group_len = config.num_heads // config.num_kv_heads
    kv_heads = split(config.num_kv_heads, num_ranks)[rank]
    unit = math.gcd(config.intermediate_size, _COLUMNS)
    return Shard(
        rank=rank,
        num_ranks=num_ranks,
        heads=range(kv_heads.start * group_len, kv_heads.stop * group_len),
        kv_heads=kv_heads,
        columns=split(config.intermediate_size, num_ranks, unit)[rank],
        token_ids=split(config.vocab_size, num_ranks)[rank],
    )


def split(num: int, num_parts: int, unit: int = 1) -> list[range]:
    """``num`` items in consecutive parts of whole units, the first parts taking one more; the last unit may be short.

    Units shrink to one item where there are fewer of them than parts.
    """
    if -(-num // unit) < num_parts:
        unit = 1
    each, more = divmod(-(-num // unit), num_parts)
    starts = [min(num, unit * (part * each + min(part, more))) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
