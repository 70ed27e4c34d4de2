"""A cascade of compiled lookups drafts what one of those in Python drafts, and learns the same from what is committed."""

import ctypes
import random
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters.native
from cluster.sampling_params import SamplingParams
from cluster.types import DraftTerms
from drafters.cascade import CascadeDrafter, CascadeMember
from drafters.native.ensemble import MOST_MEMBERS, NativeEnsemble
from drafters.native.lookup import NativeLookup, compiled, load_library
from drafters.ngram import NgramDrafter
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from drafters.table import count_frequencies
from engine.compiling import NoCompiler, load_compiled
from tests.reference.suffix import SuffixDrafter
from tests.reference.table import TableDrafter
from tests.support.identical_drafters import IdenticalDrafters

NUM_TOKENS = 7
NUM_TEXTS = 24


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        load_library()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def natives(monkeypatch: pytest.MonkeyPatch) -> list[NativeEnsemble]:
    """The ensembles in C that cascades make."""
    made: list[NativeEnsemble] = []

    def make(*arguments: Any) -> NativeEnsemble:
        made.append(NativeEnsemble(*arguments))
        return made[-1]

    monkeypatch.setattr("drafters.cascade.NativeEnsemble", make)
    return made


class Dear:
    """Knows the texts, and errs now and then."""

    capabilities = Capabilities()

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts
        self._lens: dict[str, int] = {}

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._lens[request_id] = len(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._lens[request_id] += len(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [self._draft(demand) for demand in demands]

    def release(self, request_id: str) -> None:
        del self._lens[request_id]

    def check_integrity(self) -> None: ...

    def _draft(self, demand: Demand) -> Draft:
        start = self._lens[demand.request_id] + len(demand.ahead)
        token_ids = self._texts[demand.request_id][start : start + demand.num_tokens]
        drafted = tuple(t + (start + i) % 4 // 3 for i, t in enumerate(token_ids))
        return Draft(demand.request_id, drafted, tuple(0.9 - 0.1 * i for i in range(len(drafted))))


def texts_of(seed: int) -> dict[str, list[int]]:
    """Pieces that come again, and tokens that nobody foresees."""
    rng = random.Random(seed)
    pieces = [[rng.randrange(40) for _ in range(rng.randint(2, 9))] for _ in range(12)]
    texts = {}
    for number in range(NUM_TEXTS):
        text: list[int] = []
        while len(text) < 160:
            text += rng.choice(pieces) if rng.random() < 0.8 else [rng.randrange(40)]
        texts[f"r{number}"] = text
    return texts


def cascades(texts: dict[str, list[int]], dear: bool) -> list[CascadeDrafter]:
    def lookups() -> list[NgramDrafter | SuffixDrafter | TableDrafter]:
        table = count_frequencies([(text, 4) for text in list(texts.values())[:6]], 400)
        suffix = SuffixDrafter(max_match_len=16, max_shared_tokens=600)
        return [NgramDrafter(), suffix, TableDrafter(table, max_learned=200)]

    def cascade(free: Sequence[Drafter]) -> CascadeDrafter:
        members = [CascadeMember(f"m{i}", drafter, 0.0, splices=True) for i, drafter in enumerate(free)]
        return CascadeDrafter([*members, CascadeMember("dear", Dear(texts), 0.3)] if dear else members)

    return [cascade(lookups()), cascade([compiled(drafter) for drafter in lookups()])]


def serve(drafters: Sequence[CascadeDrafter], texts: dict[str, list[int]], row_price: float, temperature: float) -> int:
    """Serves the texts to all side by side, a few at once. Returns how many tokens were accepted."""
    rng = random.Random(7)
    waiting, live, num_accepted = list(texts), {}, 0
    sampling = SamplingParams(max_tokens=200, temperature=temperature, seed=2**64 - 3)
    while waiting or live:
        while waiting and len(live) < 5:
            request_id = waiting.pop()
            live[request_id] = 4
            for drafter in drafters:
                drafter.open(request_id, texts[request_id][:4], 4, sampling)
        demands = [
            Demand(r, min(NUM_TOKENS, len(texts[r]) - n - 1), (), DraftTerms(row_price=row_price)) for r, n in live.items()
        ]
        plain, native = ([*drafter.propose(demands)] for drafter in drafters)
        assert_alike(plain, native)
        ahead = [
            Demand(d.request_id, 3, draft.token_ids, DraftTerms(row_price=row_price))
            for d, draft in zip(demands, plain, strict=True)
        ]
        some_ahead = [demand for demand in ahead if rng.random() < 0.2]
        assert_alike(*([*drafter.propose(some_ahead)] for drafter in drafters))
        for request_id, draft in zip(list(live), plain, strict=True):
            text, start = texts[request_id], live[request_id]
            num_right = 0
            while num_right < len(draft.token_ids) and draft.token_ids[num_right] == text[start + num_right]:
                num_right += 1
            num_accepted += num_right
            live[request_id] = start + num_right + 1
            for drafter in drafters:
                drafter.extend(request_id, text[start : live[request_id]])
                drafter.check_integrity()
            if live[request_id] >= len(text) - 1:
                del live[request_id]
                for drafter in drafters:
                    drafter.release(request_id)
    return num_accepted


def assert_alike(plain: Sequence[Draft], native: Sequence[Draft]) -> None:
    assert [draft.token_ids for draft in native] == [draft.token_ids for draft in plain]
    for ours, theirs in zip(native, plain, strict=True):
        assert ours.confidences == pytest.approx(theirs.confidences, rel=1e-9)


@pytest.mark.parametrize("dear", [False, True])
@pytest.mark.parametrize("row_price", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_cascade_of_compiled_lookups_drafts_the_same(
    dear: bool, row_price: float, temperature: float, natives: list[NativeEnsemble]
) -> None:
    texts = texts_of(3)
    plain, native = cascades(texts, dear)
    assert len(natives) == 1
    assert serve([plain, native], texts, row_price, temperature) > 400


def test_a_request_that_is_opened_again_starts_over() -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    members = [CascadeMember("m0", compiled(NgramDrafter()), 0.0, splices=True)]
    drafter = CascadeDrafter(members)
    for last in (1, 2):
        drafter.open("r", [5, 1, 7, 2, 8, last], 6, sampling)
        (draft,) = drafter.propose([Demand("r", 1)])
        assert draft.token_ids == ((7,) if last == 1 else (8,))
    drafter.release("r")
    drafter.release("r")


@pytest.mark.parametrize("dear", [False, True])
@pytest.mark.parametrize("wanted", [(3, 0), (2, 9), (0, 0), ()])
def test_demands_of_one_request_in_one_batch_do_not_mix(dear: bool, wanted: tuple[int, ...]) -> None:
    texts = texts_of(9)
    plain, native = cascades(texts, dear)
    for drafter in (plain, native):
        drafter.open("r0", texts["r0"][:60], 4, SamplingParams(max_tokens=200, temperature=0.0))
    for end in range(60, 80, 2):
        demands = [Demand("r0", num) for num in wanted]
        assert_alike(plain.propose(demands), native.propose(demands))
        for drafter in (plain, native):
            drafter.extend("r0", texts["r0"][end : end + 2])


def test_tokens_that_are_none_change_nothing() -> None:
    for drafter in (compiled(NgramDrafter()), cascades(texts_of(1), dear=False)[1]):
        with pytest.raises(OverflowError):
            drafter.open("r0", [1, 2**31], 2, SamplingParams(max_tokens=9))
        with pytest.raises(KeyError):
            drafter.propose([Demand("r0", 3)])
        drafter.open("r1", [7, 8, 7], 2, SamplingParams(max_tokens=9))
        with pytest.raises(OverflowError):
            drafter.extend("r1", [8, 2**31])
        (draft,) = drafter.propose([Demand("r1", 1)])
        assert draft.token_ids == (8,)


def test_more_lookups_than_c_has_room_for_run_in_python(natives: list[NativeEnsemble]) -> None:
    members = [CascadeMember(f"m{i}", compiled(NgramDrafter()), 0.0, splices=True) for i in range(MOST_MEMBERS + 1)]
    CascadeDrafter(members)
    assert natives == []


# ---- the compiled n-gram drafter says what the one in Python says, to the last bit


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
