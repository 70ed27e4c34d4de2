"""The compiled table drafter says what the one in Python says, to the last bit."""

import ctypes
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters.native
from cluster.sampling_params import SamplingParams
from drafters.native.lookup import NativeLookup
from drafters.protocol import Demand
from drafters.table import EMPTY, FrequencyTable, context_key, count_frequencies
from engine.compiling import NoCompiler, load_compiled
from tests.reference.table import TableDrafter
from tests.support.identical_drafters import IdenticalDrafters

FOLDER = Path(drafters.native.__file__).parent
HEADERS = (FOLDER / "lookup.h", FOLDER.parents[1] / "engine" / "noise.h")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        return load_compiled("table", [FOLDER / "table.c"], HEADERS, ["-ffp-contract=off"], tmp_path_factory.mktemp("table"))
    except NoCompiler as error:
        pytest.skip(str(error))


def both(
    library: ctypes.CDLL, table: FrequencyTable, max_learned: int, min_confidence: float
) -> tuple[TableDrafter, NativeLookup]:
    arrays = [np.ascontiguousarray(array) for array in (table.keys, table.token_ids, table.probabilities)]
    at = [array.ctypes.data for array in arrays]
    native = NativeLookup(library, "table", len(table), *at, max_learned, min_confidence, keep=arrays)
    return TableDrafter(table, max_learned, min_confidence), native


def habits(rng: Random, vocab_size: int, num_texts: int) -> FrequencyTable:
    texts = [([rng.randrange(vocab_size) for _ in range(30)], rng.randrange(10)) for _ in range(num_texts)]
    return count_frequencies(texts, max_contexts=rng.choice((3, 50, 10_000)))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from((2, 3, 12, 300)),
    num_texts=st.sampled_from((0, 1, 20)),
    max_learned=st.sampled_from((0, 1, 2, 5, 30, 200, 50_000)),
    min_confidence=st.sampled_from((0.0, 0.0, 0.1, 0.4, 1.0)),
)
def test_it_says_the_same(
    library: ctypes.CDLL, seed: int, vocab_size: int, num_texts: int, max_learned: int, min_confidence: float
) -> None:
    rng = Random(seed)
    drafters = both(library, habits(rng, vocab_size, num_texts), max_learned, min_confidence)
    IdenticalDrafters(*drafters, rng, vocab_size).play(200)


def test_among_shares_that_are_equal_or_none_it_chooses_the_same(library: ctypes.CDLL) -> None:
    rng = Random(1)
    table = habits(rng, 6, 20)
    probabilities = (np.round(table.probabilities * 4) / 4).astype(np.float32)  # many are equal
    probabilities[::5] = 0
    drafters = both(library, replace(table, probabilities=probabilities), 40, 0.0)
    assert IdenticalDrafters(*drafters, rng, 6).play(2000) > 1000


def test_it_learns_thousands_of_contexts_and_forgets_the_same_ones(library: ctypes.CDLL) -> None:
    rng = Random(2)
    drafters = both(library, habits(rng, 30, 20), 3000, 0.0)
    assert IdenticalDrafters(*drafters, rng, 30).play(4000) > 1000


def test_what_faded_to_nothing_is_not_guessed(library: ctypes.CDLL) -> None:
    drafters = both(library, EMPTY, 50, 0.0)
    for drafter in drafters:
        drafter.open("r", (1, 2), 2, SamplingParams(9, temperature=2.0, seed=0))
        drafter.extend("r", (9, 1, 2))
        drafter.extend("r", (3, 1, 2) * 15_000)  # the share of 9 is 0 by then, as far as floats can say
        drafter.extend("r", (5, 1, 2))
    for position in range(200):
        demand = Demand("r", 1, (*range(10, 10 + position), 1, 2))
        wanted, found = (drafter.propose([demand]) for drafter in drafters)
        assert found == wanted


def test_contexts_of_one_key_are_told_apart_when_they_are_learned(library: ctypes.CDLL) -> None:
    one, another = contexts_of_one_key()
    assert context_key(one) == context_key(another)
    drafters = both(library, EMPTY, 50, 0.0)
    for text, following in ((one, 8), (another, 9), (one, 8)):
        for drafter in drafters:
            drafter.open("r", text, 3, SamplingParams(9, temperature=0.0))
            drafter.extend("r", (following,))
    for ahead, following in ((one, 8), (another, 9)):
        wanted, found = (drafter.propose([Demand("r", 1, (77, *ahead))]) for drafter in drafters)
        assert found == wanted
        assert found[0].token_ids == (following,)


def contexts_of_one_key() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of three tokens: two whose keys differ only in the lower half before the last token, which makes up for that."""
    rng, starts = Random(4), dict[int, tuple[int, int]]()  # by the upper half
    while True:
        start = rng.getrandbits(20), rng.getrandbits(20)
        other = starts.setdefault(key_before_the_third(start) >> 32, start)
        difference = key_before_the_third(start) ^ key_before_the_third(other)
        if 0 < difference < 2**31:
            return (*start, 0), (*other, difference)


def key_before_the_third(start: tuple[int, int]) -> int:
    """``context_key`` after two tokens of three."""
    key = 3
    for token_id in start:
        key = ((key ^ token_id) * 0x9E3779B97F4A7C15) & (2**64 - 1)
        key ^= key >> 29
    return key
