"""Who is in memory, where: limits, eviction of the least worthwhile, calm, fallbacks, claims."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidField
from router.residency import GB, MAX_OFFERED, MAX_RETIRING, LoadDemand, ModelPool, Moves, Stay, Tenant, check_fits

CALM_S = 10.0
LIMITS = {"gpu": 10, "cpu": 10}
A, B = (Tenant(name, "gpu", 6, Stay.LAZY) for name in ("a", "b"))
WANTED, BUSY = LoadDemand(num_wanting=1), LoadDemand(num_requests=1)


def pool(*tenants: Tenant, limits: dict[str, int] | None = None) -> ModelPool:
    made = ModelPool(tenants, LIMITS if limits is None else limits, CALM_S)
    made.start(0.0)
    return made


def updates(made: ModelPool, num: int, start_s: float, **demands: LoadDemand) -> list[Moves]:
    found = []
    for i in range(num):
        found.append(made.update(demands, start_s + i))
        made.check_integrity()
    return found


def test_all_that_fits_is_loaded_at_the_start_and_a_lazy_one_when_it_is_wanted() -> None:
    made = ModelPool((replace(A, num_bytes=4, stay=Stay.START), replace(B, num_bytes=4)), LIMITS, CALM_S)
    assert made.start(0.0).load == (("a", "gpu"),)
    assert made.offered(0.0) == {"b"}
    assert not made.update({}, 1.0)
    assert made.update({"b": WANTED}, 2.0).load == (("b", "gpu"),)
    assert made.resident == {"a": "gpu", "b": "gpu"}
    assert not made.offered(3.0)
    assert not any(updates(made, 50, 3.0, a=BUSY, b=BUSY))


def test_one_that_is_idle_gives_way_to_one_that_is_wanted_and_first_it_retires() -> None:
    made = pool(A, B)
    made.update({"a": WANTED}, 0.0)
    assert not any(updates(made, 9, 1.0, b=WANTED)), "a has not been there for long"
    told, gone = updates(made, 2, 20.0, b=WANTED)
    assert not told
    assert gone == Moves(("a",), (("b", "gpu"),))
    assert (made.num_loads, made.num_evictions) == ({"a": 1, "b": 1}, {"a": 1, "b": 0})


def test_one_that_requests_are_with_is_not_evicted_and_stays_when_it_is_never_idle() -> None:
    made = pool(A, B)
    made.update({"a": WANTED}, 0.0)
    made.update({"b": LoadDemand(num_wanting=9)}, 20.0)
    assert made.retiring == {"a"}
    waiting = updates(made, MAX_RETIRING + 1, 21.0, a=BUSY, b=LoadDemand(num_wanting=9))
    assert not any(waiting)
    assert made.resident == {"a": "gpu"}
    assert not made.retiring


def test_one_that_is_used_more_than_another_is_wanted_stays() -> None:
    made = pool(A, B)
    made.update({"a": WANTED}, 0.0)
    assert not any(updates(made, 60, 1.0, a=LoadDemand(num_requests=4), b=LoadDemand(num_wanting=4)))
    assert not made.retiring


def test_who_retires_for_one_that_is_not_wanted_any_more_stays() -> None:
    made = pool(A, B)
    made.update({"a": WANTED}, 0.0)
    made.update({"b": LoadDemand(num_wanting=2)}, 20.0)
    assert made.retiring == {"a"}
    updates(made, 4, 21.0, a=BUSY)
    assert not made.retiring


def test_the_least_worth_of_many_gives_way_and_reloading_counts() -> None:
    small = [
        replace(A, name=name, num_bytes=3, reload_s=reload_s) for name, reload_s in (("x", 1.0), ("y", 1.0), ("z", 9.0))
    ]
    made = pool(*small, B)
    updates(made, 1, 0.0, x=WANTED, y=WANTED, z=WANTED)
    updates(made, 3, 1.0, x=LoadDemand(num_requests=2), y=LoadDemand(num_requests=1), z=LoadDemand(num_requests=1))
    wanted = LoadDemand(num_wanting=40)
    updates(made, 1, 20.0, b=wanted)
    assert made.retiring == {"y", "x"}, "z takes longest to come back"


def test_a_pinned_one_is_never_evicted() -> None:
    made = pool(replace(A, stay=Stay.PINNED), B)
    assert not any(updates(made, 100, 0.0, b=LoadDemand(num_wanting=50)))
    assert not made.offered(200.0)


def test_where_a_device_is_full_of_busy_ones_a_cpu_serves_and_later_it_comes_home() -> None:
    made = pool(A, replace(B, fallback="cpu", fallback_bytes=8))
    made.update({"a": WANTED}, 0.0)
    assert made.update({"a": BUSY, "b": WANTED}, 1.0).load == (("b", "cpu"),)
    assert made.on_fallback == {"b"}
    assert made.num_fallbacks == {"a": 0, "b": 1}
    made.failed("a", 1000.0)  # room on the GPU
    assert not any(updates(made, 8, 2.0, b=BUSY))
    updates(made, 2, 11.0, b=BUSY)
    assert made.retiring == {"b"}
    assert made.update({}, 14.0) == Moves(("b",), (("b", "gpu"),))
    assert not made.on_fallback


def test_one_that_failed_is_put_aside_for_as_long_as_it_is_told() -> None:
    made = pool(A)
    made.update({"a": WANTED}, 0.0)
    made.failed("a", 30.0)
    assert not made.offered(29.0)
    assert not any(updates(made, 29, 1.0, a=WANTED))
    assert made.update({"a": WANTED}, 30.0).load == (("a", "gpu"),)


def test_one_that_finds_no_room_is_not_offered_for_ever() -> None:
    made = pool(A, B)
    made.update({"a": WANTED}, 0.0)
    updates(made, MAX_OFFERED + 1, 20.0, a=LoadDemand(num_requests=9), b=WANTED)
    assert not made.offered(20.0 + MAX_OFFERED)
    assert made.offered(20.0 + MAX_OFFERED + CALM_S) == {"b"}


def test_what_cannot_fit_is_refused_with_figures() -> None:
    limits = {"gpu": 2 * GB, "cpu": 8 * GB}
    large = Tenant("a", "gpu", 3 * GB)
    with pytest.raises(InvalidField, match=r"takes 3\.00 GB, more than the 2\.00 GB for drafters on gpu: .*, got 'a'"):
        check_fits([large], limits)
    check_fits([replace(large, fallback="cpu", fallback_bytes=4 * GB)], limits)
    pinned = [Tenant(name, "cpu", 5 * GB, Stay.PINNED) for name in ("p", "q")]
    with pytest.raises(
        InvalidField, match=r"pinned, and take 10\.00 GB together \(p 5\.00, q 5\.00\), more than the 8\.00 GB"
    ):
        check_fits(pinned, limits)
    check_fits(pinned, {})


SIZES = st.integers(1, 10)
TENANTS = st.lists(
    st.tuples(SIZES, SIZES, st.sampled_from([*Stay]), st.booleans(), st.floats(0.1, 9)), min_size=1, max_size=5
)
COUNTS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans())


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(TENANTS, st.lists(st.lists(COUNTS, min_size=5, max_size=5), max_size=60))
def test_whatever_is_wanted_limits_hold_and_nobody_is_evicted_while_in_use_or_soon_after_it_came(
    shapes: list[tuple[int, int, Stay, bool, float]], course: list[list[tuple[int, int, bool]]]
) -> None:
    tenants = [
        Tenant(f"t{i}", "gpu", size, stay, "cpu" if falls else None, other, reload_s)
        for i, (size, other, stay, falls, reload_s) in enumerate(shapes)
    ]
    try:
        made = ModelPool(tenants, LIMITS, CALM_S)
    except InvalidField:
        return
    stays = {tenant.name: tenant.stay for tenant in tenants}
    since_s = dict.fromkeys((name for name, _ in made.start(0.0).load), 0.0)
    made.check_integrity()
    for step, counts in enumerate(course):
        now_s = 2.0 * (step + 1)
        before = made.resident
        demands = {
            tenant.name: LoadDemand(
                num_requests if tenant.name in before else 0, 0 if tenant.name in before else num_wanting
            )
            for tenant, (num_requests, num_wanting, _) in zip(tenants, counts, strict=False)
        }
        moves = made.update(demands, now_s)
        made.check_integrity()
        for name in moves.evict:
            assert demands[name].num_requests == 0
            assert stays[name] is not Stay.PINNED
            assert now_s - since_s.pop(name) >= CALM_S
        for name, device in moves.load:
            assert name not in since_s, "it was there already"
            assert made.resident[name] == device
            since_s[name] = now_s
        assert since_s.keys() == made.resident.keys()
        for tenant, (_, _, fails) in zip(tenants, counts, strict=False):
            if fails and step % 7 == 0 and tenant.name in made.resident and tenant.stay is Stay.LAZY:
                made.failed(tenant.name, now_s + 5.0)
                del since_s[tenant.name]
                made.check_integrity()
