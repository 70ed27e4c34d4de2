"""Malformed bodies and unknown places: each a 4xx in OpenAI's shape, and the server serves on."""

import json

import pytest

from tests.support.api import chat_body, serving
from tests.support.complaints import BODIES, CHAT, COMPLETIONS, complaint

# Bodies that are no JSON object with numbers in it.
RAW: dict[str, bytes] = {
    "empty": b"",
    "blank": b"   ",
    "half an object": b'{"model": "scripted"',
    "trailing comma": b'{"model": "scripted",}',
    "trailing text": b'{"model": "scripted"} and more',
    "two documents": b"{}{}",
    "single quotes": b"{'model': 'scripted'}",
    "a comment": b'{"model": "scripted" /* which else */}',
    "an array": b"[]",
    "a string": b'"scripted"',
    "a number": b"5",
    "null": b"null",
    "invalid UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-8 cut short": b'{"model": "\xe2\x9d',
    "UTF-16": '{"model": "scripted"}'.encode("utf-16"),
    "latin-1": '{"model": "café"}'.encode("latin-1"),
    "a lone surrogate": b'{"model": "\\ud800"}',
    "NaN": b'{"model": "scripted", "prompt": "a", "temperature": NaN}',
    "Infinity": b'{"model": "scripted", "prompt": "a", "temperature": Infinity}',
    "minus Infinity": b'{"model": "scripted", "prompt": "a", "temperature": -Infinity}',
    "a leading zero": b'{"seed": 01}',
    "a raw control character": b'{"model": "a\x01b"}',
    "a number of 5000 digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "arrays nested 100000 deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects nested 100000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a byte order mark": b"\xef\xbb\xbf{}",
}


async def test_what_is_no_json_is_refused_and_the_server_serves_on() -> None:
    async with serving() as (http, cluster):
        answers = [await complaint(http, path, body, "body") for body in RAW.values() for path in BODIES]
        assert "\n".join(filter(None, answers)) == ""
        assert cluster.requests == []
        assert (await http.post(CHAT, json=chat_body())).status_code == 200


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonl"])
async def test_another_content_type_is_refused(content_type: str | None) -> None:
    async with serving() as (http, _):
        headers = {} if content_type is None else {"content-type": content_type}
        response = await http.post(CHAT, content=json.dumps(chat_body()).encode(), headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "Content-Type"
        good = {"content-type": "Application/JSON; charset=utf-8"}
        assert (await http.post(CHAT, content=json.dumps(chat_body()).encode(), headers=good)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/gpt-17", 404),
        ("GET", "/v1/models/..%2f..%2fetc", 404),
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
async def test_unknown_places_answer_in_the_same_shape(method: str, path: str, status: int) -> None:
    async with serving() as (http, _):
        response = await http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"].startswith("req_")
