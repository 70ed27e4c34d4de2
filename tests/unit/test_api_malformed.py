"""Malformed bodies, unknown fields and places, and what exceeds the context: each a 4xx that names the field."""

import json
from typing import Any

import pytest

from tests.support.api import MAX_MODEL_LEN, MODEL, chat_body, completion_body, serving, token_ids
from tests.support.complaints import BODIES, CHAT, COMPLETIONS, complaint, refused

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


MISSPELT = [
    (path, name)
    for path in BODIES
    for name in ("temprature", "max_token", "Stop", "top-p", "logit_biases", "seeds", "something_else")
]


async def test_unknown_fields_are_ignored_and_named_in_a_header() -> None:
    async with serving() as (http, cluster):
        fields = {"temprature": 1, "<text>": 1, "stream_options": {"usage": True}, "stream": True, "seed": 1}
        message = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "mood": "b"}
        response = await http.post(CHAT, json=chat_body(**fields, messages=[message]))
        assert response.status_code == 200
        (named,) = response.headers.get_list("x-outrider-warning")
        head, _, paths = named.partition(": ")
        assert head == "unknown fields ignored"
        assert set(paths.split(", ")) == {
            *("temprature", "<text>"),
            "stream_options.usage",
            "messages.0.content.0.cache_control",
            "messages.0.mood",
        }
        plain = await http.post(CHAT, json=chat_body(seed=1, messages=[{"role": "user", "content": "a"}]))
        assert "x-outrider-warning" not in plain.headers
        first, second = cluster.requests
        assert (first.prompt_token_ids, first.sampling) == (second.prompt_token_ids, second.sampling)


async def test_a_wrong_field_is_named_rather_than_an_unknown_one() -> None:
    async with serving() as (http, _):
        body = {"unknown": 1, "temperature": "hot"}
        assert await complaint(http, CHAT, json.dumps(chat_body(**body)).encode(), "temperature") is None


@pytest.mark.parametrize("place", ["body", "tool", "function"])
async def test_a_wrong_list_is_named_beside_an_unknown_field_anywhere(place: str) -> None:
    """Pydantic checks a whole list after its parts."""
    unknown = {place: {"mood": "b"}}
    function = {"name": "same", **unknown.get("function", {})}
    tools = [{"type": "function", "function": function, **unknown.get("tool", {})}] * 2
    async with serving() as (http, _):
        body = json.dumps(chat_body(tools=tools, **unknown.get("body", {}))).encode()
        assert await complaint(http, CHAT, body, "tools") is None


async def test_the_names_of_unknown_fields_cannot_write_headers() -> None:
    async with serving() as (http, _):
        names = ["a\r\nset-cookie: b", "\u2028", "x" * 5000, *(f"field{i}" for i in range(50))]
        response = await http.post(COMPLETIONS, json=completion_body(**dict.fromkeys(names, 1)))
        assert response.status_code == 200
        warning = response.headers["x-outrider-warning"]
        assert warning.isascii()
        assert warning.isprintable()
        assert len(warning) < 1000
        assert warning.endswith("more")
        assert "set-cookie" not in response.headers


@pytest.mark.parametrize(("path", "name"), MISSPELT)
async def test_an_unknown_field_names_the_nearest(path: str, name: str) -> None:
    nearest = {
        "temprature": "temperature",
        "max_token": "max_tokens",
        "Stop": "stop",
        "top-p": "top_p",
        "logit_biases": "logit_bias",
        "seeds": "seed",
    }
    async with serving(unknown_fields="refuse") as (http, _):
        error = await refused(http, path, json.dumps(BODIES[path](**{name: 1})).encode(), name)
        assert error["code"] == "unknown_field"
        assert (f"did you mean {nearest.get(name)!r}" in error["message"]) == (name in nearest)


async def test_a_missing_field_is_named() -> None:
    async with serving() as (http, _):
        error = await refused(http, CHAT, json.dumps({"model": MODEL}).encode(), "messages")
        assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("body", [{}, {"model": None}])
async def test_without_a_model_the_served_one_answers(body: dict[str, Any]) -> None:
    chat, completion = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}
    async with serving() as (http, _):
        for path, fields in ((CHAT, chat), (COMPLETIONS, completion), ("/v1/responses", {"input": "a"})):
            response = await http.post(path, json={**fields, **body})
            assert (response.status_code, response.json()["model"]) == (200, MODEL), response.text


HINTS: list[tuple[str, dict[str, Any], str]] = [
    *((path, {"priority": 5}, "priority") for path in BODIES),
    *((path, {"length_penalty": 0.5}, "length_penalty") for path in BODIES),
    *((path, {"spaces_between_special_tokens": False}, "spaces_between_special_tokens") for path in BODIES),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),  # of which this template does not tell the model
    (CHAT, {"reasoning_effort": "none"}, "reasoning_effort"),
]


@pytest.mark.parametrize("unknown", ["warn", "refuse"])
async def test_hints_change_no_answer_and_are_named_in_a_header(unknown: str) -> None:
    async with serving(unknown_fields=unknown) as (http, cluster):
        for path, fields, name in HINTS:
            response = await http.post(path, json=BODIES[path](seed=1, **fields))
            assert response.status_code == 200, response.text
            assert response.headers["x-outrider-warning"] == f"fields without effect: {name}"
            assert "x-outrider-warning" not in (await http.post(path, json=BODIES[path](seed=1))).headers
            hinted, plain = cluster.requests[-2:]
            assert (hinted.prompt_token_ids, hinted.sampling) == (plain.prompt_token_ids, plain.sampling)


LONG = "a b " * MAX_MODEL_LEN  # is tokenized to its end
HUGE = "a b " * 50_000  # is not
RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(messages=[{"role": "user", "content": LONG}])),
        (CHAT, chat_body(messages=[{"role": "user", "content": HUGE}])),
        (CHAT, chat_body(max_tokens=MAX_MODEL_LEN)),
        (COMPLETIONS, completion_body(prompt=LONG)),
        (COMPLETIONS, completion_body(prompt=HUGE)),
        (COMPLETIONS, completion_body(max_tokens=MAX_MODEL_LEN)),
        (RESPONSES, {"input": LONG}),
        (RESPONSES, {"input": "a", "max_output_tokens": MAX_MODEL_LEN}),
    ],
)
async def test_a_call_beyond_the_context_is_refused_in_openai_s_words(path: str, body: dict[str, Any]) -> None:
    async with serving() as (http, cluster):
        response = await http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        limit = f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you requested "
        assert limit in error["message"]
        assert error["message"].endswith("Please reduce the length of the messages or completion.")
        assert cluster.requests == []


async def test_the_sentence_counts_prompt_and_completion() -> None:
    async with serving() as (http, _):
        num = len(token_ids("the answer is"))
        response = await http.post(COMPLETIONS, json=completion_body(max_tokens=MAX_MODEL_LEN))
        asked = f"{num + MAX_MODEL_LEN} tokens ({num} in the messages, {MAX_MODEL_LEN} in the completion)"
        assert asked in response.json()["error"]["message"]
