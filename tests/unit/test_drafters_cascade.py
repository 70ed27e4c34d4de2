"""Whom a cascade asks, what it takes, and how it splices."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from cluster.errors import InvalidField
from cluster.types import SamplingParams
from drafters.cascade import CascadeDrafter, Member
from drafters.protocol import Demand, Draft

SAMPLING = SamplingParams(max_tokens=100, temperature=0.0)
CONTENT = tuple(range(100, 200))  # what the target will say: position t holds 100 + t


@dataclass
class Scripted:
    """Right about ``num_right`` tokens, then wrong; says so with ``confidence``. Silent before position ``from_len``."""

    num_right: int
    confidence: float
    from_len: int = 0
    asked: list[Demand] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self.lengths[request_id] = len(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.lengths[request_id] += len(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.asked.extend(demands)
        return [self._draft(demand) for demand in demands]

    def release(self, request_id: str) -> None:
        del self.lengths[request_id]

    def check_integrity(self) -> None:
        assert all(self.lengths.values())

    def _draft(self, demand: Demand) -> Draft:
        start = self.lengths[demand.request_id] + len(demand.ahead)
        if start < self.from_len:
            return Draft(demand.request_id, (), ())
        right = CONTENT[start : start + min(self.num_right, demand.num_tokens)]
        tokens = (*right, *((0,) * (demand.num_tokens - len(right))))
        return Draft(demand.request_id, tokens, (self.confidence,) * len(tokens))


def cascade(*members: tuple[Scripted, float, bool]) -> CascadeDrafter:
    drafter = CascadeDrafter([Member(f"m{i}", d, cost, splices) for i, (d, cost, splices) in enumerate(members)])
    drafter.open("r", CONTENT[:3], 3, SAMPLING)
    return drafter


def rounds(drafter: CascadeDrafter, count: int, length: int = 3, num_tokens: int = 4) -> int:
    """Verifies drafts as the target would; returns the committed length."""
    for _ in range(count):
        (draft,) = drafter.propose([Demand("r", num_tokens)])
        num_right = 0
        while num_right < len(draft.token_ids) and draft.token_ids[num_right] == CONTENT[length + num_right]:
            num_right += 1
        drafter.extend("r", CONTENT[length : length + num_right + 1])
        length += num_right + 1
    return length


def test_a_confident_look_up_spares_the_model() -> None:
    lookup, model = Scripted(4, 0.95), Scripted(4, 0.5)
    drafter = cascade((lookup, 0.0, True), (model, 0.2, False))
    rounds(drafter, 5)
    assert len(lookup.asked) == 5
    assert not model.asked


def test_a_silent_look_up_leaves_it_to_the_model() -> None:
    lookup, model = Scripted(0, 0.0, from_len=99), Scripted(4, 0.9)
    drafter = cascade((lookup, 0.0, False), (model, 0.2, False))
    assert rounds(drafter, 3) == 3 + 15
    assert len(model.asked) == 3


def test_a_boastful_member_is_found_out() -> None:
    boaster, model = Scripted(0, 0.9), Scripted(4, 0.9)
    drafter = cascade((boaster, 0.0, False), (model, 0.1, False))
    rounds(drafter, 1)
    assert not model.asked
    length = rounds(drafter, 30, length=4)
    assert model.asked, "confidences are believed only as far as they came true"
    assert length > 60


def test_a_model_that_costs_more_than_it_brings_is_not_asked() -> None:
    lookup, model = Scripted(0, 0.0, from_len=99), Scripted(0, 0.0)
    drafter = cascade((lookup, 0.0, False), (model, 5.0, False))
    rounds(drafter, 10)
    assert not model.asked


def test_a_look_up_that_hits_behind_the_models_first_token_takes_over() -> None:
    lookup, model = Scripted(9, 0.95, from_len=4), Scripted(1, 0.6)
    drafter = cascade((lookup, 0.0, True), (model, 0.1, False))
    (draft,) = drafter.propose([Demand("r", 4)])
    assert draft.token_ids == CONTENT[3:7]
    assert draft.confidences == (0.6, 0.95, 0.95, 0.95)


def test_every_member_follows_and_forgets() -> None:
    members = [Scripted(1, 0.5), Scripted(1, 0.5)]
    drafter = cascade(*((m, i, False) for i, m in enumerate(members)))
    drafter.extend("r", CONTENT[3:5])
    assert [m.lengths for m in members] == [{"r": 5}, {"r": 5}]
    drafter.check_integrity()
    drafter.release("r")
    assert [m.lengths for m in members] == [{}, {}]


def test_members_must_stand_in_order_of_cost() -> None:
    with pytest.raises(InvalidField, match="cost"):
        cascade((Scripted(1, 0.5), 1.0, False), (Scripted(1, 0.5), 0.0, False))
    with pytest.raises(InvalidField, match="at least one"):
        CascadeDrafter([])
