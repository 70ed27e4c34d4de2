"""What drafters ask of the ledger beyond speculate and commit: an open checkpoint may be revised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import OutOfBlocks
from engine.kv_blocks import BlockLedger, LedgerMisuse


@given(st.lists(st.integers(1, 24), min_size=1, max_size=8), st.integers(0, 30), st.booleans())
def test_a_revised_checkpoint_keeps_the_blocks_of_its_beginning(lens: list[int], num_kept: int, prefix_cache: bool) -> None:
    ledger = BlockLedger(num_blocks=8, block_len=4, prefix_cache=prefix_cache)
    ledger.open("a", [])
    ledger.commit(ledger.speculate("a", range(6)), 6)
    checkpoint = ledger.speculate("a", [0])
    for length in lens:
        before = ledger.block_table("a").tolist()
        checkpoint = ledger.revise(checkpoint, range(length))
        after = ledger.block_table("a").tolist()
        assert len(after) == -(-(6 + length) // 4)
        assert all(mine == theirs for mine, theirs in zip(before, after, strict=False))
        assert ledger.computed_len("a") == checkpoint.base_len == 6
        ledger.check_integrity()
    kept = min(num_kept, lens[-1])
    ledger.commit(checkpoint, kept)
    assert ledger.computed_len("a") == 6 + kept
    ledger.release("a")
    assert ledger.num_free_blocks == 8
    ledger.check_integrity()


def test_a_revision_that_cannot_be_changes_nothing() -> None:
    ledger = BlockLedger(num_blocks=3, block_len=4)
    ledger.open("a", [])
    first = ledger.speculate("a", range(6))
    with pytest.raises(OutOfBlocks):
        ledger.revise(first, range(13))
    with pytest.raises(LedgerMisuse, match="no tokens"):
        ledger.revise(first, [])
    second = ledger.revise(first, range(12))
    with pytest.raises(LedgerMisuse, match="not open any more"):
        ledger.revise(first, range(2))
    ledger.commit(second, 12)
    with pytest.raises(LedgerMisuse, match="not open any more"):
        ledger.revise(second, range(2))
    ledger.check_integrity()
