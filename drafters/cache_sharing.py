"""One paged cache for more requests than it holds at once."""

from collections.abc import Callable, Iterable, Set
from typing import TypeVar

from engine.kv_blocks import BlockLedger

Item = TypeVar("Item")


def parts_that_fit(items: Iterable[Item], length: Callable[[Item], int], ledger: BlockLedger) -> list[list[Item]]:
    """Divides requests, each of some length, into parts that the cache holds at once."""
    parts: list[list[Item]] = []
    num_left = 0
    for item in items:
        needed = -(-length(item) // ledger.block_len)
        if not parts or needed > num_left:
            parts.append([])
            num_left = ledger.num_blocks
        parts[-1].append(item)
        num_left -= needed
    return parts


def evict(ledger: BlockLedger, request_ids: Iterable[str], needed: int, kept: Set[str]) -> list[str]:
    """Releases requests that are not in ``kept``, in order, until ``needed`` blocks are free; returns them."""
    evicted = []
    for request_id in request_ids:
        if needed <= ledger.num_free_blocks:
            break
        if request_id in ledger and request_id not in kept:
            ledger.release(request_id)
            evicted.append(request_id)
    return evicted
