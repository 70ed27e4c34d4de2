"""The process that judges chains: what it is told, what the router asks it, and what it does without an answer."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from actors.chain_scheduler import MAX_SLOTS, ChainSlot, ModelChainScheduler, beside
from cluster.config import Config, PolicyConfig
from cluster.messages import LevelReport, Verified
from router.assignment import Chain, Levels, MemberCosts, Observation, PoolMember, RequestView
from router.cost_model import monotone
from router.papers.specrouter import REFRESH_SLOTS
from tests.support.observations import right_at

TARGET = monotone(((1, 0.025), (65, 0.057)))
SEEN = (Observation("x", "small", 200, 1600, 0, 250, 1.0, right_at(200, 50)),)
AGREES = Verified("small", (1000, 950, 900), (950, 900, 850))


def member(name: str, step_s: float) -> PoolMember:
    return PoolMember(name, 8, step_s / 0.025, costs=MemberCosts(((1, 8 * step_s), (64, 16 * step_s))), verifies=True)


POOL = (member("small", 0.0005), member("large", 0.010))


def view(request_id: str, *chain: str) -> RequestView:
    return RequestView(request_id, 10, 30, chain)


class FakeChains:
    """Notes what it is told."""

    def __init__(self, decided: Mapping[str, Chain] | None = None) -> None:
        self.decided, self.told, self.asked = decided, list[ChainSlot](), list[ChainSlot]()

    def tell(self, slot: ChainSlot) -> None:
        self.told.append(slot)

    def ask(self, slot: ChainSlot) -> Mapping[str, Chain] | None:
        self.asked.append(slot)
        return self.decided


def test_every_policy_tells_its_slots_and_decides_itself() -> None:
    chains = FakeChains()
    policy = beside(chains, PolicyConfig(kind="fixed", chain=("small",)))
    levels = Levels([LevelReport("large", 1, 1, 0.1, 0, (AGREES,))], TARGET)
    policy.observe(SEEN, (), levels)
    assert policy.assign([view("r")], POOL) == {"r": ("small",)}
    assert chains.told == [ChainSlot(SEEN, (), levels, [view("r")], POOL)]
    policy.assign([view("r")], POOL)
    assert chains.told[1] == ChainSlot(requests=[view("r")], pool=POOL), "nothing is told twice"
    assert not chains.asked


def test_the_policy_chain_asks_and_without_an_answer_requests_stay() -> None:
    decided = {"r": ("small", "large")}
    views = [view("r", "large"), view("new"), view("lost", "small")]
    pool = (replace(POOL[0], healthy=False), POOL[1])
    policy = beside(FakeChains(decided), PolicyConfig(kind="chain"))
    assert policy.assign(views, POOL) == {"r": ("small", "large"), "new": (), "lost": ("small",)}
    assert beside(FakeChains(), PolicyConfig(kind="chain")).assign(views, pool) == {"r": ("large",), "new": (), "lost": ()}


@pytest.fixture
def scheduler() -> Iterator[ModelChainScheduler]:
    made = ModelChainScheduler(Config())
    made.start()
    yield made
    made.stop()
    assert made.wait_end(1.0) == "stopped"


def test_it_judges_chains_under_any_policy_from_what_targets_report(scheduler: ModelChainScheduler) -> None:
    """Another policy is configured. A draft of `large` takes 80 ms alone, and less behind `small`, which agrees with it."""
    assert scheduler.report() == ()
    right = Observation("y", "large", 200, 1600, 0, 1700, 1.0, right_at(200, 1500))
    slot = ChainSlot((*SEEN, right), (), Levels([LevelReport("large", 0, 0, 0.0, 0, (AGREES,))], TARGET), [view("r")], POOL)
    assert scheduler.judge(slot) == {"r": ("small", "large")}
    fastest = scheduler.report()
    assert fastest[0].chain == ("small", "large")
    assert {one.chain for one in fastest} == {("small",), ("large",), ("small", "large")}
    assert [one.per_token_ms for one in fastest] == sorted(one.per_token_ms for one in fastest)
    assert scheduler.stalled_s() == 0.0


def test_distributions_of_a_pair_that_was_not_seen_together_decide(scheduler: ModelChainScheduler) -> None:
    """By how often each agrees with the target, `small` is no help to `large`; their distributions are nearly the same."""
    right = Observation("y", "large", 200, 1600, 0, 1700, 1.0, right_at(200, 1500))
    chosen, scores, pool = [], [], (member("small", 0.006), POOL[1])
    for compared in ((), (Verified("small", (), (), num_compared=30, overlap=28.5),)):
        levels = Levels([LevelReport("large", 1, 1, 0.0, 0, compared)], TARGET)
        for _ in range(REFRESH_SLOTS):
            answer = scheduler.judge(ChainSlot((*SEEN, right), (), levels, [RequestView("r", 10, 10, ())], pool))
            assert answer is not None
        chosen.append(answer["r"])
        scores.append({one.chain: one.scores for one in scheduler.report()}["small", "large"])
    assert chosen == [("large",), ("small", "large")]
    assert scores == [(None,), (pytest.approx(0.95),)]


def test_a_slot_is_given_up_where_too_many_wait() -> None:
    stuck = ModelChainScheduler(Config())  # judges nothing, since it was not started
    with ThreadPoolExecutor(MAX_SLOTS + 1) as pool:
        assert set(pool.map(stuck.judge, [ChainSlot()] * (MAX_SLOTS + 1))) == {None}


def test_an_error_in_a_slot_ends_it_so_that_another_is_started() -> None:
    broken = ModelChainScheduler(Config())
    broken.start()
    assert broken.judge(ChainSlot(requests=[None], pool=POOL)) is None  # type: ignore[list-item]
    ended = broken.wait_end(5.0)
    assert ended is not None
    assert ended.startswith("AttributeError")
