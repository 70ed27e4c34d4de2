"""The router's slot: reports of targets in, a table out."""

from actors.router import Router
from actors.target import SlotReport
from cluster.config import EpsilonGreedyPolicy, FixedPolicy
from cluster.types import RoutingTable
from router.assignment import Observation, PoolMember, RequestView
from router.policies import build_policy

POOL = (PoolMember("a", 8, 0.1), PoolMember("b", 8, 0.2))


def report(
    *requests: RequestView, version: int = 0, drafters: tuple[str, ...] = ("a", "b"), seen: tuple[Observation, ...] = ()
) -> SlotReport:
    return SlotReport(requests, seen, version, drafters)


def view(request_id: str, *chain: str) -> RequestView:
    return RequestView(request_id, 5, 5, chain)


def test_no_target_no_table() -> None:
    assert Router(build_policy(FixedPolicy()), POOL, 4).slot([]) is None


def test_a_table_is_published_once_and_again_to_whoever_missed_it() -> None:
    router = Router(build_policy(FixedPolicy()), POOL, 4)
    table = router.slot([report(view("r"))])
    assert table == RoutingTable(1, {"r": ("a",)}, (("a",),), 4)
    assert router.slot([report(view("r", "a"), version=1)]) is None
    again = router.slot([report(view("r", "a"), version=1), report(version=0)])
    assert again is not None
    assert (again.version, again.chains) == (2, table.chains)


def test_a_drafter_that_one_target_lost_or_that_drains_gets_nobody() -> None:
    router = Router(build_policy(FixedPolicy()), POOL, 4)
    table = router.slot([report(view("r", "a")), report(drafters=("b",))])
    assert table is not None
    assert table.chains == {"r": ("b",)}
    assert table.defaults == (("b",),)
    router.set_draining(frozenset({"b"}))
    table = router.slot([report(view("r", "b")), report(drafters=("b",))])
    assert table is not None
    assert table.chains == {"r": ()}


def test_a_router_that_starts_over_is_heard() -> None:
    table = Router(build_policy(FixedPolicy()), POOL, 4).slot([report(view("r"), version=41)])
    assert table is not None
    assert table.version == 42


def test_what_targets_saw_decides_also_for_requests_to_come() -> None:
    router = Router(build_policy(EpsilonGreedyPolicy(epsilon=0.0)), POOL, 4)
    seen = tuple(
        Observation(f"{drafter}{i}", drafter, 20, 80, accepted, 20 + accepted, 1.0)
        for drafter, accepted in (("a", 5), ("b", 60))
        for i in range(5)
    )
    table = router.slot([report(view("r", "a"), seen=seen)])
    assert table is not None
    assert table.chains == {"r": ("b",)}
    assert table.defaults == (("b",),)
