"""LoRA adapters as models of the API: loaded and unloaded while it serves, and apart from the model and each other."""

from collections.abc import Iterable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import httpx
import pytest

from actors.processes import AdapterRegistry, Directory
from cluster.config import Config, LoraModule, with_fields
from cluster.errors import InvalidField, Overloaded
from cluster.message_checks import request_fault
from cluster.strict_yaml import ConfigError
from cluster.types import Adapter, Commit, FinishReason, ModelInfo, Request
from deploy.command_line import parse
from engine.admission import load_adapter
from engine.sequences import Sequences
from tests.support.api import app_of, chat_body, client_of, finishing, model_info, token_ids
from tests.support.asgi import CHAT
from tests.support.requests import a_request
from tests.support.scripted import ScriptedClient, Step

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "sql-v1"}
A, B, C = (Adapter(name, f"/adapters/{name}", f"key-{name}") for name in "abc")


class Server:
    """The API over a scripted target that accepts every adapter but those in a folder named bad."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.cluster = ScriptedClient(replace(model_info(), max_adapters=2), self._answer)
        self.registry = AdapterRegistry()
        settings = {"lora_folder": folder} | settings
        self._app = app_of(self.cluster, swap_adapter=self._swap, **settings)

    def _answer(self, request: Request) -> Iterable[Step]:
        if request.adapter is not None and Path(request.adapter.path).name == "bad":
            return [Commit(request.id, 1, (), finish=FinishReason.REFUSED, error="lora_path: is no adapter of this model")]
        return finishing(request, token_ids("the answer"))

    async def _swap(self, old: Adapter | None, new: Adapter | None) -> bool:
        changed = self.registry.swapped(Directory("", 0, self.cluster.info), old, new)
        self.cluster.info = changed.model if changed is not None and changed.model is not None else self.cluster.info
        return changed is not None

    def http(self) -> httpx.AsyncClient:
        return client_of(self._app)


async def test_an_adapter_is_a_model_from_its_load_to_its_unload(tmp_path: Path) -> None:
    server = Server(tmp_path)
    async with server.http() as http:
        body = chat_body(max_tokens=9, model="sql")
        assert (await http.post(CHAT, json=body)).status_code == HTTPStatus.NOT_FOUND
        loaded = await http.post(LOAD, json=SQL)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        cards = {card["id"]: card["parent"] for card in (await http.get("/v1/models")).json()["data"]}
        assert cards == {"scripted": None, "sql": "scripted"}
        assert (await http.get("/v1/models/sql")).json()["parent"] == "scripted"
        assert (await http.get("/server_info")).json()["model"]["adapters"] == ["sql"], "no path of the server"
        plain = (await http.post(CHAT, json=chat_body(max_tokens=9))).json()
        answer = (await http.post(CHAT, json=body)).json()
        assert (answer["model"], plain["model"]) == ("sql", "scripted")
        assert answer["system_fingerprint"] != plain["system_fingerprint"]
        of_model, of_adapter = server.cluster.requests[-2:]
        assert of_adapter.adapter is not None
        assert of_adapter.adapter.path == str(tmp_path / "sql-v1")
        assert of_model.salt != of_adapter.salt, "caches and what drafters learn are apart"
        again = await http.post(LOAD, json=SQL)
        assert again.status_code == HTTPStatus.BAD_REQUEST
        assert "load_inplace" in again.text
        assert (await http.post(LOAD, json=SQL | {"load_inplace": True})).status_code == HTTPStatus.OK
        await http.post(CHAT, json=body)
        assert server.cluster.requests[-1].salt != of_adapter.salt, "other weights"
        assert (await http.post(LOAD, json=SQL | {"lora_name": "second"})).status_code == HTTPStatus.OK
        assert "max_loras" in (await http.post(LOAD, json=SQL | {"lora_name": "third"})).text
        assert (await http.post(UNLOAD, json={"lora_name": "sql"})).status_code == HTTPStatus.OK
        assert (await http.post(CHAT, json=body)).status_code == HTTPStatus.NOT_FOUND
        assert (await http.post(UNLOAD, json={"lora_name": "sql"})).status_code == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lora_path": "/etc"}, "lora_path"),
        ({"lora_path": "../other"}, "lora_path"),
        ({"lora_path": "out"}, "lora_path"),  # a link
        ({"lora_path": "a\0b"}, "lora_path"),
        ({"lora_path": "bad"}, "no adapter of this model"),
        ({"lora_name": "scripted"}, "lora_name"),
        ({"is_3d_lora_weight": True}, "is_3d_lora_weight"),
    ],
)
async def test_what_is_no_adapter_is_refused(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "out").symlink_to("/etc")
    server = Server(tmp_path / "adapters")
    async with server.http() as http:
        answer = await http.post(LOAD, json=SQL | fields)
        assert answer.status_code == HTTPStatus.BAD_REQUEST
        assert named in answer.text
        assert not server.cluster.info.adapters


async def test_only_operators_change_adapters_where_keys_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-user\n")
    (tmp_path / "operators").write_text("sk-operator\n")
    keys = {"api_keys_file": tmp_path / "keys"}
    everyone = {**keys, "operator_keys_file": tmp_path / "operators"}
    for settings, key, status in (
        ({"lora_folder": None}, "", HTTPStatus.FORBIDDEN),
        (keys, "sk-user", HTTPStatus.FORBIDDEN),
        (everyone, "sk-user", HTTPStatus.UNAUTHORIZED),
        (everyone, "sk-operator", HTTPStatus.OK),
    ):
        async with Server(tmp_path, **settings).http() as http:
            for url, headers in ((LOAD, {"authorization": f"Bearer {key}"}), (UNLOAD, {"x-api-key": key})):
                answer = await http.post(url, json=SQL if url == LOAD else {"lora_name": "sql"}, headers=headers)
                assert answer.status_code == status, answer.text


def test_a_new_supervisor_takes_over_the_newest_adapters() -> None:
    file = ModelInfo("m", 9, 9, (), "", adapters=(A,), max_adapters=2)
    registry, now = AdapterRegistry(), Directory("new", 1, file)
    assert registry.recalled(now, now) == now
    now = registry.recalled(now, Directory("former", 4, replace(file, adapters=(A, B))))
    assert (now.version, now.model and now.model.adapters) == (2, (A, B))
    assert registry.recalled(now, Directory("former", 3, file)) is now, "another gateway has heard more"
    assert registry.swapped(now, None, C) is None, "there is no room"
    assert registry.swapped(now, C, None) is None, "it is gone"
    changed = registry.swapped(now, A, C)
    assert changed is not None
    assert registry.applied(file) == changed.model == replace(file, adapters=(B, C))
    assert registry.recalled(changed, Directory("former", 9, file)) is changed, "they have changed since"


@pytest.mark.parametrize(
    ("error", "finish"),
    [
        (None, None),
        (InvalidField("lora_path", "x", "does not fit"), FinishReason.REFUSED),
        (Overloaded("all are in use", 1.0), FinishReason.OVERLOADED),
    ],
)
def test_a_target_refuses_what_it_cannot_load(error: Exception | None, finish: FinishReason | None) -> None:
    engine: Any = SimpleNamespace(load_adapter=Mock(side_effect=error), has_adapter=Mock())
    sequences = Sequences(model_info())
    sequences.add(a_request("live", (1,), max_tokens=1, adapter=A))
    asked = a_request("new", (1,), max_tokens=1, adapter=B)
    refused, reason = load_adapter(asked, sequences, engine)
    assert (reason and refused) == finish
    engine.load_adapter.assert_called_once_with(B, {A})
    refused, reason = load_adapter(asked, sequences, cast(Any, object()))
    assert reason
    assert refused is FinishReason.REFUSED, "the native engine takes none"
    too_long = replace(asked, adapter=replace(B, key="k" * 65))
    assert (request_fault(asked, 9), "salt" in str(request_fault(too_long, 9))) == (None, True)


def test_vllm_s_flags_name_adapters() -> None:
    module = '{"name": "c", "path": "/c", "base_model_name": "m"}'
    target = parse(["m", "--lora-modules", "a=/a", "b=/b=1", module]).fields["target"] | {"engine": "vllm"}
    config = with_fields(Config(), {"model": {"name": "m"}, "target": target}).target
    assert [(one.name, str(one.path)) for one in config.lora_modules] == [("a", "/a"), ("b", "/b=1"), ("c", "/c")]
    assert config.num_adapters == 3
    assert parse(["--lora-modules", module, "--model", "x", "--served-model-name", "n", "m"]).fields["target"]
    for words in ([], ["--model", "x"]):
        with pytest.raises(InvalidField, match=r"lora-modules: base_model_name"):
            parse([*words, "--lora-modules", module])


def test_a_folder_that_is_not_there_is_no_name_of_a_hub() -> None:
    """vLLM downloads what is named by a relative path that does not exist."""
    assert LoraModule(name="sql", path=Path("adapters/sql")).adapter.path == str(Path.cwd() / "adapters" / "sql")
    assert LoraModule(name="sql", path=Path("~/sql")).adapter.path == str(Path.home() / "sql")


@pytest.mark.parametrize(
    ("engine", "names", "reason"),
    [
        ("native", "a", "native engine"),
        ("vllm", "m", "names of the model"),
        ("vllm", "aa", "must differ"),
        ("vllm", "", "enable_lora"),
    ],
)
def test_a_configuration_that_cannot_serve_adapters_is_refused(engine: str, names: str, reason: str) -> None:
    modules = [{"name": name, "path": "/a"} for name in names]
    fields = {"model": {"name": "m"}, "target": {"engine": engine, "lora_modules": modules}, "api": {"lora_folder": "/a"}}
    with pytest.raises(ConfigError, match=reason):
        with_fields(Config(), fields)
