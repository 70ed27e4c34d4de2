"""The router's slot: reports of targets in, a table out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from cluster.config import Config, DrafterConfig, NgramOptions, PolicyConfig, RouterConfig, SuffixOptions
from cluster.types import Commit, FinishReason, RoutingTable
from engine.telemetry import LONGEST_ROUND, Telemetry
from router.assignment import (
    Chain,
    MemberCosts,
    Observation,
    PoolMember,
    Positions,
    RequestView,
    ScoreCounts,
    nobody,
    without_lookups,
)
from router.cost_model import TableCost
from router.drafter.epsilon_greedy import EpsilonGreedy
from router.drafter.policies import member_costs, scored_by
from router.drafter.router import FALLBACK_COST, Router, SlotReport
from router.drafter.seats import Fixed
from router.estimates.drafter_stats import Judgement
from router.estimates.drift import DriftDetector
from router.papers.not_a_bandit import Hedge

EPSILON_GREEDY = RouterConfig(policy=PolicyConfig(kind="epsilon-greedy"))
OTHER = DrafterConfig(name="suffix", options=SuffixOptions())
POOL = (PoolMember("a", 8, 0.1), PoolMember("b", 8, 0.2))


def report(
    *requests: RequestView, version: int = 0, drafters: tuple[str, ...] = ("a", "b"), seen: tuple[Observation, ...] = ()
) -> SlotReport:
    return SlotReport(requests, seen, version, drafters)


def view(request_id: str, *chain: str) -> RequestView:
    return RequestView(request_id, 5, 5, chain)


def test_no_target_no_table() -> None:
    assert Router(Fixed(), POOL).slot([]) is None


def test_a_request_that_opted_out_gets_the_target_alone() -> None:
    router = Router(Fixed(), POOL)
    table = router.slot([report(view("r"), replace(view("plain", "a"), opted_out=True))])
    assert table is not None
    assert table.chains == {"r": ("a",), "plain": ()}


def test_a_table_is_published_once_and_again_to_whoever_missed_it() -> None:
    router = Router(Fixed(), POOL)
    table = router.slot([report(view("r"))])
    assert table == RoutingTable(1, {"r": ("a",)}, (("a",),))
    assert router.slot([report(view("r", "a"), version=1)]) is None
    again = router.slot([report(view("r", "a"), version=1), report(version=0)])
    assert again is not None
    assert (again.version, again.chains) == (2, table.chains)


def test_a_drafter_that_one_target_lost_or_that_drains_gets_nobody() -> None:
    router = Router(Fixed(), POOL)
    table = router.slot([report(view("r", "a")), report(drafters=("b",))])
    assert table is not None
    assert table.chains == {"r": ("b",)}
    assert table.defaults == (("b",),)
    router.set_draining(frozenset({"b"}))
    table = router.slot([report(view("r", "b")), report(drafters=("b",))])
    assert table is not None
    assert table.chains == {"r": ()}


def test_a_target_that_has_just_joined_takes_no_drafter_from_others() -> None:
    router = Router(Fixed(), POOL)
    table = router.slot([report(view("r", "a")), report(drafters=())])
    assert table is not None
    assert table.chains == {"r": ("a",)}


def test_a_drafter_that_could_be_loaded_is_wished_for_and_its_requests_are_served_on() -> None:
    pool = (*POOL, PoolMember("lazy", 8, 0.01))
    router = Router(Fixed(("lazy",)), pool)
    table = router.slot([report(view("r", "a"), view("s"))])
    assert table is not None
    assert table.chains == {"r": (), "s": ()}, "what nobody offers cannot be had"
    router.set_offered(frozenset({"lazy"}), frozenset())
    table = router.slot([report(view("r", "a"), view("s"))])
    assert table is not None
    assert router.load_demand == {"lazy": 2}
    assert table.chains["r"] == ("a",)
    assert "lazy" not in {*table.chains["s"], *table.defaults[0]}
    table = router.slot([report(view("r", "a"), view("s", "b"), drafters=("a", "b", "lazy"))])
    assert table is not None
    assert (table.chains, router.load_demand) == ({"r": ("lazy",), "s": ("lazy",)}, {})


def test_what_was_measured_of_a_drafter_does_not_hold_on_its_fallback() -> None:
    costs = MemberCosts(((1, 0.001),))

    class Watched(Fixed):
        def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
            seen.append({member.name: (member.cost, member.costs) for member in pool})
            return super().assign(requests, pool)

    seen: list[dict[str, tuple[float, MemberCosts | None]]] = []
    router = Router(Watched(), POOL)
    reported = replace(report(view("r")), draft_costs={"a": 0.3, "b": 0.3}, member_costs={"a": costs, "b": costs})
    router.set_offered(frozenset(), frozenset({"b"}))
    router.slot([reported])
    assert seen[0] == {"a": (0.3, costs), "b": (pytest.approx(0.3 * FALLBACK_COST), None)}


def test_a_router_that_starts_over_is_heard() -> None:
    table = Router(Fixed(), POOL).slot([report(view("r"), version=41)])
    assert table is not None
    assert table.version == 42


def test_what_targets_saw_decides_also_for_requests_to_come() -> None:
    router = Router(EpsilonGreedy(epsilon=0.0), POOL)
    seen = tuple(
        Observation(f"{drafter}{i}", drafter, 20, 80, accepted, 20 + accepted, 1.0)
        for drafter, accepted in (("a", 5), ("b", 60))
        for i in range(5)
    )
    table = router.slot([report(view("r", "a"), seen=seen)])
    assert table is not None
    assert table.chains == {"r": ("b",)}
    assert table.defaults == (("b",),)


def test_scores_of_all_targets_reach_the_policy() -> None:
    router = Router(Hedge(), POOL)
    views = [view(f"r{i}", "a") for i in range(4)]
    router.slot([report(*views)])
    scores = tuple(ScoreCounts(one.request_id, "b", Positions((50,), (49,))) for one in views)
    wrong = tuple(Observation(one.request_id, "a", 50, 200, 1, 51, 1.0, Positions((50,), (1,))) for one in views)
    table = router.slot([replace(report(*views, seen=wrong), scores=scores)])
    assert table is not None
    assert set(table.chains.values()) == {("b",)}


def test_a_drafter_whose_acceptance_collapses_is_left_and_tried_again() -> None:
    watch = DriftDetector(6.0)  # out for ten slots
    router = Router(Fixed(), POOL, watch)

    def slot(number: int, num_right: int, num_seen: int = 4) -> dict[str, tuple[str, ...]]:
        requests = [view(f"r{number}-{i}", "a") for i in range(4)]
        seen = tuple(
            Observation(one.request_id, "a", 10, 40, num_right, 10 + num_right, 0.5, Positions((16,), (num_right,)))
            for one in requests[:num_seen]
        )
        table = router.slot([report(*requests, seen=seen)])
        assert table is not None
        return dict(table.chains)

    for number in range(40):
        assert set(slot(number, 10).values()) == {("a",)}
    number = 40
    while ("a",) in (chains := slot(number, 0)).values():
        number += 1
        assert number < 60
    assert set(chains.values()) == {("b",)}
    for later in range(100, 109):
        assert set(slot(later, 0, num_seen=0).values()) == {("b",)}
    assert sorted(slot(200, 10, num_seen=1).values()) == [("a",), ("a",), ("b",), ("b",)]  # on trial, which it passes
    for later in range(300, 303):
        slot(later, 10, num_seen=1)
    assert set(slot(400, 10).values()) == {("a",)}


class Recorder(Fixed):
    pool: Sequence[PoolMember] = ()

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        self.pool = pool
        return super().assign(requests, pool)


def test_what_catching_up_costs_reaches_the_policy() -> None:
    policy = Recorder()
    costs = MemberCosts(((1, 0.01),), 1e-4, 0.02)
    Router(policy, (*POOL, PoolMember("a/1", 8, 0.1))).slot([replace(report(), member_costs={"a": costs})])
    assert {member.name: member.costs for member in policy.pool} == {"a": costs, "b": None, "a/1": costs}


def test_the_policy_knows_in_how_many_targets_a_companion_is() -> None:
    policy = Recorder()
    pool = (PoolMember("a", 8, 0.1), PoolMember("b", 8, 0.2, leads=False))
    Router(policy, pool).slot([report(view("r"), drafters=("a", "b")), report(view("q"), drafters=("a", "b"))])
    assert {member.name: member.num_targets for member in policy.pool} == {"a": 1, "b": 2}


def test_measured_costs_are_a_straight_line_through_what_was_measured() -> None:
    class Cost(TableCost):
        def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
            return 0.001 * draft_len * batch**0.5 if drafter == "ngram" else None

        def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
            return 0.02 + 0.0001 * num_tokens if drafter == "ngram" else None

    config = Config(drafters=(DrafterConfig(name="ngram", options=NgramOptions(), max_draft_len=4), OTHER))
    found = member_costs(config, Cost((1,), (0.02,)))
    assert set(found) == {"ngram"}
    assert found["ngram"].draft_s[0] == (1, 0.004)
    assert found["ngram"].catch_up_s == pytest.approx(0.0001)
    assert found["ngram"].switch_s == pytest.approx(0.02)


def committed(
    telemetry: Telemetry, num_tokens: int, judgement: Judgement | None, finish: FinishReason | None = None
) -> None:
    commit = Commit("r", 10, (5,) * num_tokens, drafter="d", finish=finish)
    telemetry.count_round(commit, "d", judgement, draft_len=4)


@pytest.mark.parametrize(
    ("num_tokens", "judged", "num_right", "finish", "expected"),
    [
        (3, 3, 2, None, Positions((1, 1, 1), (1, 1))),  # two right, then one wrong
        (1, 0, 0, None, Positions((1,), (0,))),  # it had no idea
        (3, 2, 2, None, Positions((1, 1, 1), (1, 1))),  # right, but no more to say
        (5, 4, 4, None, Positions((1, 1, 1, 1), (1, 1, 1, 1))),  # the longest draft, all of it right
        (3, 2, 2, FinishReason.LENGTH, Positions((1, 1), (1, 1))),  # no more was wanted
    ],
)
def test_a_round_tells_which_positions_were_reached_and_right(
    num_tokens: int, judged: int, num_right: int, finish: FinishReason | None, expected: Positions
) -> None:
    telemetry = Telemetry()
    committed(telemetry, num_tokens, Judgement("d", (0.5,) * judged, num_right), finish)
    (seen,) = telemetry.take_observations()
    right = expected.num_right
    assert seen.positions.num_reached == expected.num_reached
    assert tuple(n for n in seen.positions.num_right if n) == tuple(n for n in right if n)


def test_a_pause_of_the_machine_is_no_time_of_the_drafter_that_it_befell() -> None:
    telemetry = Telemetry()
    for now_s in (0.02, 0.04, 150.04, 150.06):
        commit = Commit("r", 10, (5,), drafter="d")
        telemetry.count_round(commit, "d", now_s=now_s)
        telemetry.record(1, [commit], 0.02, now_s)
    (seen,) = telemetry.take_observations()
    assert seen.elapsed_s == pytest.approx(0.02 + LONGEST_ROUND * 0.02 + 0.02)


def test_a_draft_that_was_cut_short_is_not_taken_for_silence() -> None:
    """The beginning of it was committed while it was made."""
    telemetry = Telemetry()
    committed(telemetry, 3, Judgement("d", (0.5,) * 2, 2, unfinished=True))
    (seen,) = telemetry.take_observations()
    assert seen.positions == Positions((1, 1), (1, 1))


def test_a_proposal_that_came_too_late_says_nothing_of_positions() -> None:
    telemetry = Telemetry()
    committed(telemetry, 1, None)
    (seen,) = telemetry.take_observations()
    assert seen.positions == Positions()
    assert seen.num_rounds == 1


@pytest.mark.parametrize(
    "config",
    [PolicyConfig(kind="hedge"), PolicyConfig(kind="chain"), PolicyConfig(kind="lbss")],
    ids=lambda config: config.kind,
)
def test_drafters_keep_in_step_for_policies_that_move_requests(config: PolicyConfig) -> None:
    assert scored_by(config)(POOL, 1) == POOL
    assert not scored_by(PolicyConfig(kind="fixed"))(POOL, 1)


def test_one_replica_of_each_drafter_keeps_in_step() -> None:
    pool = [
        PoolMember("a", 8, 0.1),
        PoolMember("a/1", 8, 0.1),
        PoolMember("b", 8, 0.2, leads=False),
        PoolMember("c", 8, 0.2),
        PoolMember("c/1", 8, 0.2),
    ]
    linked = ("a", "a/1", "b", "c/1")
    for scored, scorers in ((nobody, ()), (without_lookups, ("a", "c/1"))):
        table = Router(Hedge(), pool, scored=scored).slot([report(view("r"), drafters=linked)])
        assert table is not None
        assert table.scorers == scorers


COMBINED = [PoolMember("both", 2, 0.1, leads=False, lookups=("a", "b")), PoolMember("a", 8, 0.1), PoolMember("b", 8, 0.1)]


@pytest.mark.parametrize(
    ("num_requests", "linked", "chosen", "scorers"),
    [
        (2, ("both", "a", "b"), {"both"}, ()),  # it queries both anyway
        (2, ("a", "b"), {"a", "b"}, ("a", "b")),  # it is down
        (3, ("both", "a", "b"), {"both", "a", "b"}, ("a", "b")),  # it has no place for the third
    ],
)
def test_nobody_chooses_among_lookups_that_a_combination_queries(
    num_requests: int, linked: tuple[str, ...], chosen: set[str], scorers: tuple[str, ...]
) -> None:
    router = Router(Hedge(), COMBINED, scored=without_lookups)
    requests = [view(f"r{i}") for i in range(num_requests)]
    given, last = set[str](), router.first_table()
    for _ in range(40):  # slots enough for every drafter to be explored, if it may
        last = router.slot([report(*requests, version=last.version, drafters=linked)]) or last
        given |= {name for chain in last.chains.values() for name in chain}
        requests = [replace(request, chain=last.chains.get(request.request_id, request.chain)) for request in requests]
    assert given <= chosen
    assert given >= {"both"} & set(linked)
    assert last.scorers == scorers
