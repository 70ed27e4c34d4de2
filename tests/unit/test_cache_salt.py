"""Requests with different salts share no cached keys and values; API keys have different salts."""

from pathlib import Path

import pytest

from cluster.message_checks import MAX_SALT_LEN, open_fault, request_fault
from cluster.messages import Open
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from deploy.api.params import cache_salt
from deploy.api.settings import ApiSettings
from engine.kv_blocks import BlockLedger
from engine.tensor_parallel.rounds import RankChange, RankRound, decode, encode
from tests.support.api import chat_body, finishing, serving, token_ids
from tests.support.asgi import CHAT
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
    ("first", "second", "num_cached"),
    [("x", "y", 0), ("x", "", 0), ("", "x", 0), ("x", "x", 36), ("", "", 36)],
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
