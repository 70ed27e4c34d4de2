"""What drafters learn or cache of a request never reaches requests with another salt."""

from collections.abc import Callable
from random import Random

import pytest

from cluster.sampling_params import SamplingParams
from drafters.ensemble import PlainEnsemble
from drafters.native.lookup import compiled
from drafters.protocol import Demand, Drafter
from tests.reference.suffix import SuffixDrafter
from tests.reference.table import TableDrafter
from tests.support.drafter_bench import Bench

SAMPLING = SamplingParams(max_tokens=1000, temperature=0.0)
SECRET = Random(5).sample(range(100, 10_000), 300)  # no token twice: only who has seen it can continue it
PROMPT = [1, 2, 3]


def _suffix() -> SuffixDrafter:
    return SuffixDrafter(max_match_len=16, max_shared_tokens=4096)


def _table() -> TableDrafter:
    return TableDrafter(max_learned=2000)


KINDS: dict[str, Callable[[], Drafter]] = {
    "suffix": _suffix,
    "suffix in C": lambda: compiled(_suffix()),
    "table": _table,
    "table in C": lambda: compiled(_table()),
}


def _learned(drafter: Drafter, first: str, second: str) -> set[int]:
    """Tokens of an answer of a request with salt ``first`` among the drafts for one with salt ``second`` that quotes it."""
    drafter.open("a", PROMPT, len(PROMPT), SAMPLING, first)
    for start in range(0, len(SECRET), 7):
        drafter.extend("a", SECRET[start : start + 7])
    drafter.release("a")
    drafted: set[int] = set()
    drafter.open("b", PROMPT, len(PROMPT), SAMPLING, second)
    for i in range(0, len(SECRET) - 20, 10):
        quoted = SECRET[i : i + 10]
        drafter.extend("b", quoted)
        (draft,) = drafter.propose([Demand("b", 8)])
        drafted.update(draft.token_ids)
        drafter.check_integrity()
    return drafted & set(SECRET)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("first", "second"), [("x", "y"), ("x", ""), ("", "x")])
def test_nothing_of_another_salt_is_drafted(make: Callable[[], Drafter], first: str, second: str) -> None:
    assert not _learned(make(), first, second)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("salt", ["", "x"])
def test_control_what_is_learned_serves_its_own_salt(make: Callable[[], Drafter], salt: str) -> None:
    drafter = make()
    assert len(_learned(drafter, salt, salt)) > 100
    drafter.open("c", [*PROMPT, *SECRET[:10]], len(PROMPT), SAMPLING, "y")
    assert not drafter.propose([Demand("c", 8)])[0].token_ids


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_salts_whose_hashes_collide_are_apart_too(make: Callable[[], Drafter]) -> None:
    """So many that some fall into one bucket of any table."""
    drafter = make()
    drafter.open("a", PROMPT, len(PROMPT), SAMPLING, "x")
    drafter.extend("a", SECRET[:20])
    drafter.release("a")
    for i in range(500):
        drafter.open("b", [*PROMPT, *SECRET[:10]], len(PROMPT), SAMPLING, f"salt {i}")
        assert not drafter.propose([Demand("b", 8)])[0].token_ids


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_all_salts_share_one_bound_of_memory(make: Callable[[], Drafter]) -> None:
    """The drafter checks its bound. Answers of one token reach the bound of salts first; what is newest is still known."""
    drafter = make()
    for i in range(3000):
        drafter.open("a", PROMPT, len(PROMPT), SAMPLING, f"salt {i}")
        drafter.extend("a", SECRET[:1] if i % 100 else SECRET[:50])
        drafter.release("a")
    drafter.check_integrity()
    drafter.open("b", [*PROMPT, *SECRET[:10]], len(PROMPT), SAMPLING, "salt 2900")
    assert drafter.propose([Demand("b", 8)])[0].token_ids == tuple(SECRET[10:18])
    drafter.open("b", [*PROMPT, *SECRET[:10]], len(PROMPT), SAMPLING, "salt 100")
    assert not drafter.propose([Demand("b", 8)])[0].token_ids


def test_an_ensemble_passes_the_salt_on() -> None:
    members = [_suffix(), TableDrafter()]
    ensemble = PlainEnsemble(members, {}, (), None)  # type: ignore[arg-type]
    ensemble.open("a", PROMPT, len(PROMPT), SAMPLING, "x")
    for member in members:
        member.extend("a", SECRET)
        member.release("a")
        member.open("b", [*PROMPT, *SECRET[:10]], len(PROMPT), SAMPLING)
        assert not member.propose([Demand("b", 8)])[0].token_ids


def test_a_session_tells_its_drafter_the_salt() -> None:
    bench = Bench()
    bench.open("a", 10, salt="x")
    bench.open("b", 10)
    bench.settle()
    assert bench.drafter.salts == {"0/a": "x", "0/b": ""}
