"""Whom a cascade asks, what it takes, and how it splices."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from cluster.types import DraftTerms
from drafters.cascade import CascadeDrafter, CascadeMember
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from engine.acceptance import common_prefix_len

SAMPLING = SamplingParams(max_tokens=100, temperature=0.0)
CONTENT = tuple(range(100, 1000))  # what the target will say: position t holds 100 + t


@dataclass
class Scripted:
    """Right about ``num_right`` tokens, then wrong; says so with ``confidence``. Silent outside its positions."""

    num_right: int
    confidence: float
    from_len: int = 0
    until_len: int = 10_000
    asked: list[Demand] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    capabilities = Capabilities()

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
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
        num_tokens = max(0, min(demand.num_tokens, self.until_len - start))
        right = CONTENT[start : start + min(self.num_right, num_tokens)]
        tokens = (*right, *((0,) * (num_tokens - len(right))))
        return Draft(demand.request_id, tokens, (self.confidence,) * len(tokens))


@dataclass
class Counted:
    """Counts how often it is asked, and takes its time to draft."""

    drafter: Drafter
    seconds: float = 0.0
    clock: list[float] = field(default_factory=lambda: [0.0])
    num_asked: int = 0
    capabilities = Capabilities()

    def __post_init__(self) -> None:
        self.open, self.extend = self.drafter.open, self.drafter.extend
        self.release, self.check_integrity = self.drafter.release, self.drafter.check_integrity

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.clock[0] += self.seconds
        self.num_asked += len(demands)
        return self.drafter.propose(demands)


@dataclass
class Split:
    """A drafter of its own for each request."""

    drafters: dict[str, Drafter]
    capabilities = Capabilities()

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.drafters[request_id].open(request_id, token_ids, prompt_len, sampling, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.drafters[request_id].extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [draft for demand in demands for draft in self.drafters[demand.request_id].propose([demand])]

    def release(self, request_id: str) -> None:
        self.drafters[request_id].release(request_id)

    def check_integrity(self) -> None: ...


def cascade(*members: tuple[Scripted, float, bool]) -> CascadeDrafter:
    drafter = CascadeDrafter([CascadeMember(f"m{i}", d, cost, splices) for i, (d, cost, splices) in enumerate(members)])
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
    drafter = cascade((lookup, 0.0, True), (model, 0.6, False))
    rounds(drafter, 20, num_tokens=3)
    assert len(lookup.asked) == 20
    assert len(model.asked) < 10


def test_a_silent_look_up_leaves_it_to_the_model() -> None:
    lookup, model = Scripted(0, 0.0, from_len=99), Scripted(4, 0.9)
    drafter = cascade((lookup, 0.0, False), (model, 0.2, False))
    assert rounds(drafter, 3) == 3 + 15
    assert len(model.asked) == 3


def test_a_boastful_member_is_found_out() -> None:
    boaster, modest = Scripted(0, 0.9), Scripted(4, 0.5)
    drafter = cascade((boaster, 0.0, False), (modest, 0.0, False))
    (draft,) = drafter.propose([Demand("r", 4)])
    assert draft.token_ids == (0, 0, 0, 0)
    length = 3
    for _ in range(3):  # a few dozen verdicts are taken up at once
        drafter.open("r", CONTENT[:3], 3, SAMPLING)
        length = rounds(drafter, 18, length=3)
    assert length > 60, "confidences are believed only as far as they came true"


def test_a_model_whose_gain_is_below_its_cost_is_hardly_queried() -> None:
    lookup, model = Scripted(0, 0.0, from_len=99), Scripted(0, 0.0)
    drafter = cascade((lookup, 0.0, False), (model, 0.5, False))
    rounds(drafter, 90)
    assert 1 <= len(model.asked) < 15


def test_a_look_up_that_hits_behind_the_models_first_token_takes_over() -> None:
    lookup, model = Scripted(9, 0.95, from_len=4), Scripted(1, 0.6)
    drafter = cascade((lookup, 0.0, True), (model, 0.1, False))
    (draft,) = drafter.propose([Demand("r", 4)])
    assert draft.token_ids == CONTENT[3:7]
    assert draft.confidences == pytest.approx((0.6, 0.95, 0.95, 0.95), abs=0.03)


def test_a_look_up_goes_on_where_another_ends() -> None:
    short, long = Scripted(9, 0.9, until_len=5), Scripted(9, 0.6)
    drafter = cascade((short, 0.0, True), (long, 0.0, True))
    (draft,) = drafter.propose([Demand("r", 6)])
    assert draft.token_ids == CONTENT[3:9]
    assert draft.confidences[0] == pytest.approx(0.9, abs=0.05)


def test_what_hardly_survives_is_not_handed_out() -> None:
    drafter = cascade((Scripted(9, 0.1), 0.0, False))
    (draft,) = drafter.propose([Demand("r", 6)])
    assert draft.token_ids == CONTENT[3:4]


def test_a_batch_may_have_two_demands_for_a_request() -> None:
    drafter = cascade((Scripted(9, 0.9), 0.0, True))
    first, second = drafter.propose([Demand("r", 3), Demand("r", 0)])
    assert len(first.token_ids) == 3
    assert second.token_ids == ()


@dataclass
class Recorded:
    """Right about as many tokens as was recorded for each round; honest about how good it is, or not."""

    script: Sequence[int]
    confidence: float
    turn: int = 0
    position: int = 3
    capabilities = Capabilities()

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.position = len(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.position += len(token_ids)
        self.turn += 1

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        (demand,) = demands
        start, num_right = self.position + len(demand.ahead), self.script[self.turn % len(self.script)] - len(demand.ahead)
        num_tokens = demand.num_tokens if num_right >= 0 and self.script[self.turn % len(self.script)] else 0
        tokens = tuple(start + i if i < num_right else -1 for i in range(num_tokens))
        return [Draft(demand.request_id, tokens, (self.confidence,) * num_tokens)]

    def release(self, request_id: str) -> None: ...

    def check_integrity(self) -> None: ...


def pace(drafter: Drafter, cost_so_far: Callable[[], float], num_rounds: int = 1500) -> float:
    """Tokens per one-row step of the target, which says t at position t."""
    drafter.open("r", (0, 1, 2), 3, SAMPLING)
    length = 3
    for _ in range(num_rounds):
        (draft,) = drafter.propose([Demand("r", 7)])
        truth = tuple(range(length, length + 8))
        num_right = common_prefix_len(draft.token_ids, truth)
        drafter.extend("r", truth[: num_right + 1])
        length += num_right + 1
    return (length - 3) / (num_rounds + cost_so_far())


@pytest.mark.parametrize("cost", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_it_never_loses_against_its_best_member_by_more_than_exploring_costs(seed: int, cost: float) -> None:
    rng = random.Random(seed)
    hits = [rng.choice((0, 0, 0, 2, 6)) for _ in range(400)]  # a lookup: mostly nothing, sometimes much
    steady = [min(7, int(rng.expovariate(0.8))) for _ in range(400)]  # a model
    boast, shy = rng.choice(((0.95, 0.3), (0.5, 0.9)))
    alone = {
        "nothing": 1.0,
        "lookup": pace(Recorded(hits, boast), lambda: 0.0),
        "model": pace(Recorded(steady, shy), lambda: 1500 * cost),
    }
    counter = Counted(Recorded(steady, shy))
    drafter = CascadeDrafter(
        [CascadeMember("lookup", Recorded(hits, boast), 0.0, True), CascadeMember("model", counter, cost)]
    )
    together = pace(drafter, lambda: cost * counter.num_asked)
    assert together > 0.97 * max(alone.values()), alone
    if cost < 0.2:
        assert together > 1.05 * max(alone.values()), "taking turns is better than either"


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_a_model_on_few_trials_is_found_whatever_is_drafted_ahead(num_ahead: int) -> None:
    """Nothing is learned from drafts ahead. Were they trials, too, each trial could be one of them."""
    names = [f"r{i}" for i in range(4)]
    models = {name: Counted(Recorded([4], 0.8)) for name in names}
    silent = Split({name: Recorded([0], 0.5) for name in names})
    members = [CascadeMember("silent", silent, 0.0), CascadeMember("model", Split(dict(models)), 0.3)]
    drafter = CascadeDrafter(members, lambda: 0.0, few_trials=True)
    for name in names:
        drafter.open(name, (0, 1, 2), 3, SAMPLING)
    length = 3
    for _ in range(60):
        for _ in range(num_ahead):
            drafter.propose([Demand(name, 3, ahead=(length,)) for name in names])
        drafts = drafter.propose([Demand(name, 7) for name in names])
        truth = tuple(range(length, length + 8))
        nums_right = [common_prefix_len(draft.token_ids, truth) for draft in drafts]
        for name in names:
            drafter.extend(name, truth[:5])
        length += 5
    assert nums_right == [4] * 4


@pytest.mark.parametrize(("configured", "seconds", "pays"), [(0.05, 0.05, False), (0.9, 0.002, True)])
def test_what_a_member_costs_is_learned_from_how_long_it_takes(configured: float, seconds: float, pays: bool) -> None:
    """A model that gets one token right half of the time: worth a tenth of a round, not two rounds and a half, at the price
    of a second that the target tells."""
    clock = [0.0]
    model = Counted(Recorded([1, 0], 0.5), seconds, clock)
    members = [CascadeMember("silent", Recorded([0], 0.5), 0.0), CascadeMember("model", model, configured)]
    drafter = CascadeDrafter(members, clock=lambda: clock[0])
    drafter.open("r", (0, 1, 2), 3, SAMPLING)
    length = 3
    for _ in range(400):
        (draft,) = drafter.propose([Demand("r", 7, terms=DraftTerms(7, second_price=60.0))])
        truth = tuple(range(length, length + 8))
        num_right = common_prefix_len(draft.token_ids, truth)
        drafter.extend("r", truth[: num_right + 1])
        length += num_right + 1
    assert (model.num_asked > 300) if pays else (model.num_asked < 100)


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


@dataclass
class Sometimes(Scripted):
    """Of one token, the right one as often as ``rate`` says; its luck is its own."""

    rate: float = 0.5
    wrong: int = 0
    luck: random.Random = field(default_factory=random.Random)
    last: int = 0

    def _draft(self, demand: Demand) -> Draft:
        is_right = self.luck.random() < self.rate
        self.last = CONTENT[self.lengths[demand.request_id] % 800] if is_right else self.wrong
        return Draft(demand.request_id, (self.last,), (self.confidence,))


def test_of_lookups_that_agree_it_is_surer_than_of_those_that_differ() -> None:
    """Each is right half of the time, and both wrong in ways of their own: where they agree they are right."""
    one, other = (Sometimes(1, 0.5, wrong=i, luck=random.Random(i)) for i in (1, 2))
    drafter = CascadeDrafter([CascadeMember("a", one, 0.0), CascadeMember("b", other, 0.0)])
    drafter.open("r", CONTENT[:3], 3, SAMPLING)
    handed: dict[bool, list[float]] = {True: [], False: []}
    for length in range(3, 1503):
        (draft,) = drafter.propose([Demand("r", 1)])
        if length > 1200 and draft.token_ids:
            handed[one.last == other.last].append(draft.confidences[0])
        drafter.extend("r", CONTENT[length % 800 : length % 800 + 1])
    assert sum(handed[True]) / len(handed[True]) > 0.85
    assert sum(handed[False]) / len(handed[False]) < 0.55


def test_a_cost_below_nothing_is_refused() -> None:
    with pytest.raises(InvalidField, match="from 0"):
        CascadeDrafter([CascadeMember("a", Scripted(1, 0.5), -1.0), CascadeMember("b", Scripted(1, 0.5), 0.0)])
