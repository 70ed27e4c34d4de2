"""Chains: the expected time per token against chains that are played, and which chain is chosen."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.studies.specrouter import simplified_per_token_s
from router.assignment import TARGET_ONLY
from router.cost_model import TableCost, monotone
from router.drafter.chains import LearnedWindow, Level, Prediction, candidates, fastest, predict
from tests.support.quick import first

TARGET = monotone(((1, 0.025), (65, 0.057)))  # linear: a constant and a time per row
SMALL = Level("small", monotone(((1, 0.001), (65, 0.00164))), 4, (0.6,))
MIDDLE = Level("middle", monotone(((1, 0.004), (65, 0.0104))), 3, (0.8, 0.7))
LARGE = Level("large", monotone(((1, 0.010), (65, 0.0228))), 8, (0.85,))
CHAINS: dict[str, list[Level]] = {
    "target": [],
    "one": [replace(SMALL, window=8)],
    "two": [SMALL, LARGE],
    "three": [SMALL, MIDDLE, LARGE],
    "hopeless-proposer": [replace(SMALL, acceptance=(0.0,)), LARGE],
    "perfect": [replace(SMALL, acceptance=(1.0,)), replace(LARGE, acceptance=(1.0,))],
    "lookup": [replace(SMALL, acceptance=(0.15, 0.85)), LARGE],
}


class Played:
    """A chain run with dice: the same loops as `drafters.model`, request by request."""

    def __init__(self, levels: Sequence[Level], target: TableCost, rng: random.Random) -> None:
        self.levels, self.target, self.rng = levels, target, rng
        self.num_passes = [0] * (len(levels) + 1)

    def round(self, batch: int) -> tuple[float, int]:
        """Seconds, and tokens of all requests."""
        window = self.levels[-1].window if self.levels else 0
        seconds = self.draft(len(self.levels) - 1, [window] * batch) if self.levels else 0.0
        self.num_passes[-1] += 1
        seconds += self.target.at(batch * (window + 1))
        return seconds, sum(1 + (self.right(self.levels[-1], window) if self.levels else 0) for _ in range(batch))

    def draft(self, i: int, lens: list[int]) -> float:
        level, seconds = self.levels[i], 0.0
        left = [n for n in lens if n]
        while left:
            asked = [0] * len(left) if i == 0 else [min(self.levels[i - 1].window, n - 1) for n in left]
            if any(asked):
                seconds += self.draft(i - 1, asked)
            self.num_passes[i] += 1
            seconds += level.passes.at(sum(asked) + len(left))
            right = [self.right(self.levels[i - 1], n) if n else 0 for n in asked]
            left = [n for n in (n - r - 1 for n, r in zip(left, right, strict=True)) if n]
        return seconds

    def right(self, level: Level, num_tokens: int) -> int:
        return next((i for i in range(num_tokens) if self.rng.random() >= level.at(i)), num_tokens)


@pytest.mark.parametrize("batch", first(1, [2, 1, 8]))
@pytest.mark.parametrize("name", CHAINS)
def test_the_expected_time_is_that_of_chains_that_are_played(name: str, batch: int) -> None:
    levels = CHAINS[name]
    played, num_rounds = Played(levels, TARGET, random.Random(7)), 1500
    rounds = [played.round(batch) for _ in range(num_rounds)]
    found = predict(levels, TARGET, batch)
    assert found.round_s == pytest.approx(sum(s for s, _ in rounds) / num_rounds, rel=0.03)
    assert found.num_tokens == pytest.approx(sum(n for _, n in rounds) / num_rounds / batch, rel=0.05)
    for i in range(len(levels)):
        assert num_passes(levels, i, batch) == pytest.approx(played.num_passes[i] / num_rounds, rel=0.05)


def num_passes(levels: Sequence[Level], i: int, batch: int = 1) -> float:
    """Expected passes of a level: the time of a round in which only these take any."""
    timed = [replace(level, passes=TableCost((1,), (float(j == i),))) for j, level in enumerate(levels)]
    return predict(timed, TableCost((1,), (0.0,)), batch).round_s


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_steps_in_the_time_of_a_pass_cost_little_of_the_precision(batch: int) -> None:
    """As on hardware, where a pass is flat as long as weights are what it waits for."""
    stepped = monotone(((1, 0.025), (16, 0.026), (64, 0.076)))
    levels = [SMALL, replace(LARGE, passes=monotone(((1, 0.010), (16, 0.0104), (64, 0.030))))]
    played = Played(levels, stepped, random.Random(3))
    rounds = [played.round(batch) for _ in range(600)]
    assert predict(levels, stepped, batch).round_s == pytest.approx(sum(s for s, _ in rounds) / 600, rel=0.05)


def random_levels(rng: random.Random) -> list[Level]:
    num_levels = rng.randint(1, 3)
    return [
        Level(
            f"m{i}",
            monotone(((1, 0.001 * 3**i), (64, 0.001 * 3**i * rng.uniform(1.0, 8.0)))),
            rng.randint(1, 6),
            tuple(rng.random() for _ in range(rng.randint(1, 3))),
        )
        for i in range(num_levels)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_gains_by_what_is_quicker_or_more_often_right(seed: int) -> None:
    rng = random.Random(seed)
    levels, batch = random_levels(rng), rng.choice((1, 3, 16))
    before = predict(levels, TARGET, batch)
    i = rng.randrange(len(levels))
    quicker = [replace(one, passes=one.passes.scaled(0.7)) if j == i else one for j, one in enumerate(levels)]
    after = predict(quicker, TARGET, batch)
    nobody_asks = num_passes(quicker, i, batch) == 0.0  # below a window of one
    assert after.per_token_s < before.per_token_s or nobody_asks
    assert predict(levels, TARGET.scaled(2.0), batch).per_token_s > before.per_token_s
    top = levels[-1]
    surer = [*levels[:-1], replace(top, acceptance=tuple(a + 0.5 * (1.0 - a) for a in top.acceptance))]
    assert predict(surer, TARGET, batch).per_token_s <= before.per_token_s
    assert predict(surer, TARGET, batch).round_s == before.round_s  # of the target's verdict nothing is known before


@pytest.mark.parametrize("seed", range(40))
def test_what_rides_below_changes_no_accepted_length(seed: int) -> None:
    levels = random_levels(random.Random(seed))
    assert predict(levels, TARGET).num_tokens == predict(levels[-1:], TARGET).num_tokens


def test_a_proposer_that_is_never_right_costs_its_own_steps_and_rows() -> None:
    levels = CHAINS["hopeless-proposer"]
    found = predict(levels, TARGET)
    assert num_passes(levels, 1) == LARGE.window  # one token a pass, as without it
    assert found.round_s > predict([LARGE], TARGET).round_s


def test_a_larger_batch_waits_for_its_slowest_draft() -> None:
    assert num_passes(CHAINS["two"], 1) < num_passes(CHAINS["two"], 1, batch=32) <= LARGE.window


def test_the_papers_formula_charges_one_pass_of_each_level_that_is_reached() -> None:
    assert simplified_per_token_s([], TARGET) == TARGET.at(1)
    one = [replace(SMALL, window=4)]
    tokens = 1 + 0.6 + 0.6**2 + 0.6**3 + 0.6**4
    assert simplified_per_token_s(one, TARGET) == pytest.approx((4 * 0.001 + TARGET.at(4)) / tokens)
    two = [SMALL, replace(LARGE, window=4)]
    tokens = sum(0.85**k for k in range(5))
    cycle_s = 4 * 0.001 + LARGE.passes.at(4) + 0.6 * TARGET.at(4)
    assert simplified_per_token_s(two, TARGET) == pytest.approx(cycle_s / tokens)


def test_candidates_keep_the_order_of_cost_and_verify_above_the_first() -> None:
    assert candidates(("ngram", "a", "b"), {"a", "b"}) == [
        (),
        ("ngram",), ("a",), ("b",),
        ("ngram", "a"), ("ngram", "b"), ("a", "b"),
        ("ngram", "a", "b"),
    ]  # fmt: skip
    assert candidates(("a", "b"), {"a", "b"}, max_levels=2) == [(), ("a",), ("b",)]
    assert candidates(("a", "b"), {"a", "b"}, max_levels=1) == [TARGET_ONLY]
    assert candidates(("a", "ngram"), {"a"}) == [(), ("a",), ("ngram",)]
    assert all(len(chain) <= 3 for chain in candidates("abcdef", "abcdef"))


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_is_chosen_where_it_is_faster_and_only_there(seed: int) -> None:
    """Against dice: the chosen chain is played, and so are all others."""
    rng = random.Random(seed)
    pool = {level.drafter: replace(level, window=4) for level in random_levels(rng)}
    chains = candidates(tuple(pool), set(pool))
    batch = rng.choice((1, 4))

    def of(chain: Sequence[str]) -> Prediction:
        return predict([pool[name] for name in chain], TARGET, batch)

    chosen = fastest([(chain, of(chain).per_token_s) for chain in chains])
    played_s = {}
    for chain in chains:
        play = Played([pool[name] for name in chain], TARGET, random.Random(seed))
        rounds = [play.round(batch) for _ in range(200)]
        played_s[chain] = batch * sum(s for s, _ in rounds) / sum(n for _, n in rounds)
    assert played_s[chosen] <= 1.1 * min(played_s.values())


def test_a_request_moves_only_for_more_than_the_hysteresis() -> None:
    found = [(("a",), 1.0), (("a", "b"), 0.95)]
    assert fastest(found) == ("a", "b")
    assert fastest(found, ("a",), 0.1) == ("a",)
    assert fastest(found, ("a",), 0.01) == ("a", "b")
    assert fastest(found, ("gone",), 0.5) == ("a", "b")  # where it was is no longer to be had
    assert fastest([]) == TARGET_ONLY


@pytest.mark.parametrize(
    ("right", "step_s", "token_s", "window"),
    [(8, 1.0, 0.0, 8), (2, 1.0, 0.0, 2), (0, 0.1, 0.0, 1), (8, 1.0, 1.0, 8), (8, 10.0, 4.0, 1), (8, 8.0, 2.5, 1)],
)
def test_a_window_is_learned_from_passes(right: int, step_s: float, token_s: float, window: int) -> None:
    """W tokens in W times `step_s`, verified in 10 and W times `token_s`: where all are right, a token takes
    (10 + W (step_s + token_s)) / (1 + W), which falls with W where `step_s + token_s` is below 10."""
    learned = LearnedWindow()
    for i in range(400):
        num_asked = 1 + i % 4 if token_s else learned.window
        learned.learn([(num_asked, min(right, num_asked))], step_s, 10.0 + token_s * num_asked)
    assert learned.window == window


def test_pass_times_are_linear_between_and_beyond_points_and_never_fall() -> None:
    assert [monotone(((1, 0.2), (2, 0.1), (3, 0.3))).at(rows) for rows in (1, 2, 3)] == [0.2, 0.2, 0.3]
    passes = monotone(((2, 1.0), (4, 2.0), (8, 3.0)))
    assert [passes.at(rows) for rows in (0.5, 1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert monotone(((4, 0.5),)).at(64) == 0.5
    assert all(a <= b for a, b in itertools.pairwise(passes.at(n / 3) for n in range(60)))


def test_what_a_level_does_not_say_takes_no_rows() -> None:
    """Neither of the level above nor of the target; what is accepted is in the acceptance already."""
    silent = [replace(CHAINS["lookup"][0], fill=0.2), replace(LARGE, fill=0.5)]
    said, left_out = predict(CHAINS["lookup"], TARGET, 4), predict(silent, TARGET, 4)
    assert left_out.num_tokens == said.num_tokens
    assert all(num_passes(silent, i, 4) == num_passes(CHAINS["lookup"], i, 4) for i in (0, 1))
    rows_s = TARGET.at(4 * 9) - TARGET.at(4 * 5)
    assert said.round_s - left_out.round_s > rows_s > 0.0
    with pytest.raises(ValueError, match="fill"):
        replace(LARGE, fill=1.5)
