"""Tenants of a file: limits, budgets, refusals and refunds, weights, and the audit log."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import ObservabilityConfig
from cluster.errors import InvalidField, LinkClosed
from cluster.types import Request
from deploy.api.admission import Admission
from deploy.api.audit import AuditLog
from deploy.api.budgets import Budgets
from deploy.api.keys import ApiKeys, KeyFiles
from deploy.api.metrics import MAX_TENANTS, Metrics
from deploy.api.outcome import Outcome
from deploy.api.settings import ApiSettings
from deploy.api.tenants import Tenant
from router.budgets import Limits
from tests.support.api import MODEL, chat_body, completion_body, finishing, saying, serving, token_ids
from tests.support.asgi import CHAT
from tests.support.scripted import ScriptedClient, Step

COMPLETIONS = "/v1/completions"
TENANTS = """
tenants:
  - name: search
    keys: [sk-one, "sha256:{digest}"]
    weight: 3
    requests_per_minute: 6
    tokens_per_minute: 600
    burst_minutes: 0.5
    max_concurrent_requests: 2
  - name: chat
    keys: [sk-chat]
"""


def auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(TENANTS.format(digest=hashlib.sha256(b"sk-two").hexdigest()))
    return path


@asynccontextmanager
async def limited(
    tmp_path: Path, script: Any = None, **limits: float
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedClient]]:
    """Tenant "limited" of key sk-one, and "free" of sk-free."""
    path = tmp_path / "keys"
    fields = "".join(f"    {name}: {value}\n" for name, value in limits.items())
    path.write_text(
        f"tenants:\n  - name: limited\n    keys: [sk-one, sk-two]\n{fields}  - name: free\n    keys: [sk-free]\n"
    )
    async with serving(script, api_keys_file=path) as (http, cluster):
        yield http, cluster


def test_keys_of_a_tenant_are_one_tenant(file: Path) -> None:
    keys = ApiKeys.from_file(file)
    search = keys.check("Bearer sk-one")
    assert search == keys.check("Bearer sk-two")
    assert (search.name, search.weight, search.max_concurrent) == ("search", 3, 2)
    assert search.limits == Limits(6, 600, 0.5)
    chat = keys.check("Bearer sk-chat")
    assert (chat.limits, chat.weight, chat.max_concurrent) == (Limits(), 1, None)
    assert chat.salt != search.salt
    assert list(keys.tenants) == ["search", "chat"]
    assert "sk-" not in repr(vars(keys))


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    text = page[page.index("tenants:\n") :].split("```")[0]
    path = tmp_path / "keys"
    for digit in "ab":
        text = text.replace("<hex>", digit * 64, 1)
    path.write_text(text)
    search = ApiKeys.from_file(path).tenants["search"]
    assert (search.weight, search.max_concurrent, search.limits) == (2, 32, Limits(600, 200_000, 0.5))


def test_lines_of_keys_have_salts_of_their_keys_and_not_of_their_places(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-one\nsk-two\n")
    before = ApiKeys.from_file(path).check("Bearer sk-two")
    path.write_text("sk-zero\nsk-one\nsk-two\n")
    keys = ApiKeys.from_file(path)
    assert keys.check("Bearer sk-two").salt == before.salt
    assert keys.check("Bearer sk-one").salt != before.salt


def test_an_operator_of_a_tenant_s_name_shares_no_cache_with_it(tmp_path: Path, file: Path) -> None:
    operators = tmp_path / "operators"
    operators.write_text("tenants:\n- {name: chat, keys: [sk-operator]}\n- {name: other, keys: [sk-other]}")
    keys = KeyFiles(file, operators).callers
    assert keys is not None
    tenant, operator, other = (keys.check(f"Bearer {key}") for key in ("sk-chat", "sk-operator", "sk-other"))
    assert (tenant.name, operator.name) == ("chat", "operator chat")
    assert len({tenant.salt, operator.salt, other.salt}) == 3
    assert ApiKeys.from_file(file).tenants["chat"].salt == tenant.salt  # the control: a tenant's own does not change


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tenants: []", "tenants"),
        ("tenants: sk-secret", "line 1"),
        ("tenants:\n- {name: a, keys: [sk-secret], color: red}", "unknown key"),
        ("tenants:\n- {name: a, keys: [sk-secret 1]}", "must list keys"),
        ("tenants:\n- {name: a, keys: sk-secret}", "must list keys"),
        ("tenants:\n- {name: a, keys: []}", "must list keys"),
        ("tenants:\n- {name: a, keys: [sk-secret]}\n- {name: a, keys: [sk-other]}", "names must differ"),
        ("tenants:\n- {name: a, keys: [sk-secret]}\n- {name: b, keys: [sk-secret]}", "listed twice"),
        ("tenants:\n- {name: a, keys: [sk-secret], weight: 0}", "weight"),
        ("tenants:\n- {name: a, keys: [sk-secret], tokens_per_minute: 0.5}", "tokens_per_minute"),
        ("tenants:\n- {name: a, keys: [sk-secret}", "is not YAML"),
        ("tenants:\n- {name: a, keys: *sk-secret}", "line 2: is not YAML"),
        ("tenants:\n- {name: a, keys: !sk-secret x}", "line 2: is not YAML"),
        ("tenants:\n- sk-secret: a", "line 2: unknown key; known here: name, keys"),
        ("tenants:\n- {sk-secret: a, sk-secret: b}", "line 2: is a duplicate key"),
        ("tenants:\n- {name: a, keys: [x]}\nsk-secret: a", "line 3: unknown key"),
        ("tenants:\n- {name: a, keys: ['sha256:beef']}", "line 2: tenants[0].keys: must have 64 hexadecimal digits"),
    ],
)
def test_a_faulty_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidField, match="api_keys_file") as raised:
        ApiKeys.from_file(path)
    assert reason in str(raised.value)
    assert "sk-" not in str(raised.value)


async def test_a_changed_file_is_read_again_and_a_faulty_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deploy.api.keys.REFRESH_S", 0.0)

    async def codes() -> list[int]:
        return [(await http.post(CHAT, json=chat_body(), headers=auth(key))).status_code for key in ("sk-one", "sk-new")]

    async with limited(tmp_path, requests_per_minute=3) as (http, _):
        path = tmp_path / "keys"
        before = path.read_text()
        assert await codes() == [200, 401]
        path.write_text("tenants: []")
        assert await codes() == [200, 401]
        assert "the former API keys stay in use" in caplog.text
        path.write_text(before.replace("sk-two", "sk-new"))
        assert await codes() == [200, 429]  # of the same budget
        path.write_text("sk-new\n")
        assert await codes() == [401, 200]
        path.unlink()
        assert await codes() == [401, 200]


def test_files_are_not_looked_at_for_each_call(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-one\n")
    files = KeyFiles(path, None)
    assert not files.refresh(0.0)
    path.write_text("sk-another\n")
    assert not files.refresh(4.9)
    assert files.refresh(5.0)
    assert not files.refresh(99.0)


async def test_too_many_requests_are_refused_with_the_time_to_wait(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_minute=2) as (http, cluster):
        first, second = [await http.post(CHAT, json=chat_body(), headers=auth(key)) for key in ("sk-one", "sk-two")]
        assert (first.status_code, second.status_code) == (200, 200)
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second)] == ["1", "0"]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        refused = await http.post(CHAT, content=b"not read", headers=auth("sk-one"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-ratelimit-limit-tokens" not in refused.headers
        assert (await http.get("/v1/models", headers=auth("sk-one"))).status_code == 200
        assert len(cluster.requests) == 2
        metrics = (await http.get("/metrics")).text
        assert 'outrider_tenant_over_budget_total{budget="requests",tenant="limited"} 1.0' in metrics


@pytest.mark.parametrize(
    ("per_minute", "burst_minutes", "num_taken", "reset"),
    [
        (60, 1.0, 0, "0s"),
        (60_000, 1.0, 17, "17ms"),
        (40, 1.0, 1, "1.5s"),
        (60, 1.0, 59, "59s"),
        (10, 6.0, 60, "6m0s"),
        (40, 60.0, 41, "1m1.5s"),
        (1, 60.0, 60, "1h0m0s"),
        (1, 1440.0, 1440, "24h0m0s"),
    ],
)
def test_times_of_headers_are_written_as_openai_writes_them(
    per_minute: int, burst_minutes: float, num_taken: int, reset: str
) -> None:
    tenant = Tenant("a", limits=Limits(per_minute, burst_minutes=burst_minutes))
    budgets = Budgets(lambda *_: None)
    budgets.set_tenants([tenant])
    for _ in range(num_taken):
        budgets.take_request(tenant, 0.0)
    assert dict(budgets.headers(tenant, 0.0))[b"x-ratelimit-reset-requests"] == reset.encode()


async def test_a_tenant_over_its_budget_takes_nothing_from_another(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_minute=1) as (http, _):
        codes = [(await http.post(CHAT, json=chat_body(), headers=auth("sk-one"))).status_code for _ in range(3)]
        assert codes == [200, 429, 429]
        free = [await http.post(CHAT, json=chat_body(), headers=auth("sk-free")) for _ in range(9)]
        assert {answer.status_code for answer in free} == {200}
        assert not [name for name in free[0].headers if name.startswith("x-ratelimit")]


def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


async def test_max_tokens_are_charged_at_first_and_the_unused_given_back(tmp_path: Path) -> None:
    """The budget holds one call's max_tokens, so the second fits only if the first gave back what it did not use."""
    async with limited(tmp_path, saying("the answer"), tokens_per_minute=200) as (http, _):
        body = completion_body(max_tokens=150)
        first = await http.post(COMPLETIONS, json=body, headers=auth("sk-one"))
        used = first.json()["usage"]
        assert remaining(first) == 200 - used["prompt_tokens"] - 150
        second = await http.post(COMPLETIONS, json=body, headers=auth("sk-one"))
        assert second.status_code == 200
        assert 0 <= remaining(second) - (remaining(first) - used["total_tokens"]) <= 4  # what a second or so brings
        metrics = (await http.get("/metrics")).text
        expected = f'outrider_tenant_tokens_total{{kind="output",tenant="limited"}} {2 * used["completion_tokens"]}.0'
        assert expected in metrics


async def test_tokens_that_are_not_there_are_refused(tmp_path: Path) -> None:
    def stays(request: Request) -> list[Step]:
        return [release, *finishing(request, token_ids("the answer"))]

    release = asyncio.Event()
    async with limited(tmp_path, stays, tokens_per_minute=200) as (http, cluster):
        body = completion_body(max_tokens=150)
        running = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=auth("sk-one")))
        await cluster.asked(1)
        refused = await http.post(COMPLETIONS, json=body, headers=auth("sk-two"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) > 20
        assert len(cluster.requests) == 1
        release.set()
        assert (await running).status_code == 200
        usage = running.result().json()["usage"]
        metrics = (await http.get("/metrics")).text
        assert f"outrider_prompt_tokens_total {float(usage['prompt_tokens'])}\n" in metrics  # of the refused call none
        never = await http.post(COMPLETIONS, json=completion_body(max_tokens=220), headers=auth("sk-two"))
        assert (never.status_code, never.json()["error"]["code"]) == (400, "tokens_per_minute_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(max_completion_tokens=150)),
        ("/v1/responses", {"model": MODEL, "input": "what is it?", "max_output_tokens": 150}),
        (CHAT, chat_body()),
    ],
)
async def test_the_refusal_of_a_call_that_never_fits_names_no_field_that_the_call_lacks(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with limited(tmp_path, tokens_per_minute=100) as (http, _):
        refused = await http.post(path, json=body, headers=auth("sk-one"))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "tokens_per_minute_exceeded", None)
        assert "max_tokens" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_fails_gives_back_what_it_did_not_use(tmp_path: Path, stream: bool) -> None:
    async with limited(tmp_path, lambda _: [LinkClosed("gone")], tokens_per_minute=200) as (http, _):
        body = completion_body(max_tokens=150, stream=stream)
        for _ in range(4):  # each would take three quarters of the budget
            assert (await http.post(COMPLETIONS, json=body, headers=auth("sk-one"))).status_code == 503


async def test_a_client_that_leaves_gets_back_what_it_did_not_use(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with limited(tmp_path, lambda _: [never], tokens_per_minute=200) as (http, cluster):
        body = completion_body(max_tokens=150)
        for count in range(1, 5):
            call = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=auth("sk-one")))
            await cluster.asked(count)
            call.cancel()
            await asyncio.wait([call])


async def test_a_call_wider_than_the_tenant_s_limit_is_refused(tmp_path: Path) -> None:
    async with limited(tmp_path, max_concurrent_requests=2) as (http, _):
        assert (await http.post(CHAT, json=chat_body(n=2), headers=auth("sk-one"))).status_code == 200
        refused = await http.post(CHAT, json=chat_body(n=3), headers=auth("sk-one"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert (await http.post(CHAT, json=chat_body(n=3), headers=auth("sk-free"))).status_code == 200


def _admission(**tenants: Tenant) -> Admission:
    settings = ApiSettings(max_concurrent=3, max_sequences=1, max_n=1, max_queued=64)
    admission = Admission(settings)
    admission.set_tenants(tenants)
    return admission


async def test_a_tenant_at_its_limit_waits_and_others_pass() -> None:
    admission = _admission(narrow=Tenant("narrow", max_concurrent=1))
    order: list[str] = []
    leave = {name: asyncio.Event() for name in ("narrow 1", "narrow 2", "other")}

    async def call(name: str) -> None:
        async with admission.admitted(1, name.split()[0]):
            order.append(name)
            await leave[name].wait()

    tasks = []
    for name in leave:
        tasks.append(asyncio.create_task(call(name)))
        await asyncio.sleep(0)
    assert order == ["narrow 1", "other"]
    assert (admission.num_queued, admission.num_running) == (1, 2)
    leave["narrow 1"].set()
    await asyncio.wait(tasks[:1])
    await asyncio.sleep(0)
    assert order == ["narrow 1", "other", "narrow 2"]
    for event in leave.values():
        event.set()
    await asyncio.gather(*tasks)
    assert (admission.num_queued, admission.num_running) == (0, 0)


async def test_shares_of_the_queue_are_as_the_weights() -> None:
    admission = _admission(heavy=Tenant("heavy", weight=3.0))
    order: list[str] = []

    async def call(tenant: str) -> None:
        async with admission.admitted(1, tenant, 10):
            order.append(tenant)
            await asyncio.sleep(0)

    async with admission.admitted(3, "busy"):
        tasks = [asyncio.create_task(call(tenant)) for tenant in ["light"] * 20 + ["heavy"] * 20]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert 14 <= order[:20].count("heavy") <= 16


def test_tenants_cannot_make_any_number_of_series() -> None:
    metrics = Metrics(600.0)
    for i in range(2 * MAX_TENANTS):
        metrics.record_tenant(f"t{i}", 1, 1)
        metrics.record_over_budget(f"t{i}", "tokens")
    text = metrics.render(None).decode()
    assert text.count("outrider_tenant_over_budget_total{") == MAX_TENANTS + 1
    assert f'outrider_tenant_over_budget_total{{budget="tokens",tenant="other"}} {MAX_TENANTS}.0' in text


async def test_the_audit_log_has_a_line_for_each_call_and_no_text(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "audit.jsonl"
    observability = ObservabilityConfig(audit_log_file=path)
    async with serving(saying("the answer"), api_keys_file=file, observability=observability) as (http, _):
        marked = chat_body(messages=[{"role": "user", "content": "marker-in-prompt"}])
        usage = (await http.post(CHAT, json=marked, headers=auth("sk-one") | {"x-request-id": "mine"})).json()["usage"]
        await http.post(CHAT, json=marked, headers=auth("sk-wrong"))
        await http.get("/health")  # probes write none
        moved = path.rename(tmp_path / "audit.1")
        await http.post(CHAT, json=marked | {"stream": True}, headers=auth("sk-chat"))
    assert path.stat().st_mode & 0o777 == 0o600
    first, refused = map(json.loads, moved.read_text().splitlines())
    (last,) = map(json.loads, path.read_text().splitlines())
    assert (first["request_id"], first["tenant"], first["model"], first["route"], first["status"]) == (
        *("mine", "search", "scripted", CHAT),
        200,
    )
    assert (first["prompt_tokens"], first["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert first["time"].endswith("Z")
    assert first["duration_ms"] > 0
    assert ("tenant" in refused, refused["model"], refused["status"]) == (False, None, 401)
    assert (last["tenant"], last["status"], last["completion_tokens"]) == ("chat", 200, usage["completion_tokens"])
    written = moved.read_text() + path.read_text()
    assert "marker" not in written
    assert "answer" not in written
    assert "sk-" not in written


def test_an_audit_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="audit_log_file"):
        AuditLog(tmp_path / "missing" / "audit")


def test_calls_go_on_while_the_audit_log_cannot_be_opened_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AuditLog(folder / "audit")
    outcomes = [Outcome(name, "GET", "/v1/models", 200, 0.1, None, None) for name in ("first", "lost", "last")]
    log.write(outcomes[0], 0.0)
    shutil.rmtree(folder)
    log.write(outcomes[1], 0.0)
    assert "No such file" in capsys.readouterr().err
    folder.mkdir()
    log.write(outcomes[2], 0.0)
    log.close()
    (line,) = map(json.loads, (folder / "audit").read_text().splitlines())
    assert line["request_id"] == "last"


async def test_the_dashboard_shows_a_tenant_its_own_calls_and_operators_all(tmp_path: Path, file: Path) -> None:
    operators = tmp_path / "operators"
    operators.write_text("sk-operator\n")
    async with serving(saying("the answer"), api_keys_file=file, operator_keys_file=operators) as (http, _):
        for key in ("sk-one", "sk-chat", "sk-one"):
            await http.post(CHAT, json=chat_body(), headers=auth(key))
        seen = {
            key: (await http.get("/v1/outrider/dashboard", headers=auth(key))).json()
            for key in ("sk-two", "sk-chat", "sk-operator")
        }
    tenants = {key: [one["tenant"] for one in data["requests"]] for key, data in seen.items()}
    assert tenants == {"sk-two": ["search"] * 2, "sk-chat": ["chat"], "sk-operator": ["search", "chat", "search"]}
    rounds = {key: {row[1] for row in data["rounds"]} for key, data in seen.items()}
    assert rounds == {"sk-two": {1, 3}, "sk-chat": {2}, "sk-operator": {1, 2, 3}}
