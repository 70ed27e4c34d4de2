"""A cascade of compiled lookups drafts what one of those in Python drafts, and learns the same from what is committed."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.sampling_params import SamplingParams
from cluster.types import DraftTerms
from drafters.cascade import CascadeDrafter, CascadeMember
from drafters.native.ensemble import MOST_MEMBERS, NativeEnsemble
from drafters.native.lookup import compiled, load_library
from drafters.ngram import NgramDrafter
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from drafters.table import count_frequencies
from engine.compiling import NoCompiler
from tests.reference.suffix import SuffixDrafter
from tests.reference.table import TableDrafter

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
