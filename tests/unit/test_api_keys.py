"""API keys: which are accepted, and that none is kept or shown."""

import hashlib
import json
from pathlib import Path

import pytest

from cluster.errors import InvalidField
from deploy.api.keys import ApiKeys
from tests.support import wire
from tests.support.api import app_of, chat_body, finishing, listening, model_info, serving, token_ids
from tests.support.asgi import CHAT
from tests.support.scripted import ScriptedClient


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
