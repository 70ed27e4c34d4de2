"""Drafting with a cost table that was measured while other programs ran, or that is right: decisions and passes in turns."""

from collections.abc import Callable, Sequence

import pytest

from cluster.types import Commit
from engine.pass_costs import PassCosts, PassCounts
from profiler.online_cost import CONFIRMATIONS, TRIAL_AFTER, TRIAL_PASSES, OnlineCost
from router.cost_model import TableCost, bounded
from router.drafting.value import DraftingValue
from router.drafting.verification_rule import OutriderVerification
from router.plan import DrafterView
from tests.support.verification import COMMITTED_LEN, a_pass, decoding

DISTURBED = TableCost((1, 2, 4, 8, 16, 32), (0.018, 0.059, 0.059, 0.059, 0.06, 0.08))
SURVIVAL = (0.75, 0.56, 0.42, 0.32)


def drafted_passes(table: TableCost, true_s: Callable[[int], float], num_passes: int, waits: bool = False) -> list[int]:
    """Numbers of the passes of one request that verify drafts. The drafter stops where a token is not worth its row's price;
    one that ``waits`` delays the pass, and is asked only where it pays."""
    cost = OnlineCost(table)
    costs, rule, found = PassCosts(cost), OutriderVerification(), []
    view = DrafterView(reply_s=0.002, accepted_per_round=1.0, acceptance=0.75, draft_s=0.002, draft_len=4.0, batch=1.0)
    now_s = 0.0
    for number in range(num_passes):
        costs.plan(1, COMMITTED_LEN)
        value = DraftingValue(cost, {"d": view}, costs.row_price, costs.planned.tokens_per_s)
        asked = not waits or value.pays("d", 1, COMMITTED_LEN, 4)
        drafts: Sequence[float] = [one for one in SURVIVAL if asked and one > costs.row_price]
        (num_verify,) = rule.rows([decoding("a", drafts)], a_pass(cost)).verify_lens
        if num_verify:
            found.append(number)
        num_tokens = 1 + round(sum(SURVIVAL[:num_verify]))
        rows, pass_s = 1 + num_verify, true_s(1 + num_verify)
        commit = Commit("a", COMMITTED_LEN, tuple(range(num_tokens)), num_verify, num_tokens - 1)
        costs.note(now_s, pass_s, PassCounts(rows, COMMITTED_LEN, 1, rows, COMMITTED_LEN, frozenset(), 0), [commit], 0.0)
        now_s += pass_s
    return found


@pytest.mark.parametrize("waits", [False, True])
def test_drafting_recovers_from_a_disturbed_table(waits: bool) -> None:
    """The table says that a second row triples a pass; true passes of five rows take a fifth longer than of one."""
    bound = TRIAL_AFTER + TRIAL_PASSES
    found = drafted_passes(DISTURBED, lambda rows: 0.018 * (1.0 + 0.05 * (rows - 1)), bound + 400, waits)
    assert len([number for number in found if number >= bound]) > 300


def test_true_costs_that_forbid_drafts_are_tried_ever_less() -> None:
    """A second row that does triple a pass costs two passes now and then, so that objectives miss no more."""
    found = drafted_passes(DISTURBED, DISTURBED.at, 16_000)
    assert 0 < len(found) < 20
    assert all(last - first > TRIAL_AFTER for first, last in zip(found, found[CONFIRMATIONS:], strict=False))


def test_a_right_table_is_never_tried_against_while_drafts_pay() -> None:
    flat = TableCost((1, 8, 32), (0.018, 0.02, 0.03))
    assert len(drafted_passes(flat, flat.at, 2000)) > 1990


def test_a_pass_takes_at_most_what_smaller_ones_take_in_turn() -> None:
    table = TableCost((1, 2, 3, 8), (1.0, 5.0, 5.0, 5.5), per_context_s=0.1)
    assert bounded(table) == TableCost((1, 2, 3, 8), (1.0, 2.0, 3.0, 5.5), per_context_s=0.1)
