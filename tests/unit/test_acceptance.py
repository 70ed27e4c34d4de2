"""What is accepted of a draft: the tokens that equal the target's own, and nothing behind the first that does not."""

from engine.acceptance import common_prefix_len, verdict
from engine.sampling import Chosen


def test_a_verdict_ends_with_the_first_token_that_was_not_drafted() -> None:
    chosen = Chosen((5, 6, 7))
    assert [common_prefix_len(drafts, chosen.token_ids) for drafts in [(5, 6), (5, 9), (9, 6)]] == [2, 1, 0]
    assert verdict("r", (5, 6), chosen).token_ids == (5, 6, 7)
    assert verdict("r", (5, 9), chosen).token_ids == (5, 6)
    assert verdict("r", (9, 6), chosen).token_ids == (5,)


def test_a_failed_row_counts_only_if_it_is_reached() -> None:
    chosen = Chosen((5, 6), error="broken")
    assert verdict("r", (9, 6), chosen).error is None
    assert verdict("r", (5, 9), chosen).error is None
    reached = verdict("r", (5, 6), chosen)
    assert (reached.token_ids, reached.num_accepted, reached.error) == ((5, 6), 2, "broken")
