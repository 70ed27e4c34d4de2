"""The policy `chain`: which chain each request gets, from times and acceptance; and the scheduler that publishes them."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest

from cluster.config import PolicyConfig
from cluster.messages import LevelReport, Verified
from router.assignment import (
    TARGET_ONLY,
    Chain,
    Levels,
    MemberCosts,
    Observation,
    PoolMember,
    Positions,
    RequestView,
    ScoreCounts,
)
from router.cost_model import monotone
from router.drafter.chains import Level, best_window, predict
from router.drafter.router import Router, SlotReport
from router.papers.specrouter import MOST_TRIALS, ModelChains
from router.papers.specrouter_estimates import TRIAL_SLOTS

TARGET = monotone(((1, 0.025), (65, 0.057)))


def member(name: str, step_s: float, capacity: int = 8, verifies: bool = True, max_draft_len: int = 8) -> PoolMember:
    costs = MemberCosts(((1, step_s * max_draft_len), (64, 2 * step_s * max_draft_len)))
    return PoolMember(name, capacity, step_s / 0.025, max_draft_len=max_draft_len, costs=costs, verifies=verifies)


POOL = [member("small", 0.0005), member("middle", 0.005), member("large", 0.010)]


def view(request_id: str, *chain: str) -> RequestView:
    return RequestView(request_id, 10, 30, chain)


def positions(rate: float, num: int = 200) -> Positions:
    """Of ``num`` drafts of eight tokens, each right with the same probability, given those before."""
    reached = [round(num * rate**i) for i in range(9)]
    return Positions(tuple(reached[:8]), tuple(reached[1:]))


def taught(policy: ModelChains, **rates: float) -> ModelChains:
    policy.observe([Observation("x", name, 200, 1600, 0, 200, 1.0, positions(rate)) for name, rate in rates.items()])
    return policy


def learned(policy: ModelChains, proposer: str, verifier: str, rate: float, num: int = 1000) -> None:
    seen = positions(rate, num)
    report = LevelReport(verifier, 0, 0, 0.0, 0, (Verified(proposer, seen.num_reached, seen.num_right),))
    policy.observe([], levels=Levels([report], TARGET))


def chosen(policy: ModelChains, pool: list[PoolMember] = POOL, *chain: str) -> tuple[str, ...]:
    return policy.assign([view("r", *chain)], pool)["r"]


def settled(policy: ModelChains, pool: list[PoolMember] = POOL, *chain: str) -> tuple[str, ...]:
    """After as long as a choice is given."""
    return [chosen(policy, pool, *chain) for _ in range(TRIAL_SLOTS)][-1]


def policy(**settings: Any) -> ModelChains:
    made = ModelChains(**settings)
    made.observe([], levels=Levels(target=TARGET))
    return made


def acceptance_of(policy: ModelChains) -> object:
    kept = policy.snapshot()
    assert isinstance(kept, dict)
    return kept["acceptance"]


MANY = 10**9  # drafts, beside which no prior counts
PAIR = [POOL[0], POOL[2]]
SMALL, LARGE = (monotone(((1, step_s), (64, 2 * step_s))) for step_s in (0.0005, 0.010))


def known(ratios: Mapping[Chain, float] = {}, **rates: float) -> ModelChains:
    """Knows acceptance exactly, that half of a draft is verified, and measured over predicted times of chains."""
    of = {name: positions(rate, MANY) for name, rate in rates.items()}
    found = policy()
    found.restore(
        {
            "acceptance": {name: [list(one.num_reached), list(one.num_right)] for name, one in of.items()},
            "in_time": {name: [MANY, MANY] for name in rates},
            "fills": {name: [MANY, 4 * MANY] for name in rates},
            "overruns": [[list(chain), [400, 400, 400 * ratio, 400 * ratio**2]] for chain, ratio in ratios.items()],
        }
    )
    return found


def per_token_s(batch: int, *levels: Level) -> float:
    return predict(levels, TARGET, batch).per_token_s


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_times_per_token_are_predicted_from_what_is_known(batch: int) -> None:
    """Requests with committed tokens share a pass; a placeholder counts where there is nothing else. The chain took thrice
    as long as predicted, so `large` is better alone."""
    found = known({("small", "large"): 3.0}, small=0.5, large=0.98)
    learned(found, "small", "large", 0.9, MANY)
    chains = found.assign([*[view(f"r{i}") for i in range(batch)], RequestView("new", 0, 0, ())], PAIR)
    small, large = Level("small", SMALL, 8, (0.5,), 0.5), Level("large", LARGE, 8, (0.98,), 0.5)
    below = best_window([replace(small, acceptance=(0.9,))], LARGE, max(1, batch))
    least = {("small",): [small], ("large",): [large], ("small", "large"): [below, large]}
    expected = {chain: per_token_s(max(1, batch), *levels) for chain, levels in least.items()}
    expected["small", "large"] *= 3.0
    assert found.per_token_s == pytest.approx(expected)
    assert set(chains.values()) == {("large",)}


def test_times_of_chains_are_predicted_anew_every_fourth_slot() -> None:
    """From similarity, and from the times of passes of as many rows: here twice those that were profiled."""
    found = known(small=0.5, large=0.8)
    found.assign([view("r"), RequestView("new", 0, 0, ())], PAIR)
    before = dict(found.per_token_s)
    found.observe([], levels=Levels([LevelReport("large", 10, 80, 20 * LARGE.at(8), 0)], TARGET))
    learned(found, "small", "large", 0.1, MANY)
    for is_new in (False, False, False, True):
        found.assign([view("r"), RequestView("new", 0, 0, ())], PAIR)
        changed = {chain for chain in before if found.per_token_s[chain] != pytest.approx(before[chain])}
        assert changed == ({("large",), ("small", "large")} if is_new else set())
    small, large = Level("small", SMALL, 1, (0.1,), 0.5), Level("large", LARGE.scaled(2.0), 8, (0.8,), 0.5)
    assert found.per_token_s["large",] == pytest.approx(per_token_s(1, large))
    assert found.per_token_s["small", "large"] == pytest.approx(per_token_s(1, small, large))


@pytest.mark.parametrize("elapsed_s", [1.0, 0.1, 0.02])
def test_measured_times_leave_out_prompts_down_to_what_was_predicted(elapsed_s: float) -> None:
    """Five tokens of 16 ms, and a first token after a prompt of 100, which takes 50 ms."""
    found, seen = known(small=0.5), Observation("r", "small", 2, 16, 3, 5, elapsed_s)
    new = RequestView("new", 100, 101, ())
    for chain in ((), ("small",)):
        assert found.assign([view("r", *chain)], PAIR[:1]) == {"r": ("small",)}
    expected_s = 5 * found.per_token_s["small",]
    found.observe([seen, replace(seen, drafter="large"), replace(seen, request_id="gone")])
    found.assign([view("r", "small"), new], PAIR[:1])
    measured_s = max(elapsed_s - TARGET.at(101) + TARGET.at(1), min(elapsed_s, expected_s))
    sums = found._overheads.sums["small",]
    assert sums == pytest.approx((1.0, expected_s, measured_s, measured_s**2 / expected_s))
    found.assign([view("r", "small"), new], PAIR[:1])
    assert found._overheads.sums["small",] == sums, "without a comparison nothing fades"


def test_parameters_are_the_settings_and_trials_fit_into_places() -> None:
    told = PolicyConfig(kind="chain").parameters
    assert told == {name: signature(ModelChains).parameters[name].default for name in told}
    found, views = taught(policy(), small=0.9, middle=0.9, large=0.9), [view(f"r{i}") for i in range(3)]
    pool = [replace(one, capacity=1) for one in POOL]
    chains = [found.assign(views, pool).values() for _ in range(4 * TRIAL_SLOTS)]
    assert all(len({chain[-1] for chain in one}) == 3 for one in chains)
    assert {len(chain) for one in chains for chain in one} == {1, 2}


def test_a_proposer_that_the_verifier_believes_rides_ahead_of_it_and_another_does_not() -> None:
    for rate, chain in ((0.9, ("small", "large")), (0.02, ("large",))):
        found = taught(policy(), small=0.2, middle=0.3, large=0.95)
        for lower, upper in (("small", "large"), ("middle", "large"), ("small", "middle")):
            learned(found, lower, upper, rate if (lower, upper) == ("small", "large") else 0.01)
        assert chosen(found) == chain


def tried(found: ModelChains, num_requests: int, num_slots: int, known: Chain = ()) -> Counter[Chain]:
    """Chains that single requests have while all others have another, by slots."""
    views, counts = [view(f"r{i}") for i in range(num_requests)], Counter[Chain]()
    pool = [replace(one, capacity=64) for one in POOL]
    for _ in range(num_slots):
        chains = found.assign(views, pool)
        shares = Counter(chains.values())
        counts.update([chain for chain, num in shares.items() if num == 1])
        for lower, upper in {chain[-2:] for chain in shares if len(chain) > 1 and chain[-2:] == known}:
            learned(found, lower, upper, 0.5)
    return counts


def test_a_pair_that_no_chain_has_shown_is_tried_by_one_request_in_few_slots() -> None:
    pairs = [("small", "middle"), ("small", "large"), ("middle", "large")]
    rates = {"small": 0.6, "middle": 0.6, "large": 0.6}
    assert not tried(taught(policy(), **rates), 4, TRIAL_SLOTS), "the choice itself is on trial"
    counts = tried(taught(policy(), **rates), 4, 4 * TRIAL_SLOTS)
    assert dict(counts) == dict.fromkeys(pairs, MOST_TRIALS)
    counts = tried(taught(policy(), **rates), 4, 4 * TRIAL_SLOTS, known=pairs[0])
    assert counts[pairs[0]] == 1, "its agreement is known then"
    assert not tried(taught(policy(), **rates), 40, 4 * TRIAL_SLOTS), "too many would wait for it"
    assert not tried(taught(policy(), small=0.6, middle=0.6), 4, 4 * TRIAL_SLOTS), "nothing is known of large"


def test_a_request_counts_as_often_as_another_in_what_chains_are_predicted_to_take() -> None:
    """Of the first there are twenty times as many drafts, since they are short: each pass takes one of each."""
    found, requests = taught(policy(), small=0.5), [view("hard"), view("easy"), RequestView("new", 0, 0, ())]
    found.assign(requests, POOL[:1])
    found.observe(
        [
            Observation("hard", "small", 2000, 0, 0, 2000, 50.0, positions(0.1, 2000)),
            Observation("easy", "small", 100, 0, 0, 500, 2.5, positions(0.9, 100)),
        ]
    )
    found.assign(requests, POOL[:1])
    num_tokens = [sum(rate**k for k in range(9)) for rate in (0.1, 0.9)]
    round_s = TARGET.at(2 * 9) + 8 * 0.0005
    assert found.per_token_s["small",] == pytest.approx(round_s / (sum(num_tokens) / 2), rel=0.1)


def test_three_levels_of_drafters_where_each_is_a_good_step() -> None:
    pool = [member("small", 0.0002), member("middle", 0.002), member("large", 0.012)]
    found = taught(policy(), small=0.1, middle=0.2, large=0.97)
    learned(found, "small", "middle", 0.95)
    learned(found, "middle", "large", 0.95)
    learned(found, "small", "large", 0.05)
    assert chosen(found, pool) == ("small", "middle", "large")
    chosen(found, [*pool[:2], replace(pool[2], healthy=False)], "small", "middle", "large")
    assert settled(found, pool)[1:] == ("large",), "it failed behind three"
    assert chosen(taught(policy(max_levels=2), small=0.1, middle=0.2, large=0.97), pool) in (("large",), ("middle",), ())


def test_nothing_rides_ahead_where_nothing_is_faster_than_the_target() -> None:
    assert chosen(taught(policy(), small=0.01, middle=0.01, large=0.01)) == TARGET_ONLY
    dear = [member("large", 0.030)]
    assert chosen(taught(policy(), large=0.95), dear) == TARGET_ONLY


def test_a_large_batch_is_served_by_shorter_drafting() -> None:
    """Where rows cost as much as passes, verifying drafts that are often wrong loses."""
    steep = monotone(((1, 0.025), (9, 0.2), (513, 12.0)))
    found = taught(ModelChains(), small=0.4)
    found.observe([], levels=Levels(target=monotone(((1, 0.025), (513, 0.026)))))
    pool = [member("small", 0.0005, capacity=64)]
    assert chosen(found, pool) == ("small",)
    found.observe([], levels=Levels(target=steep))
    many = {f"r{i}": view(f"r{i}", "small") for i in range(32)}
    for _ in range(TRIAL_SLOTS):
        chains = found.assign(list(many.values()), pool)
    assert set(chains.values()) == {TARGET_ONLY}


def test_only_models_verify_and_companions_ride_ahead_of_nobody() -> None:
    found = taught(policy(), ngram=0.5, small=0.9)
    learned(found, "ngram", "small", 0.9)
    learned(found, "small", "ngram", 0.9)
    ngram, small = member("ngram", 0.00001, verifies=False), member("small", 0.005)
    assert chosen(found, [ngram, small]) == ("ngram", "small")
    assert chosen(found, [small, ngram])[-1:] != ("ngram",) or chosen(found, [small, ngram]) == ("ngram",)
    assert "ngram" not in chosen(found, [replace(ngram, leads=False), small])[:-1]


def test_what_a_request_itself_saw_decides_for_it() -> None:
    found = taught(policy(), small=0.6, large=0.6)
    found.assign([view("code"), view("prose")], POOL)
    own = positions(0.97, 60), positions(0.02, 60)
    found.observe(
        [Observation("code", "large", 60, 480, 0, 60, 1.0, own[0])],
        [ScoreCounts("code", "small", own[1]), ScoreCounts("prose", "small", own[0]), ScoreCounts("prose", "large", own[1])],
    )
    for _ in range(TRIAL_SLOTS):
        chains = found.assign([view("code"), view("prose")], POOL)
    assert chains["code"][-1] == "large"
    assert chains["prose"][-1] == "small"


def test_drafts_that_come_too_late_are_not_waited_for_and_are_not_wrong() -> None:
    found = taught(policy(), small=0.6, middle=0.1, large=0.9)
    best = chosen(found)
    assert best[-1] == "large"
    before = acceptance_of(found)
    for _ in range(50):
        found.observe([Observation("r", "large", 20, 0, 0, 20, 1.0, num_missed=20)])
    assert settled(found, POOL, *best) == ("small",)
    assert acceptance_of(found) == before


def test_a_late_draft_costs_no_more_than_none_so_a_chain_that_pays_is_not_given_up_for_it() -> None:
    """Nor would it be found out without it that drafts have become punctual."""
    for step_s, chain in ((0.010, ("large",)), (0.030, TARGET_ONLY)):
        found = taught(policy(), large=0.9)
        found.observe([Observation("r", "large", 400, 0, 0, 480, 1.0, num_missed=390)])
        assert chosen(found, [member("large", step_s)]) == chain, "one that does not pay in time does not pay late"


def test_once_the_target_is_measured_chains_are_foreseen_anew() -> None:
    found = taught(ModelChains(), small=0.6)
    chosen(found)
    found.observe([], levels=Levels(target=TARGET))
    assert chosen(found) == ("small",)


def test_a_small_gain_moves_nobody() -> None:
    pool = [member("a", 0.00100), member("b", 0.00103)]
    for chain, drafter in ((), "a"), (("b",), "b"):
        assert settled(taught(policy(), a=0.8, b=0.8), pool, *chain) == (drafter,)


@pytest.mark.parametrize("chain", [("large/1",), ("small", "large/1")])
def test_a_request_stays_at_its_replica(chain: Chain) -> None:
    pool = [POOL[0], *[replace(POOL[2], name=f"large/{i}") for i in range(2)]]
    found = taught(policy(), small=0.2, large=0.95)
    learned(found, "small", "large", 0.95)
    assert chosen(found, pool, *chain) == ("small", "large/1")


def test_full_members_leave_the_next_best() -> None:
    pool = [member("small", 0.0005, capacity=1), member("large", 0.004, capacity=1)]
    found = taught(policy(), small=0.8, large=0.8)
    chains = found.assign([view(f"r{i}") for i in range(3)], pool)
    assert sorted(chain[-1:] for chain in chains.values()) == [(), ("large",), ("small",)]


def test_a_drafter_that_is_lost_behind_a_chain_gets_shorter_ones_when_it_is_back() -> None:
    found = taught(policy(calm_slots=3), small=0.2, middle=0.1, large=0.95)
    learned(found, "small", "large", 0.95)
    assert chosen(found) == ("small", "large")
    gone = [*POOL[:2], replace(POOL[2], healthy=False)]
    assert chosen(found, gone, "small", "large")[-1:] != ("large",)
    assert settled(found) == ("large",)
    for _ in range(4):
        found.observe([])
    assert chosen(found) == ("small", "large")


def test_want_of_memory_shortens_chains() -> None:
    found = taught(policy(), small=0.2, middle=0.1, large=0.95)
    learned(found, "small", "large", 0.95)
    assert chosen(found) == ("small", "large")
    found.observe([], levels=Levels([LevelReport("small", 4, 16, 0.0, num_lost=3)]))
    assert chosen(found) == ("large",)


def nobody(slot: int) -> list[RequestView]:
    return []


def served(
    found: ModelChains,
    num_slots: int,
    seconds: Callable[[set[Chain]], float],
    others: Callable[[int], list[RequestView]] = nobody,
) -> dict[str, Chain]:
    """Two requests for so many slots, of four tokens each; what a token took depends on the chains that they were with.
    ``others`` are there beside them."""
    chains: dict[str, Chain] = {"code": (), "prose": ()}
    for slot in range(num_slots):
        views = [RequestView(name, 10, 30 + 4 * slot, chain) for name, chain in chains.items()]
        assigned = found.assign([*views, *others(slot)], POOL)
        chains = {name: assigned[name] for name in chains}
        taken_s = 4 * seconds(set(chains.values()))
        found.observe([Observation(name, chain[-1], 1, 8, 3, 4, taken_s) for name, chain in chains.items() if chain])
    return chains


def backlog(slot: int) -> list[RequestView]:
    return [RequestView(f"r{i}", 20, 20, ()) for i in range(6)]


@pytest.mark.parametrize("others", [nobody, backlog])
def test_a_chain_that_takes_longer_than_was_foreseen_is_left_for_another(others: Callable[[int], list[RequestView]]) -> None:
    """Models that share cores slow each other down: no profile says so. Also where requests wait beside them."""
    rates = {"small": 0.2, "middle": 0.1, "large": 0.95}
    as_foreseen = served(taught(policy(), **rates), 80, lambda chains: 0.016, others)
    assert {chain[-1] for chain in as_foreseen.values()} == {"large"}
    slow = served(taught(policy(), **rates), 80, lambda chains: 0.1, others)
    assert not any("large" in chain for chain in slow.values())


@pytest.mark.slow
def test_what_was_found_out_is_forgotten_with_the_target_alone_and_not_while_requests_only_wait() -> None:
    """With the target alone nothing is learned: a chain that was slow once would never be tried again."""
    for num_tokens, is_tried in ((0, False), (10, True)):
        found = taught(policy(), small=0.2, middle=0.1, large=0.95)
        assert set(served(found, 80, lambda chains: 0.1).values()) == {TARGET_ONLY}
        seen = {found.assign([RequestView("r", 20, 20 + num_tokens, ())], POOL)["r"] for _ in range(2500)}
        assert any("large" in chain for chain in seen) == is_tried


def test_requests_are_with_one_chain_where_to_spread_them_turns_out_slow() -> None:
    """What each of them saw speaks for another drafter; but then they share no pass."""

    def unlike() -> ModelChains:
        found = taught(policy(), small=0.6, middle=0.1, large=0.6)
        found.assign([view("code"), view("prose")], POOL)
        right, wrong = positions(0.97, 60), positions(0.3, 60)
        found.observe(
            [],
            [ScoreCounts("code", "large", right), ScoreCounts("code", "small", wrong), ScoreCounts("prose", "small", right)],
        )
        return found

    for spread_s, num_chains in ((0.012, 2), (0.1, 1)):
        chains = served(unlike(), 80, lambda chains, slow=spread_s: slow if len(chains) > 1 else 0.018)
        assert len(set(chains.values())) == num_chains


def test_what_chains_turned_out_to_be_outlives_the_scheduler() -> None:
    rates = {"small": 0.2, "middle": 0.1, "large": 0.95}
    found = taught(policy(), **rates)
    served(found, 80, lambda chains: 0.1)
    kept = json.loads(json.dumps(found.snapshot()))
    assert kept["fills"]
    fresh = policy()
    fresh.restore(kept)
    assert fresh.snapshot() == found.snapshot()
    assert chosen(fresh) == TARGET_ONLY
    assert policy().snapshot() is None
    for wrong in ({"overruns": [[["large"], [1.0, 0.0, 1.0, 1.0]]]}, {"fills": {"large": [-1.0, 1.0]}}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fresh.restore({**kept, **wrong})
    assert chosen(fresh) == TARGET_ONLY, "what is no snapshot changes nothing"


def test_simscores_outlive_the_scheduler() -> None:
    found = policy()
    compared = Verified("small", (60,), (50,), num_compared=30, overlap=28.5)
    found.observe([], levels=Levels([LevelReport("large", 1, 1, 0.0, 0, (compared,))], TARGET))
    kept = json.loads(json.dumps(found.snapshot()))
    fresh = policy()
    fresh.restore(kept)
    assert fresh.scores(("small", "large")) == (pytest.approx(0.95),)
    assert fresh.snapshot() == found.snapshot()
    for wrong in ({"overlaps": [["small", "large", 30.0, 31.0]]}, {"mapping": [-1.0, 1.0]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fresh.restore({**kept, **wrong})
    fresh.restore({name: kept[name] for name in ("acceptance", "in_time", "fills", "overruns")})
    assert fresh.scores(("small", "large")) == (None,), "of a version that did not keep them"


def test_a_snapshot_takes_the_place_of_all_that_was_learned() -> None:
    kept = taught(policy(), small=0.2, middle=0.1, large=0.95).snapshot()
    used = taught(policy(time_weight=1.0), small=0.2, middle=0.1, large=0.95)
    learned(used, "small", "large", 0.95)
    assert chosen(used) == ("small", "large")
    used.observe(
        [], levels=Levels([LevelReport("large", 10, 10, 10 * 0.5, 0, ()), LevelReport("small", 4, 16, 0.0, num_lost=3)])
    )
    fresh = policy(time_weight=1.0)
    for one in (used, fresh):
        one.restore(kept)
    assert chosen(used) == chosen(fresh)
    assert chosen(used)[-1] == "large"


def test_the_scheduler_publishes_chains_and_learns_from_what_targets_report() -> None:
    found = taught(ModelChains(), small=0.2, middle=0.1, large=0.95)
    scheduler = Router(found, POOL)
    seen = positions(0.95, 1000)
    report = SlotReport(
        (view("r"),),
        (),
        0,
        ("small", "middle", "large"),
        member_costs={one.name: one.costs for one in POOL if one.costs},
        levels=(LevelReport("large", 0, 0, 0.0, 0, (Verified("small", seen.num_reached, seen.num_right),)),),
        target_passes=tuple(zip(TARGET.rows, TARGET.step_s_at, strict=True)),
    )
    table = scheduler.slot([report])
    assert table is not None
    assert table.chains == {"r": ("small", "large")}
    assert scheduler.slot([]) is None
