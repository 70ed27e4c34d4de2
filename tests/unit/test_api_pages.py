"""What the server says of itself, who may read it, and from which web pages."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ApiConfig
from cluster.errors import LinkClosed
from deploy.api.anthropic import CountTokensRequest, MessagesRequest
from deploy.api.responses import ResponsesRequest
from deploy.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deploy.api.settings import SPARE_CALLS, ApiSettings
from tests.support.api import chat_body, serving

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_version_and_ping() -> None:
    async with serving(status_ttl_s=1e-6) as (http, cluster):
        assert (await http.get("/version")).json() == {"version": version("outrider")}
        for method in ("GET", "POST"):
            assert (await http.request(method, "/ping")).status_code == 200
        cluster.failure = LinkClosed("nobody answers")
        response = await http.get("/ping")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_target")


async def test_a_model_answers_to_each_of_its_names() -> None:
    async with serving() as (http, cluster):
        cluster.info = replace(cluster.info, name="test/Tiny", aliases=("tiny", "gpt-4"))
        listed = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        assert listed == ["test/Tiny", "tiny", "gpt-4"]
        for name in listed:
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
            assert (await http.post(CHAT, json=chat_body(model=name))).json()["model"] == "test/Tiny"
        assert (await http.post(CHAT, json=chat_body(model="Tiny"))).status_code == 404


async def test_the_root_leads_browsers_to_the_dashboard() -> None:
    async with serving() as (http, _):
        browser = await http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        program = await http.get("/")
    assert (browser.status_code, browser.headers["location"]) == (307, "/dashboard")
    assert program.json()["dashboard"] == "/dashboard"


async def test_the_openapi_document_describes_every_body() -> None:
    async with serving() as (http, _):
        document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    for path, model in (
        (CHAT, ChatRequest),
        ("/v1/completions", CompletionRequest),
        ("/v1/responses", ResponsesRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/messages/count_tokens", CountTokensRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
    ):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2]
        assert set(document["components"]["schemas"][name]["properties"]) == set(model.model_fields)
    # Every reference leads somewhere.
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= set(document["components"]["schemas"])


async def test_the_page_of_the_api_loads_nothing_from_elsewhere() -> None:
    async with serving() as (http, _):
        response = await http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|<link|<img|src=|https?://", response.text)
    for word in (CHAT, "/tokenize", "max_completion_tokens", "skip_special_tokens", "drafting"):
        assert word in response.text


async def test_what_needs_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    async with serving(api_keys_file=keys) as (http, cluster):
        document = (await http.get("/openapi.json")).json()
        assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        for method, path in (
            ("POST", CHAT),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/scripted"),
            ("GET", "/v1/outrider/status"),
        ):
            body = {"json": {"prompt": "a", "tokens": [1]}} if method == "POST" else {}
            response = await http.request(method, path, **body)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert cluster.requests == []
        for path in ("/health", "/ping", "/version", "/metrics", "/openapi.json", "/docs"):
            assert (await http.get(path)).status_code == 200, path
        response = await http.post("/tokenize", json={"prompt": "a"}, headers={"authorization": "Bearer sk-right"})
        assert response.status_code == 200


async def test_no_web_page_may_read_answers_by_default() -> None:
    async with serving() as (http, _):
        response = await http.post(CHAT, json=chat_body(), headers={"origin": PAGE})
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]
        refused = await http.options(CHAT, headers=PREFLIGHT)
        assert refused.status_code == 405
        assert "access-control-allow-origin" not in refused.headers


async def test_named_web_pages_may_read_answers() -> None:
    async with serving(cors_origins=(PAGE,)) as (http, _):
        allowed = await http.options(CHAT, headers=PREFLIGHT)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        for path, body in ((CHAT, chat_body()), (CHAT, {}), ("/v1/nothing", {})):
            response = await http.post(path, json=body, headers={"origin": PAGE})
            assert response.headers["access-control-allow-origin"] == PAGE, "the page could not read the error either"
            assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
        other = {**PREFLIGHT, "origin": "https://evil.example"}
        refused = await http.options(CHAT, headers=other)
        assert refused.status_code == 400
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
        assert "access-control-allow-origin" not in refused.headers
        response = await http.post(CHAT, json=chat_body(), headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_web_pages_may_read_the_refusals_of_the_boundary() -> None:
    limits: dict[str, Any] = {"max_concurrent": 1, "max_queued": 1, "max_sequences": 1, "max_n": 1}
    async with serving(cors_origins=(PAGE,), **limits) as (http, cluster):
        cluster.failure = KeyError("a defect")
        failed = await http.post(CHAT, json=chat_body(), headers={"origin": PAGE})
        cluster.failure = None
        ended = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            await ended.wait()
            yield b"{}"

        json_type = {"content-type": "application/json"}
        calls = [asyncio.create_task(http.post(CHAT, content=endless(), headers=json_type)) for _ in range(2 + SPARE_CALLS)]
        while f"outrider_requests_in_flight {len(calls)}.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0)
        refused = await http.post(CHAT, json=chat_body(), headers={"origin": PAGE})
        ended.set()
        assert {call.status_code for call in await asyncio.gather(*calls)} == {400}
    assert (failed.status_code, refused.status_code) == (500, 429)
    for response in (failed, refused):
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers


async def test_all_web_pages_may_read_answers_where_the_setting_says_so() -> None:
    async with serving(cors_origins=("*",)) as (http, _):
        response = await http.post(CHAT, json=chat_body(), headers={"origin": PAGE})
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers


def test_the_settings_of_the_file() -> None:
    config = ApiConfig.model_validate({"cors_origins": (PAGE, "http://localhost:3000", "*"), "unknown_fields": "refuse"})
    settings = ApiSettings.from_config(config)
    assert settings.cors_origins == (PAGE, "http://localhost:3000", "*")
    assert settings.unknown_fields == "refuse"
    for wrong in ("chat.example", "https://chat.example/", "ftp://chat.example", ""):
        with pytest.raises(ValueError, match="cors_origins"):
            ApiConfig.model_validate({"cors_origins": (wrong,)})


API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_field_is_documented() -> None:
    named = set(re.findall(r"`([a-z_]+)`", API_PAGE.read_text("utf-8")))
    assert set(ChatRequest.model_fields) | set(CompletionRequest.model_fields) <= named


def test_the_api_needs_neither_torch_nor_ray_nor_transformers() -> None:
    program = (
        "import sys, deploy.api.app, deploy.api.tokenizer\n"
        "print(sorted({'torch', 'ray', 'transformers', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
