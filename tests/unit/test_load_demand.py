"""Requests that are to be with a drafter that is not in memory."""

from router.assignment import Chain, PoolMember, RequestView
from router.drafter.seats import reseat_absent

POOL = (PoolMember("a", 2, 0.1), PoolMember("b", 2, 0.1), PoolMember("lazy", 8, 0.1))


def view(request_id: str, *chain: str) -> RequestView:
    return RequestView(request_id, 5, 9, chain)


def test_without_wishes_nothing_changes() -> None:
    chains: dict[str, Chain] = {"r": ("a",), "s": ()}
    assert reseat_absent(chains, [view("r"), view("s")], POOL, frozenset({"lazy"})) == (chains, {})


def test_who_wishes_stays_where_it_is_or_takes_the_emptiest_place_and_is_counted() -> None:
    requests = [view("r", "a"), view("s", "b"), view("t"), view("u")]
    chains: dict[str, Chain] = {"r": ("lazy",), "s": ("b",), "t": ("lazy",), "u": ("lazy",)}
    settled, load_demand = reseat_absent(chains, requests, POOL, frozenset({"lazy"}))
    assert load_demand == {"lazy": 3}
    assert settled == {"r": ("a",), "s": ("b",), "t": settled["t"], "u": settled["u"]}
    assert {settled["t"], settled["u"]} == {("a",), ("b",)}


def test_where_no_place_is_left_the_target_serves_alone() -> None:
    pool = (PoolMember("a", 1, 0.1), POOL[2])
    chains: dict[str, Chain] = {"r": ("a",), "s": ("lazy",)}
    settled, _ = reseat_absent(chains, [view("r", "a"), view("s")], pool, frozenset({"lazy"}))
    assert settled == {"r": ("a",), "s": ()}


def test_who_is_with_a_chain_keeps_all_of_it() -> None:
    chains: dict[str, Chain] = {"r": ("a", "lazy")}
    settled, load_demand = reseat_absent(chains, [view("r", "a", "b")], POOL, frozenset({"lazy"}))
    assert (settled, load_demand) == ({"r": ("a", "b")}, {"lazy": 1})
