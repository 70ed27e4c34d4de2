"""What is drafted for one request: proposals taken and judged, holds, and the change of its drafter."""

import ast
from pathlib import Path

import numpy as np
import pytest

import engine
from cluster.types import NO_DRAFTS, DraftTerms, Proposal
from engine.draft_state import MAX_AWAITED, DraftState
from router.estimates.survival import SurvivalRows


def start(*committed: int) -> DraftState:
    """Of a request whose prompt is (1, 2, 3) and whose drafter is d."""
    draft = DraftState([1, 2, 3, *committed], 3)
    assert draft.switch(("a", "d"))
    return draft


def propose(base_len: int, *token_ids: int, drafter: str = "d") -> Proposal:
    return Proposal("r", base_len, token_ids, (0.5,) * len(token_ids), drafter)


def commit(draft: DraftState, *token_ids: int) -> str | None:
    draft.token_ids.extend(token_ids)
    draft.judge(token_ids)
    return None if draft.judged is None else draft.judged[0].drafter


def test_a_proposal_must_extend_what_is_committed() -> None:
    draft = start()
    draft.expect(1.0, is_queried=True)
    assert not draft.offer(propose(2, 5))
    assert not draft.offer(propose(4, 5))
    assert not draft.offer(propose(3, 5, drafter="former"))
    assert (draft.proposal, draft.awaiting_since_s) == (None, 1.0)
    assert draft.offer(propose(3, 5))
    assert (draft.proposal, draft.awaiting_since_s) == (propose(3, 5), None)


def test_a_late_proposal_is_cut_to_what_is_still_ahead() -> None:
    draft = start(5, 6)
    assert not draft.offer(propose(3, 5)), "all of it is committed already"
    assert not draft.offer(propose(3, 5, 7, 8)), "it was wrong"
    assert draft.offer(propose(3, 5, 6, 7, 8))
    assert draft.proposal == propose(5, 7, 8)
    assert not draft.offer(propose(4, 6, 9)), "another is at hand"
    assert draft.offer(propose(5, 9)), "one that knows all tokens replaces it"
    assert draft.proposal == propose(5, 9)


def test_of_a_late_proposal_it_is_known_how_much_would_have_been_accepted() -> None:
    draft = start(5, 6)
    assert draft.num_right_of(propose(3, 5)) == 1
    assert draft.num_right_of(propose(3, 5, 7, 8)) == 1
    assert draft.num_right_of(propose(3, 4, 6, 7)) == 0
    assert draft.num_right_of(propose(3, 5, 6)) == 2
    assert draft.num_right_of(propose(3, 5, 6, 7)) is None, "7 is still ahead"
    assert draft.num_right_of(propose(5, 7)) is None, "it is not late"
    draft.offer(propose(3, 5, 6, 7, 8))
    commit(draft, 7, 9)
    assert draft.judgement is not None
    assert (draft.judgement.num_overtaken, draft.judgement.num_right) == (2, 1)
    draft.offer(propose(7, 3))
    commit(draft, 3)
    assert draft.judgement is not None
    assert draft.judgement.num_overtaken == 0


def test_a_proposal_is_judged_by_what_was_committed_and_the_rest_is_kept_if_it_agrees() -> None:
    draft = start()
    draft.offer(propose(3, 5, 6, 7, 8))
    draft.set_survival((0.8, 0.4, 0.2, 0.1))
    assert commit(draft, 5, 6) == "d"
    assert draft.judgement is not None
    assert (draft.judgement.num_right, draft.judgement.num_judged) == (2, 2)
    assert draft.proposal == propose(5, 7, 8)
    assert draft.survival == pytest.approx((0.5, 0.25))
    assert commit(draft, 9) == "d"
    assert (draft.judgement.num_right, draft.judgement.num_judged) == (0, 1)
    assert draft.proposal is None
    assert commit(draft, 9) is None
    assert draft.judgement is None


def test_a_failed_pass_judges_nothing() -> None:
    draft = start()
    draft.offer(propose(3, 5))
    assert commit(draft) is None
    assert (draft.judgement, draft.proposal) == (None, None)


def test_a_hold_that_runs_out_says_how_long_it_waited() -> None:
    draft = start()
    assert draft.end_hold(2.0) is None
    draft.expect(1.0, is_queried=True)
    draft.hold(2.0, 4.0)
    draft.hold(3.0, 4.0)
    assert draft.held_since_s == 2.0
    assert draft.end_hold(3.5) == 2.5
    assert not draft.is_held
    draft.hold(3.5, 4.0)
    assert draft.end_hold(150.0) == 3.0, "a suspended machine waits for longer than planned"
    draft.hold(4.0, 5.0)
    draft.offer(propose(3, 5))
    assert draft.end_hold(4.0) is None, "the proposal has come"
    draft.expect(5.0, is_queried=True)
    draft.hold(4.0, 5.0)
    draft.preempt()
    assert draft.end_hold(6.0) is None, "a preempted request waits for nothing"


def test_only_another_drafter_ends_what_is_expected() -> None:
    draft = start()
    draft.set_budget(DraftTerms(4, 0.25))
    draft.offer(propose(3, 5))
    draft.expect(1.0, is_queried=True)
    assert not draft.switch(("b", "d"))
    assert (draft.chain, draft.drafter, draft.proposal) == (("b", "d"), "d", propose(3, 5))
    assert (draft.awaiting_since_s, draft.expects_draft, draft.budget) == (1.0, True, DraftTerms(4, 0.25))
    assert draft.switch(("e",))
    assert (draft.drafter, draft.proposal, draft.budget) == ("e", None, NO_DRAFTS)
    assert (draft.awaiting_since_s, draft.expects_draft) == (None, False)
    assert draft.switch(())
    assert draft.drafter is None


def test_a_budget_says_whether_it_changed() -> None:
    draft = start()
    assert draft.set_budget(DraftTerms(4, 0.25))
    assert not draft.set_budget(DraftTerms(4, 0.25))
    assert draft.set_budget(DraftTerms(4, 0.5))


def test_the_times_of_the_newest_commits_are_kept() -> None:
    draft = start()
    for number in range(MAX_AWAITED + 1):
        draft.expect(float(number), is_queried=True)
        draft.token_ids.append(5)
    assert draft.sent_s(3) is None
    assert [draft.sent_s(4), draft.sent_s(3 + MAX_AWAITED)] == [1.0, float(MAX_AWAITED)]


def test_nothing_else_writes_the_drafting_state() -> None:
    fields = set(DraftState.__slots__)
    for path in Path(engine.__file__).parent.glob("*.py"):
        if path.name == "draft_state.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in fields:
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                assert owner != "draft", f"{path.name}:{node.lineno} writes {node.attr}"


def test_survival_of_a_row_is_that_of_the_draft_alone() -> None:
    """Of what was predicted of many proposals together; of what is left of one, given that the tokens before are right."""
    row, alone = DraftState([1, 2], 2), DraftState([1, 2], 2)
    for draft in (row, alone):
        draft.switch(("d",))
        assert draft.offer(Proposal("r", 2, (5, 6, 7, 8), (0.9,) * 4, "d"))
    alone.set_survival((0.8, 0.4, 0.2, 0.1))
    row.set_survival_row(SurvivalRows(np.array([[0.9] * 5, [0.8, 0.4, 0.2, 0.1, 0.05]])), 1)
    assert row.survival == alone.survival == (0.8, 0.4, 0.2, 0.1)
    for committed, left in (((5, 6), (0.5, 0.25)), ((7,), (0.5,))):
        for draft in (row, alone):
            draft.token_ids.extend(committed)
            draft.judge(committed)
        assert row.survival == alone.survival == pytest.approx(left)
    assert row.offer(Proposal("r", 5, (9,), (0.5,), "d"))
    assert row.survival == ()
