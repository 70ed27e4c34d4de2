"""What a round is thought to take if everybody were with a drafter."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from router.assignment import MemberCosts, Observation, PoolMember
from router.estimates.round_times import MEMORY_SLOTS, RoundTimes
from tests.support.observations import right_at

LOOKUP = PoolMember("lookup", 8, 0.0, costs=MemberCosts(((1, 0.0),)))
TWIN = replace(LOOKUP, name="twin")
REMOTE = PoolMember("remote", 8, 0.05, costs=MemberCosts(((1, 0.01), (4, 0.01))))
COMPANION = PoolMember("companion", 8, 0.04, costs=MemberCosts(((1, 0.003), (2, 0.004), (4, 0.006))), leads=False)
POOL = (LOOKUP, TWIN, REMOTE, COMPANION)
BASE_S = 0.015


def of(
    times: RoundTimes, num_requests: int = 4, copies: int = 1, share: float = 1.0, users: int | None = None
) -> Mapping[str, float]:
    num_users = np.full(len(POOL), float(num_requests if users is None else users))
    found = times.of(POOL, [copies] * len(POOL), np.full(len(POOL), share), num_users, num_requests)
    return dict(zip([member.name for member in POOL], found.tolist(), strict=True))


def slot(times: RoundTimes, seconds: Mapping[str, float], users: Mapping[str, int], rounds: int = 10) -> None:
    """``seconds`` of a round with each drafter, and how many requests were with it."""
    times.observe(
        [
            Observation(f"{name}{i}", name, rounds, 0, 0, rounds, rounds * seconds[name], right_at(rounds, 0))
            for name, num in users.items()
            for i in range(num)
        ]
    )


def alike(times: RoundTimes, seconds: float, users: Mapping[str, int]) -> None:
    slot(times, dict.fromkeys(users, seconds), users)


def ready() -> RoundTimes:
    """It has seen the pool, as in every slot before anything is observed."""
    times = RoundTimes()
    of(times)
    return times


def test_who_holds_up_all_is_charged_with_it_and_nobody_else() -> None:
    """All rounds of a slot take equally long, with a companion as with a lookup; its 4 ms for two stood in all of them."""
    times = ready()
    for _ in range(50):
        alike(times, BASE_S, {"lookup": 4})
        alike(times, BASE_S + 0.004, {"lookup": 2, "companion": 2})
    found = of(times)
    assert found["lookup"] == pytest.approx(BASE_S, rel=0.01)
    assert found["companion"] == pytest.approx(BASE_S + 0.006, rel=0.01)  # with four that it drafts for


def test_a_companion_that_all_are_with_is_charged_once() -> None:
    times = ready()
    for _ in range(50):
        alike(times, BASE_S + 0.006, {"companion": 4})
    found = of(times)
    assert found["companion"] == pytest.approx(BASE_S + 0.006, rel=0.01)
    assert found["lookup"] == pytest.approx(BASE_S, rel=0.01)  # which nobody has tried


def test_a_companion_that_is_asked_seldom_costs_seldom() -> None:
    times = ready()
    alike(times, BASE_S, {"lookup": 4})
    assert of(times, share=0.1)["companion"] == pytest.approx(BASE_S + 0.0006, rel=0.01)


def test_of_two_that_are_alike_none_looks_faster_by_chance() -> None:
    """Prompts fall into the rounds of the one or of the other."""
    random = np.random.default_rng(3)
    times = ready()
    seconds: dict[str, list[float]] = {"lookup": [], "twin": []}
    for _ in range(40):
        name = ("lookup", "twin")[int(random.integers(2))]
        seconds[name].append(BASE_S + 0.02 * float(random.exponential()))
        alike(times, seconds[name][-1], {name: 4})
    means = [np.mean(of_one) for of_one in seconds.values()]
    assert max(means) / min(means) > 1.05
    found = of(times)
    assert found["lookup"] == pytest.approx(found["twin"], rel=0.01)


def test_prompts_make_no_drafter_cheaper() -> None:
    """They are computed whoever drafts: what a draft costs is compared with a round that has none."""
    times = ready()
    for number in range(80):
        alike(times, BASE_S + (0.2 if number % 2 else 0.0), {"lookup": 4})
    found = of(times)
    assert found["lookup"] == pytest.approx(BASE_S, rel=0.01)
    assert found["companion"] == pytest.approx(BASE_S + 0.006, rel=0.01)


def test_where_it_is_certain_what_was_measured_counts_and_not_the_profile() -> None:
    random = np.random.default_rng(3)
    slow, fast = ready(), ready()
    for _ in range(100):
        base_s = BASE_S * float(random.uniform(0.9, 1.1))
        slot(slow, {"lookup": base_s, "twin": base_s + 0.01}, {"lookup": 2, "twin": 2})  # a lookup that is overloaded
        slot(fast, {"lookup": base_s, "remote": base_s}, {"lookup": 2, "remote": 2})  # a model that drafts meanwhile
    found = of(slow)
    assert found["twin"] - found["lookup"] == pytest.approx(0.01, rel=0.15)
    found = of(fast)
    assert found["remote"] - found["lookup"] == pytest.approx(0.0, abs=0.001)


def test_who_was_not_measured_costs_what_the_profile_says() -> None:
    times = ready()
    before = of(times)
    assert before["remote"] / before["lookup"] == pytest.approx(1.0 + 0.05 * 8)  # draft tokens in steps of the target
    alike(times, BASE_S, {"lookup": 4})
    assert of(times)["remote"] == pytest.approx(BASE_S + 0.01)


def test_copies_share_the_requests() -> None:
    times = ready()
    alike(times, BASE_S, {"lookup": 4})
    assert of(times, copies=2)["companion"] == pytest.approx(BASE_S + 0.004)
    assert of(times, num_requests=2, copies=4)["companion"] == pytest.approx(BASE_S + 0.0015)  # every other pass has one


def test_who_is_with_a_companion_bears_what_it_takes_of_the_rounds_of_all() -> None:
    times = ready()
    alike(times, BASE_S, {"lookup": 4})
    found = of(times, users=1)
    assert found["companion"] == pytest.approx(BASE_S + 4 * 0.003)
    assert found["remote"] == pytest.approx(BASE_S + 0.01)  # drafts elsewhere


def test_what_was_measured_long_ago_gives_way_to_the_profile() -> None:
    random = np.random.default_rng(3)
    times = ready()

    def noisy(seconds: float) -> float:
        return seconds * float(random.uniform(0.9, 1.1))

    for _ in range(50):
        slot(times, {"lookup": noisy(BASE_S), "twin": noisy(3 * BASE_S)}, {"lookup": 2, "twin": 2})
    assert of(times)["twin"] > 2 * BASE_S
    for _ in range(int(10 * MEMORY_SLOTS)):
        alike(times, noisy(BASE_S), {"lookup": 4})
    assert of(times)["twin"] == pytest.approx(of(times)["lookup"], rel=0.01)


def test_one_slot_is_no_certainty() -> None:
    times = ready()
    slot(times, {"lookup": BASE_S, "twin": 3 * BASE_S}, {"lookup": 3, "twin": 1})  # one prompt would do that
    assert _ratio(times) == pytest.approx(1.0)


def test_requests_that_follow_each_other_are_no_larger_batch() -> None:
    times = ready()
    drafted = COMPANION.costs.draft_s[-1][1] if COMPANION.costs else 0.0  # for four at once
    for _ in range(20):
        alike(times, BASE_S + drafted, {"companion": 4})
    before = of(times)["lookup"]
    for number in range(20):
        times.observe(
            [
                Observation(f"{number}-{i}", "companion", 5 if i else 10, 0, 0, 10, (5 if i else 10) * (BASE_S + drafted))
                for i in range(7)  # one that lasts, and three times two that share its time
            ]
        )
    assert of(times)["lookup"] == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_what_was_kept_says_the_same_again(ratio: float) -> None:
    random = np.random.default_rng(3)
    times, fresh = ready(), ready()
    for _ in range(60):
        base_s = BASE_S * float(random.uniform(0.7, 1.3))
        slot(times, {"lookup": base_s, "twin": ratio * base_s * float(random.uniform(0.7, 1.3))}, {"lookup": 2, "twin": 2})
    fresh.restore(times.snapshot())
    assert fresh.snapshot() == times.snapshot()
    assert _ratio(fresh) == pytest.approx(_ratio(times), rel=0.3) == pytest.approx(ratio, rel=0.2)


def _ratio(times: RoundTimes) -> float:
    found = of(times)
    return found["twin"] / found["lookup"]


@pytest.mark.parametrize("users", [{"lookup": 4}, {"companion": 4}, {"remote": 1, "companion": 3}])
def test_a_round_never_takes_nothing(users: Mapping[str, int]) -> None:
    """Even where the profile says that drafts alone take longer than rounds did."""
    times = ready()
    for _ in range(3):
        alike(times, 0.001, users)
    assert min(of(times).values()) > 0.0001
