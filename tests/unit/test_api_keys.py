"""Keys and tenants: which are accepted, that no key is kept or shown, and what shows a tenant's calls."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from cluster.config import ObservabilityConfig
from cluster.errors import InvalidField
from deploy.api.middleware import AuditLog, Outcome
from deploy.api.tenants import ApiKeys, KeyFiles
from router.planning.token_budgets import Limits
from tests.support import wire
from tests.support.api import app_of, chat_body, finishing, listening, model_info, saying, serving, token_ids
from tests.support.asgi import CHAT
from tests.support.scripted import ScriptedClient
from tests.support.tenants import auth, limited


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-hashed").hexdigest()
    file.write_text(f"# who may call\n\nalice:{digest}\nsk-plain\n")
    return file


@pytest.mark.parametrize("key", ["sk-plain", "sk-hashed"])
async def test_a_known_key_is_served(keys_file: Path, key: str) -> None:
    async with serving(api_keys_file=keys_file) as (http, _):
        response = await http.post(CHAT, json=chat_body(), headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer sk-wrong", "Basic sk-plain", "sk-plain", "Bearer alice", "Bearer é"]
)
async def test_other_keys_are_refused_before_anything_is_read(keys_file: Path, header: str | None) -> None:
    async with serving(api_keys_file=keys_file) as (http, cluster):
        headers = {} if header is None else {"authorization": header.encode()}
        for method, path in (("POST", CHAT), ("GET", "/v1/models")):
            response = await http.request(method, path, content=b"no json", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert cluster.requests == []
        assert (await http.get("/health")).status_code == 200  # probes have no key


@pytest.mark.parametrize("header", ["headers", "trailers"])
def test_a_key_in_a_trailer_is_no_key(keys_file: Path, header: str) -> None:
    given = {"headers": ["Content-Type: application/json"], "trailers": []}
    given[header] = [*given[header], "Authorization: Bearer sk-plain"]
    cluster = ScriptedClient(model_info(), lambda request: finishing(request, token_ids("the answer")))
    with listening(app_of(cluster, api_keys_file=keys_file)) as url:
        answer = wire.exchange(url, wire.chunked(CHAT, json.dumps(chat_body()).encode(), **given))
    assert answer.status == (200 if header == "headers" else 401)


def test_keys_are_named_and_not_kept(keys_file: Path) -> None:
    keys = ApiKeys.from_file(keys_file)
    hashed, plain = keys.find("sk-hashed"), keys.find("sk-plain")
    assert hashed is not None
    assert plain is not None
    assert (hashed.name, plain.name) == ("alice", f"key-{hashlib.sha256(b'sk-plain').hexdigest()[:8]}")
    assert keys.find("sk-other") is None
    assert b"sk-plain" not in repr(vars(keys)).encode()


def test_hashed_keys_need_no_names(tmp_path: Path) -> None:
    """What ``printf %s KEY | sha256sum`` prints, of several keys."""
    path = tmp_path / "keys"
    path.write_text("".join(f"sha256:{hashlib.sha256(key).hexdigest()}\n" for key in (b"sk-one", b"sk-two")))
    plain = tmp_path / "plain"
    plain.write_text("sk-one\nsk-two\n")
    assert ApiKeys.from_file(path).tenants == ApiKeys.from_file(plain).tenants
    assert ApiKeys.from_file(path).check("Bearer sk-two").name.startswith("key-")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "two words", "naïve-key", f"a:{'0' * 64}\na:{'1' * 64}", "sha256:beef", f"sha256:{'g' * 64}"]
)
def test_a_bad_key_file_is_one_clear_line_without_its_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InvalidField, match="api_keys_file") as raised:
        ApiKeys.from_file(file)
    assert not text.strip() or text not in str(raised.value)
    with pytest.raises(InvalidField, match="cannot be read"):
        ApiKeys.from_file(tmp_path / "missing")


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_keys_that_everybody_can_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key\n")
    file.chmod(mode)
    ApiKeys.from_file(file)
    assert ("can read the API keys" in caplog.text) is warns


@pytest.mark.parametrize("path", ["/v1/messages", CHAT])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "sk-right"}, 200),
        ({"authorization": "Bearer sk-right"}, 200),
        ({"authorization": "Bearer sk-right", "x-api-key": "sk-wrong"}, 200),
        ({"authorization": "Bearer sk-wrong", "x-api-key": "sk-right"}, 401),
        ({"authorization": "", "x-api-key": "sk-right"}, 401),
        ({"x-api-key": "Bearer sk-right"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
async def test_a_key_in_either_header(tmp_path: Path, path: str, headers: dict[str, str], status: int) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    async with serving(api_keys_file=keys) as (http, _):
        assert (await http.post(path, json=chat_body(max_tokens=5), headers=headers)).status_code == status


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(TENANTS.format(digest=hashlib.sha256(b"sk-two").hexdigest()))
    return path


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


def test_lines_of_keys_have_names_and_salts_of_their_keys_and_not_of_their_places(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-one\nsk-two\n")
    before = ApiKeys.from_file(path)
    path.write_text("sk-two\nsk-zero\nsk-two\n")  # a key twice is one tenant
    keys = ApiKeys.from_file(path)
    assert keys.check("Bearer sk-two") == before.check("Bearer sk-two")
    assert keys.check("Bearer sk-zero").name not in before.tenants
    assert keys.check("Bearer sk-zero").salt != before.check("Bearer sk-one").salt


def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    name = f"key-{hashlib.sha256(b'sk-one').hexdigest()[:8]}"
    path.write_text(f"{name}:{'0' * 64}\nsk-one\n")
    with pytest.raises(InvalidField, match="twice"):
        ApiKeys.from_file(path)


def test_an_operator_of_a_tenant_s_name_shares_no_cache_with_it(tmp_path: Path, file: Path) -> None:
    operators = tmp_path / "operators"
    operators.write_text("tenants:\n- {name: chat, keys: [sk-operator]}\n- {name: other, keys: [sk-other]}")
    keys = KeyFiles(file, operators).callers
    assert keys is not None
    tenant, operator, other = (keys.check(f"Bearer {key}") for key in ("sk-chat", "sk-operator", "sk-other"))
    assert (tenant.name, operator.name) == ("chat", "operator chat")
    assert len({tenant.salt, operator.salt, other.salt}) == 3
    assert ApiKeys.from_file(file).tenants["chat"].salt == tenant.salt  # the control: a tenant's own does not change


async def test_a_moved_line_shows_a_tenant_no_timelines_of_another(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-one\nsk-two\nsk-three\n")

    async def num_seen(key: str) -> int:
        return len((await http.get("/v1/outrider/dashboard", headers=auth(key))).json()["requests"])

    async with serving(saying("the answer"), api_keys_file=path, keys_refresh_s=0.0) as (http, _):
        await http.post(CHAT, json=chat_body(), headers=auth("sk-two"))
        path.write_text("sk-two\nsk-three\n")
        assert (await num_seen("sk-two"), await num_seen("sk-three")) == (1, 0)


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
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_change_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-revoked\nsk-kept\n")
    files = KeyFiles(path, None)
    path.write_text("sk-kept\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", _fails)
        assert not any(files.refresh(now_s) for now_s in (0.0, 5.0, 10.0))
    assert caplog.text.count("the former API keys stay in use") == 1
    assert files.callers is not None
    assert files.callers.find("sk-revoked") is not None
    assert files.refresh(15.0)
    assert files.callers.find("sk-revoked") is None
    path.write_text("two words\n")
    assert not any(files.refresh(now_s) for now_s in (20.0, 25.0))
    assert caplog.text.count("the former API keys stay in use") == 2


def _fails(*_: object) -> str:
    raise OSError


def test_a_replaced_file_of_the_same_time_and_size_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-one\n")
    found = path.stat()
    files = KeyFiles(path, None)
    path.write_text("sk-two\n")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert files.refresh(0.0)


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
