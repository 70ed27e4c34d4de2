"""The suffix drafter in C proposes what the one in Python does, to the last bit."""

import ctypes
import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sampling_params import SamplingParams
from cluster.types import DraftTerms
from drafters.native import lookup
from drafters.native.lookup import NativeLookup
from drafters.protocol import Demand, Draft
from engine.compiling import NoCompiler, load_compiled
from tests.reference.suffix import SuffixDrafter

SAMPLING = SamplingParams(max_tokens=1000)
SOURCES = tuple(Path(lookup.__file__).parent / name for name in ("automaton.c", "suffix.c"))
HEADERS = tuple(Path(lookup.__file__).parent / name for name in ("automaton.h", "lookup.h"))

names = st.sampled_from("abc")
alphabets = st.sampled_from([1, 2, 3, 40])


@st.composite
def tokens(draw: st.DrawFn, alphabet: int, max_size: int = 30) -> list[int]:
    return draw(st.lists(st.integers(0, alphabet - 1), max_size=max_size))


@st.composite
def demands(draw: st.DrawFn, alphabet: int) -> Demand:
    price = draw(st.sampled_from([0.0, 0.1, 0.9]))
    return Demand(draw(names), draw(st.integers(0, 9)), tuple(draw(tokens(alphabet, 5))), DraftTerms(row_price=price))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, str, list[int]] | list[Demand]]:
    """Requests that are opened, extended and released, and rounds of demands."""
    alphabet = draw(alphabets)
    events = st.tuples(st.sampled_from(["open", "extend", "extend", "release"]), names, tokens(alphabet))
    return draw(st.lists(st.one_of(events, st.lists(demands(alphabet), max_size=4)), min_size=2, max_size=30))


class Both:
    """One drafter of either kind, told the same."""

    def __init__(
        self,
        library: ctypes.CDLL,
        *,
        max_match_len: int = 16,
        max_shared_tokens: int = 10_000,
        min_match_len: int = 1,
        min_survival: float = 0.15,
        doubt: float = 2.0,
        request_tokens: int = 8192,
    ) -> None:
        self._python = SuffixDrafter(
            max_match_len=max_match_len,
            max_shared_tokens=max_shared_tokens,
            min_match_len=min_match_len,
            min_survival=min_survival,
            doubt=doubt,
            request_tokens=request_tokens,
        )
        arguments = (max_match_len, max_shared_tokens, min_match_len, min_survival, doubt, request_tokens)
        self._native = NativeLookup(library, "suffix", *arguments)
        self.followed: set[str] = set()

    def open(self, name: str, token_ids: Sequence[int], salt: str = "") -> None:
        for drafter in (self._python, self._native):
            drafter.open(name, token_ids, 0, SAMPLING, salt)
        self.followed.add(name)

    def extend(self, name: str, token_ids: Sequence[int]) -> None:
        for drafter in (self._python, self._native):
            drafter.extend(name, token_ids)

    def release(self, name: str) -> None:
        for drafter in (self._python, self._native):
            drafter.release(name)
        self.followed.discard(name)

    def propose(self, *wanted: Demand) -> list[Draft]:
        expected = self._python.propose(wanted)
        assert self._native.propose(wanted) == expected
        return expected

    def check_integrity(self) -> None:
        for drafter in (self._python, self._native):
            drafter.check_integrity()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        return load_compiled("suffix-test", SOURCES, HEADERS, ("-ffp-contract=off",), tmp_path_factory.mktemp("kernels"))
    except NoCompiler as error:
        pytest.skip(f"C is not compiled here: {error}")


@given(
    history=histories(),
    min_len=st.integers(1, 3),
    more_len=st.sampled_from([0, 1, 2, 7, 50]),
    max_shared_tokens=st.sampled_from([0, 3, 4, 9, 40, 200]),
    min_survival=st.one_of(st.sampled_from([0.0, 0.15]), st.floats(0.0, 1.0)),
    doubt=st.one_of(st.sampled_from([0.0, 2.0]), st.floats(0.0, 10.0)),
    request_tokens=st.sampled_from([2, 3, 7, 16, 1000]),
)
def test_whatever_happens_drafts_are_the_same(
    library: ctypes.CDLL,
    history: list[tuple[str, str, list[int]] | list[Demand]],
    min_len: int,
    more_len: int,
    max_shared_tokens: int,
    min_survival: float,
    doubt: float,
    request_tokens: int,
) -> None:
    both = Both(
        library,
        max_match_len=min_len + more_len,
        max_shared_tokens=max_shared_tokens,
        min_match_len=min_len,
        min_survival=min_survival,
        doubt=doubt,
        request_tokens=request_tokens,
    )
    for event in history:
        match event:
            case ("open", str(name), list(token_ids)):
                both.open(name, token_ids, "x" if name == "c" else "")
            case ("extend", str(name), list(token_ids)) if name in both.followed:
                both.extend(name, token_ids)
            case ("release", str(name), _):
                both.release(name)
            case list(wanted):
                both.propose(*(demand for demand in wanted if demand.request_id in both.followed))
        both.check_integrity()
    both.propose(*(Demand(name, 6) for name in sorted(both.followed)))


@pytest.mark.parametrize("alphabet", [1, 2, 5, 30, 300, 5000])
@pytest.mark.parametrize("min_survival", [0.0, 0.02])
def test_states_of_any_number_of_transitions(library: ctypes.CDLL, alphabet: int, min_survival: float) -> None:
    """Uniform tokens, so that most counts are equal, and order decides; of one token, a text in the tightest loop."""
    rng = random.Random(alphabet)
    both = Both(library, max_shared_tokens=4000, min_survival=min_survival, doubt=0.0, request_tokens=1500)
    for name in ("a", "b", "a"):
        both.open(name, [rng.randrange(alphabet) for _ in range(700)])
        for _ in range(40):
            both.extend(name, [rng.randrange(alphabet) for _ in range(rng.randrange(60))])
            ahead = tuple(rng.randrange(alphabet) for _ in range(rng.randrange(4)))
            both.propose(Demand(name, 8), Demand(name, 5, ahead))
        both.release(name)
        both.check_integrity()


def test_of_a_long_loop_as_many_places_are_counted(library: ctypes.CDLL) -> None:
    both = Both(library)
    both.open("a", [0] * 200 + [1, 0])
    (draft,) = both.propose(Demand("a", 4))
    assert draft.confidences[0] < 195 / 200, "short ends were counted without bound"


def test_text_as_it_is_written(library: ctypes.CDLL) -> None:
    """Few tokens are frequent and many rare, and stretches come again: some of the text itself, some of other answers."""
    rng = random.Random(7)
    vocabulary, weights = range(3000), list(accumulate(1 / (rank + 2) for rank in range(3000)))
    both = Both(library, max_match_len=32, max_shared_tokens=6000, request_tokens=2048)
    written: list[int] = rng.choices(vocabulary, cum_weights=weights, k=500)
    num_drafted = 0
    for generation in range(3):
        for name in "abc":
            both.open(f"{name}{generation}", written[-rng.randrange(50, 500) :])
        for _ in range(60):
            wanted = []
            for name in "abc":
                start = rng.randrange(len(written))
                copied = written[start : start + rng.randrange(40)] if rng.random() < 0.6 else []
                came = [*copied, *rng.choices(vocabulary, cum_weights=weights, k=rng.randrange(1, 12))]
                both.extend(f"{name}{generation}", came)
                written += came
                ahead = tuple(rng.choices(vocabulary, cum_weights=weights, k=rng.randrange(3)))
                wanted += [
                    Demand(f"{name}{generation}", 16),
                    Demand(f"{name}{generation}", 8, ahead, DraftTerms(row_price=rng.random())),
                ]
            num_drafted += sum(len(draft.token_ids) for draft in both.propose(*wanted))
        for name in "abc":
            both.release(f"{name}{generation}")
        both.check_integrity()
    assert len(written) > 8000
    assert num_drafted > 1000, "else little was compared"
