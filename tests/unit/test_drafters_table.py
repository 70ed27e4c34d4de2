"""What the table knows, learns, forgets and stores; the compiled one says what the one in Python says."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters.native
from cluster.errors import IncompatibleTokenizer, ModelUnavailable
from cluster.sampling_params import SamplingParams
from cluster.types import DraftTerms, ModelInfo
from drafters.native.lookup import NativeLookup
from drafters.protocol import Demand, Draft
from drafters.table import EMPTY, FrequencyTable, context_key, count_frequencies
from engine.compiling import NoCompiler, load_compiled
from tests.reference.table import TableDrafter, after
from tests.support.identical_drafters import IdenticalDrafters

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


def draft(drafter: TableDrafter, num_tokens: int = 4, ahead: tuple[int, ...] = ()) -> Draft:
    return drafter.propose([Demand("r", num_tokens, ahead)])[0]


def opened(
    table: FrequencyTable, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY, **options: Any
) -> TableDrafter:
    drafter = TableDrafter(table, **options)
    drafter.open("r", tokens, len(tokens), sampling)
    return drafter


def test_it_says_what_followed_and_stops_where_it_knows_nothing() -> None:
    table = count_frequencies([((1, 2, 3, 4, 5), 0)] * 3, max_contexts=100)
    drafter = opened(table, (9, 1, 2))
    assert draft(drafter).token_ids == (3, 4, 5)
    assert draft(drafter, ahead=(3,)).token_ids == (4, 5)
    assert draft(drafter, num_tokens=1).token_ids == (3,)
    assert draft(opened(table, (7, 8))) == Draft("r", (), ())


def test_where_rows_cost_it_ends_where_its_draft_is_not_worth_them() -> None:
    drafter = opened(count_frequencies([((1, 2, 3, 4, 5), 0)] * 3, max_contexts=100), (9, 1, 2))
    first, second, _ = draft(drafter).confidences
    for price, token_ids in ((2 * first * second, (3, 4)), (2.0, (3,))):
        assert drafter.propose([Demand("r", 4, terms=DraftTerms(row_price=price))])[0].token_ids == token_ids


def test_prompts_predict_nothing_and_what_was_seen_once_is_left_out() -> None:
    assert len(count_frequencies([((1, 2, 3), 3)] * 5, 100)) == 0
    assert len(count_frequencies([((1, 2, 3), 0)], 100)) == 0


def test_shares_are_shrunk_towards_the_shorter_context() -> None:
    texts = [((1, 2, 3), 0)] * 2 + [((5, 2, 4), 0)] * 6
    table = count_frequencies(texts, 100, doubt=1.0)
    after_2 = dict(after(table, (2,)))
    assert after_2[4] == pytest.approx(6 / 9)
    after_1_2 = dict(after(table, (1, 2)))
    assert after_1_2[3] == pytest.approx((2 + after_2[3]) / 3)
    assert after_1_2[4] == pytest.approx(after_2[4] / 3)


def test_the_bound_keeps_the_contexts_that_were_seen_most() -> None:
    texts = [((1, 2), 0)] * 9 + [((3, 4), 0)] * 2
    table = count_frequencies(texts, max_contexts=1)
    assert after(table, (1,))
    assert not after(table, (3,))


def test_it_learns_while_serving_within_its_bound() -> None:
    drafter = opened(EMPTY, (1, 2), max_learned=12)
    for _ in range(6):
        drafter.extend("r", (3, 4, 1, 2))
    assert draft(drafter, num_tokens=2).token_ids == (3, 4)
    for start in range(10, 200, 7):
        drafter.extend("r", (start, start + 1, start + 2))
    drafter.check_integrity()
    drafter.extend("r", (1, 2))
    assert draft(drafter).token_ids == ()  # forgotten


def test_a_changed_habit_is_unlearned() -> None:
    table = count_frequencies([((1, 2, 3), 0)] * 3, 100)
    drafter = opened(table, (1, 2))
    assert draft(drafter, 1).token_ids == (3,)
    for _ in range(12):
        drafter.extend("r", (7, 1, 2))
    assert draft(drafter, 1).token_ids == (7,)


def test_what_has_not_followed_for_long_is_not_guessed_at_any_temperature() -> None:
    drafter = opened(EMPTY, (1, 2), SamplingParams(max_tokens=9, temperature=2.0), min_confidence=0.0)
    drafter.extend("r", (9, 1, 2))
    for _ in range(15_000):  # the share of 9 is 0 by then, as far as floats can say
        drafter.extend("r", (3, 1, 2))
    drafter.extend("r", (5, 1, 2))  # before (1, 2) stands what never stood there
    assert draft(drafter, 1).token_ids in {(3,), (5,)}


def test_at_a_temperature_it_guesses_with_the_targets_noise() -> None:
    """If the table's shares are the target's probabilities, its guess is the target's choice, surprises included."""
    rng = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    texts = [((1, int(v)), 0) for v in rng.choice([10, 11, 12, 13], p=shares, size=4000)]
    table = count_frequencies(texts, 100)
    chosen = []
    for seed in range(400):
        sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=seed)
        drafter = opened(table, (1,), sampling, min_confidence=0.0)
        chosen.append(draft(drafter, 1).token_ids[0])
    frequencies = np.bincount(chosen, minlength=14)[10:] / len(chosen)
    np.testing.assert_allclose(frequencies, shares, atol=0.08)


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table = count_frequencies([((1, 2, 3, 40_000), 0)] * 3 + [((1, 2, 9), 0)] * 2, 100)
    table.save(tmp_path / "table.npz")
    again = FrequencyTable.load(tmp_path / "table.npz")
    np.testing.assert_array_equal(again.keys, table.keys)
    np.testing.assert_array_equal(again.token_ids, table.token_ids)
    np.testing.assert_allclose(again.probabilities, table.probabilities, atol=1 / 255)
    assert (again.vocab_size, again.tokenizer_fingerprint) == (None, None)
    replace(table, vocab_size=50_000, tokenizer_fingerprint="f").save(tmp_path / "table.npz")
    again = FrequencyTable.load(tmp_path / "table.npz")
    assert (again.vocab_size, again.tokenizer_fingerprint) == (50_000, "f")


def test_a_table_serves_no_target_whose_tokens_are_others() -> None:
    table = replace(count_frequencies([((1, 2, 60), 0)] * 3, 100), vocab_size=100, tokenizer_fingerprint="f")
    target = ModelInfo("m", vocab_size=61, max_model_len=20, eos_token_ids=(9,), tokenizer_fingerprint="f")
    table.check_serves(target)
    EMPTY.check_serves(target)
    with pytest.raises(IncompatibleTokenizer, match=r"another tokenizer than that of m: .*outrider train"):
        table.check_serves(replace(target, tokenizer_fingerprint="g"))
    untold = replace(table, tokenizer_fingerprint=None)
    untold.check_serves(replace(target, tokenizer_fingerprint="g"))
    with pytest.raises(IncompatibleTokenizer, match="token 60, but m has only 60 tokens"):
        untold.check_serves(replace(target, vocab_size=60))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: replace(t, keys=t.keys[::-1]), "do not ascend"),
        (lambda t: replace(t, keys=np.repeat(t.keys[:1], len(t))), "do not ascend"),
        (lambda t: replace(t, keys=t.keys[1:]), "disagree"),
        (lambda t: replace(t, token_ids=t.token_ids[:, :3], probabilities=t.probabilities[:, :3]), "disagree"),
        (lambda t: replace(t, vocab_size=9), "not in its vocabulary"),
    ],
)
def test_a_damaged_table_is_not_loaded(
    tmp_path: Path, change: Callable[[FrequencyTable], FrequencyTable], reason: str
) -> None:
    table = count_frequencies([((1, 2, 9), 0)] * 3, 100)
    assert len(table) > 1
    change(table).save(tmp_path / "table.npz")
    with pytest.raises(ModelUnavailable, match=f"damaged: .*{reason}"):
        FrequencyTable.load(tmp_path / "table.npz")


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_no_damaged_byte_is_another_error(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "table.npz"
    count_frequencies([(tuple(range(20)) * 2, 0)] * 2, 100).save(path)
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([byte] * 4) + content[at + 4 :])
        with suppress(ModelUnavailable):
            FrequencyTable.load(path)


@pytest.mark.parametrize("content", [None, b"", b"not a table", b"PK\x03\x04broken"])
def test_no_table_is_one_clear_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "table.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelUnavailable, match="outrider train"):
        FrequencyTable.load(path)


# ---- the compiled table drafter says what the one in Python says, to the last bit


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
