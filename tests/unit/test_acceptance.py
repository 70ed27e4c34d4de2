"""What is accepted of a draft: the tokens that equal the target's own, and nothing behind the first that does not."""

from engine.acceptance import accept, common_prefix_len
from engine.sampling import Chosen
from router.plan import Span


def accepted(drafts: tuple[int, ...], chosen: Chosen) -> Span:
    span = Span("r", 1, len(drafts))
    accept(span, drafts, chosen)
    return span


def test_a_verdict_ends_with_the_first_token_that_was_not_drafted() -> None:
    chosen = Chosen((5, 6, 7))
    assert [common_prefix_len(drafts, chosen.token_ids) for drafts in [(5, 6), (5, 9), (9, 6)]] == [2, 1, 0]
    assert accepted((5, 6), chosen).chosen == (5, 6, 7)
    assert accepted((5, 9), chosen).chosen == (5, 6)
    assert accepted((9, 6), chosen).chosen == (5,)


def test_a_failed_row_counts_only_if_it_is_reached() -> None:
    chosen = Chosen((5, 6), error="broken")
    assert accepted((9, 6), chosen).error is None
    assert accepted((5, 9), chosen).error is None
    reached = accepted((5, 6), chosen)
    assert (reached.chosen, reached.num_accepted, reached.error) == ((5, 6), 2, "broken")
