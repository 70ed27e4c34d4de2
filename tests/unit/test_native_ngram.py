"""The compiled n-gram drafter says what the one in Python says, to the last bit."""

import ctypes
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters.native
from cluster.sampling_params import SamplingParams
from drafters.native.lookup import NativeLookup
from drafters.ngram import NgramDrafter
from drafters.protocol import Demand, Drafter
from engine.compiling import NoCompiler, load_compiled
from tests.support.identical_drafters import IdenticalDrafters

FOLDER = Path(drafters.native.__file__).parent
SAMPLING = SamplingParams(9)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    sources, headers = [FOLDER / "ngram.c"], [FOLDER / "lookup.h"]
    try:
        return load_compiled("ngram", sources, headers, ["-ffp-contract=off"], tmp_path_factory.mktemp("ngram"))
    except NoCompiler as error:
        pytest.skip(str(error))


def both(library: ctypes.CDLL, max_match_len: int, min_match_len: int) -> tuple[Drafter, Drafter]:
    return NgramDrafter(max_match_len, min_match_len), NativeLookup(library, "ngram", max_match_len, min_match_len)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from((1, 2, 3, 12, 300)),
    match_lens=st.sampled_from(((4, 1), (1, 1), (2, 2), (5, 3), (30, 1))),
)
def test_it_says_the_same(library: ctypes.CDLL, seed: int, vocab_size: int, match_lens: tuple[int, int]) -> None:
    rng = Random(seed)
    IdenticalDrafters(*both(library, *match_lens), rng, vocab_size).play(200)


def test_texts_grow_long_and_what_came_true_is_counted_the_same(library: ctypes.CDLL) -> None:
    rng = Random(3)
    drafters = both(library, 4, 1)
    for drafter in drafters:
        drafter.open("long", [1], 1, SAMPLING)
    period = [rng.randrange(50) for _ in range(700)]
    for _ in range(3000):
        position = rng.randrange(len(period))
        token_ids = period[position : position + rng.randint(0, 9)]
        if rng.random() < 0.2:
            token_ids.append(rng.randrange(50_000))
        wanted, found = (drafter.propose([Demand("long", 7)]) for drafter in drafters)
        assert found == wanted
        for drafter in drafters:
            drafter.extend("long", token_ids)
    for drafter in drafters:
        drafter.check_integrity()


def test_a_place_that_was_released_is_used_again_for_another_text(library: ctypes.CDLL) -> None:
    drafter = both(library, 4, 1)[1]
    for i in range(40):
        drafter.open(str(i), [1, 2, 3, 1, 2], 5, SAMPLING)
    for i in range(0, 40, 2):
        drafter.release(str(i))
        drafter.release(str(i))
    drafter.open("new", [7, 8, 7], 3, SAMPLING)
    assert [draft.token_ids for draft in drafter.propose([Demand("new", 2), Demand("1", 2)])] == [(8, 7), (3, 1)]
    drafter.open("new", [7, 7], 2, SAMPLING)
    assert drafter.propose([Demand("new", 3)])[0].token_ids == (7, 7, 7)
    drafter.check_integrity()


def test_n_grams_of_one_hash_are_told_apart(library: ctypes.CDLL) -> None:
    rng, seen = Random(4), dict[int, tuple[int, int]]()
    for _ in range(1_000_000):
        pair = rng.getrandbits(24), rng.getrandbits(24)
        other = seen.setdefault(hash_of(pair), pair)
        if other != pair:
            break
    else:
        pytest.fail("no two n-grams have one hash")
    drafter = both(library, 2, 2)[1]
    drafter.open("r", [*pair, 5000, *other, 6000], 6, SAMPLING)
    drafts = drafter.propose([Demand("r", 1, pair), Demand("r", 1, other)])
    assert [draft.token_ids for draft in drafts] == [(5000,), (6000,)]
    drafter.check_integrity()


def hash_of(ngram: tuple[int, ...]) -> int:
    """As in ngram.c."""
    value = 0
    for token_id in reversed(ngram):
        value = ((value ^ token_id) * 0x9E3779B97F4A7C15) & (2**64 - 1)
        value ^= value >> 29
    return value >> 32
