"""Requests with different salts share nothing that is cached or learned; API keys have different salts."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from cluster.message_checks import MAX_SALT_LEN, open_fault, request_fault
from cluster.messages import Open
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from deploy.api.params import cache_salt
from deploy.api.settings import ApiSettings
from drafters.ensemble import PlainEnsemble
from drafters.native.lookup import compiled
from drafters.protocol import Demand, Drafter
from engine.kv_blocks import BlockLedger
from engine.tensor_parallel.rounds import RankChange, RankRound, decode, encode
from tests.reference.suffix import SuffixDrafter
from tests.reference.table import TableDrafter
from tests.support.api import chat_body, finishing, serving, token_ids
from tests.support.asgi import CHAT
from tests.support.drafter_bench import Bench
from tests.support.scripted import Step

SAMPLING = SamplingParams(max_tokens=4, temperature=0.0)
PROMPT = list(range(40))


def _num_cached(first: str, second: str) -> int:
    """Tokens that a request with salt ``second`` finds after one with salt ``first`` and the same prompt."""
    ledger = BlockLedger(num_blocks=32, block_len=4)
    ledger.open("a", PROMPT, first)
    ledger.commit(ledger.speculate("a", PROMPT), len(PROMPT))
    num_cached = ledger.open("b", PROMPT, second)
    ledger.check_integrity()
    return num_cached


@pytest.mark.parametrize(
    ("first", "second", "num_cached"), [("x", "y", 0), ("x", "", 0), ("", "x", 0), ("x", "x", 36), ("", "", 36)]
)
def test_a_prefix_is_found_under_its_own_salt_only(first: str, second: str, num_cached: int) -> None:
    assert _num_cached(first, second) == num_cached


async def _salts(tmp_path: Path, calls: list[tuple[str, str | None]], url: str = CHAT, **settings: object) -> list[str]:
    """Of the requests that calls (key, field ``cache_salt``) become."""
    file = tmp_path / "keys"
    file.write_text("sk-one\nsk-two\n")
    salts: list[str] = []

    def script(request: Request) -> list[Step]:
        salts.append(request.cache_salt)
        return list(finishing(request, token_ids("the answer")))

    async with serving(script, **{"api_keys_file": file, **settings}) as (http, _):
        for key, own in calls:
            body = chat_body(max_tokens=20) if url != "/v1/responses" else {"model": "scripted", "input": "what is it?"}
            body |= {} if own is None else {"cache_salt": own}
            answer = await http.post(url, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
    return salts


@pytest.mark.parametrize("url", [CHAT, "/v1/responses", "/v1/messages"])
async def test_each_key_has_a_salt_of_its_own(tmp_path: Path, url: str) -> None:
    calls = [
        ("sk-one", None),
        ("sk-two", None),
        ("sk-one", None),
        ("sk-one", "mine"),
        ("sk-two", "mine"),
        ("sk-one", "mine"),
    ]
    one, two, again, mine, of_two, mine_again = await _salts(tmp_path, calls, url)
    assert (one, mine) == (again, mine_again)
    assert len({one, two, mine, of_two}) == 4
    assert all(len(salt) == 32 for salt in (one, two, mine, of_two))
    assert _num_cached(one, two) == 0
    assert _num_cached(one, again) == 36


async def test_control_keys_share_where_the_file_says_so(tmp_path: Path) -> None:
    calls = [("sk-one", None), ("sk-two", None), ("sk-one", "mine"), ("sk-two", "mine")]
    one, two, mine, of_two = await _salts(tmp_path, calls, share_between_keys=True)
    assert one == two == ""
    assert mine == of_two != ""


async def test_without_keys_only_the_field_makes_a_salt(tmp_path: Path) -> None:
    none, mine = await _salts(tmp_path, [("any", None), ("any", "mine")], api_keys_file=None)
    assert none == ""
    assert mine


def test_keys_share_nothing_unless_configured() -> None:
    assert not ApiSettings().share_between_keys


def test_a_field_cannot_imitate_another_tenant() -> None:
    assert cache_salt("ab", "c") != cache_salt("a", "bc")
    assert cache_salt("", "ab") != cache_salt("ab", None)


def test_the_other_ranks_are_told_the_salt() -> None:
    opened = Open("r", (1, 2), 2, SAMPLING, cache_salt="x")
    (change,) = decode(encode(RankRound((RankChange(open=opened),)))).changes
    assert change.open == opened


def test_a_salt_has_a_limit() -> None:
    longest = "s" * MAX_SALT_LEN
    assert request_fault(Request("r", (1,), SAMPLING, 0.0, cache_salt=longest), 9) is None
    assert open_fault(Open("r", (1,), 1, SAMPLING, cache_salt=longest), 9) is None
    assert "salt" in str(request_fault(Request("r", (1,), SAMPLING, 0.0, cache_salt=longest + "s"), 9))
    assert "salt" in str(open_fault(Open("r", (1,), 1, SAMPLING, cache_salt=longest + "s"), 9))
    assert request_fault(Request("r", (1,), SAMPLING, 0.0, trace="t" * 55), 9) is None
    assert "trace" in str(request_fault(Request("r", (1,), SAMPLING, 0.0, trace="t" * 56), 9))
    assert "trace" in str(open_fault(Open("r", (1,), 1, SAMPLING, trace="t" * 56), 9))


# ---- what drafters learn or cache


DRAFTED = SamplingParams(max_tokens=1000, temperature=0.0)
SECRET = Random(5).sample(range(100, 10_000), 300)  # no token twice: only who has seen it can continue it
SECRET_TEXT = [1, 2, 3]


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
    drafter.open("a", SECRET_TEXT, len(SECRET_TEXT), DRAFTED, first)
    for start in range(0, len(SECRET), 7):
        drafter.extend("a", SECRET[start : start + 7])
    drafter.release("a")
    drafted: set[int] = set()
    drafter.open("b", SECRET_TEXT, len(SECRET_TEXT), DRAFTED, second)
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
    drafter.open("c", [*SECRET_TEXT, *SECRET[:10]], len(SECRET_TEXT), DRAFTED, "y")
    assert not drafter.propose([Demand("c", 8)])[0].token_ids


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_salts_whose_hashes_collide_are_apart_too(make: Callable[[], Drafter]) -> None:
    """So many that some fall into one bucket of any table."""
    drafter = make()
    drafter.open("a", SECRET_TEXT, len(SECRET_TEXT), DRAFTED, "x")
    drafter.extend("a", SECRET[:20])
    drafter.release("a")
    for i in range(500):
        drafter.open("b", [*SECRET_TEXT, *SECRET[:10]], len(SECRET_TEXT), DRAFTED, f"salt {i}")
        assert not drafter.propose([Demand("b", 8)])[0].token_ids


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_all_salts_share_one_bound_of_memory(make: Callable[[], Drafter]) -> None:
    """The drafter checks its bound. Answers of one token reach the bound of salts first; what is newest is still known."""
    drafter = make()
    for i in range(3000):
        drafter.open("a", SECRET_TEXT, len(SECRET_TEXT), DRAFTED, f"salt {i}")
        drafter.extend("a", SECRET[:1] if i % 100 else SECRET[:50])
        drafter.release("a")
    drafter.check_integrity()
    drafter.open("b", [*SECRET_TEXT, *SECRET[:10]], len(SECRET_TEXT), DRAFTED, "salt 2900")
    assert drafter.propose([Demand("b", 8)])[0].token_ids == tuple(SECRET[10:18])
    drafter.open("b", [*SECRET_TEXT, *SECRET[:10]], len(SECRET_TEXT), DRAFTED, "salt 100")
    assert not drafter.propose([Demand("b", 8)])[0].token_ids


def test_an_ensemble_passes_the_salt_on() -> None:
    members = [_suffix(), TableDrafter()]
    ensemble = PlainEnsemble(members, {}, (), None)  # type: ignore[arg-type]
    ensemble.open("a", SECRET_TEXT, len(SECRET_TEXT), DRAFTED, "x")
    for member in members:
        member.extend("a", SECRET)
        member.release("a")
        member.open("b", [*SECRET_TEXT, *SECRET[:10]], len(SECRET_TEXT), DRAFTED)
        assert not member.propose([Demand("b", 8)])[0].token_ids


def test_a_session_tells_its_drafter_the_salt() -> None:
    bench = Bench()
    bench.open("a", 10, salt="x")
    bench.open("b", 10)
    bench.settle()
    assert bench.drafter.salts == {"0/a": "x", "0/b": ""}
