"""Anthropic's API over a scripted cluster."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from cluster.errors import LinkClosed, Overloaded
from deploy.api.anthropic import MessagesRequest
from deploy.api.schema import ChatRequest
from tests.support.api import CHAT_TEMPLATE, MAX_MODEL_LEN, MODEL, fast_tokenizer, saying, serving
from tests.support.asgi import Caller, answering
from tests.support.scripted import ScriptedClient

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
TOOL: Any = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "東京"}}</tool_call>'
THINKS = CHAT_TEMPLATE + "{# </think> #}{{ enable_thinking }}"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "what is it?"}], **fields}


def answering_with(
    text: str, template: str = CHAT_TEMPLATE
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, ScriptedClient]]:
    return serving(saying(text), template, 4096)


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for block in filter(None, text.split("\n\n")):
        name, _, data = block.removeprefix("event: ").partition("\ndata: ")
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream; the events must be in order."""
    start, ping, *middle, last, stop = events
    kinds = [event["type"] for event in (start, ping, last, stop)]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
    content: list[dict[str, Any]] = start["message"]["content"]
    arguments, is_open = "", False
    for event in middle:
        assert is_open == (event["type"] != "content_block_start")
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
        assert event["index"] == len(content) - 1
        match event.get("delta"):
            case {"type": "text_delta", "text": text}:
                content[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                content[-1]["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                content[-1]["signature"] += text
            case {"type": "input_json_delta", "partial_json": text}:
                arguments += text
        if event["type"] == "content_block_stop" and content[-1]["type"] == "tool_use":
            assert content[-1]["input"] == {}
            content[-1]["input"], arguments = json.loads(arguments), ""
    assert not is_open
    assert last["usage"]["input_tokens"] == start["message"]["usage"]["input_tokens"]
    return {**start["message"], **last["delta"], "usage": last["usage"], "outrider": last["outrider"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": None, "content": content}


async def test_an_answer_and_its_stream_are_the_same() -> None:
    async with answering_with(f"<think>why</think>Let me see. {CALL}{CALL}", THINKS) as (http, _):
        whole = (await http.post(PATH, json=body(tools=[TOOL]))).json()
        stream = await http.post(PATH, json=body(tools=[TOOL], stream=True))
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    called = {"type": "tool_use", "name": "get_weather", "input": {"city": "東京"}}
    assert without_ids(whole)["content"] == [
        {"type": "thinking", "thinking": "why", "signature": "unsigned"},
        {"type": "text", "text": "Let me see."},
        called,
        called,
    ]
    assert len({block["id"] for block in whole["content"][2:]}) == 2
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    assert 0 < whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert without_ids(assembled(events_of(stream.text))) == without_ids(whole)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "the answer is forty-two"),
        ({"stop_sequences": ["nothing", " is"]}, "stop_sequence", " is", "the answer"),
        ({"max_tokens": 2}, "max_tokens", None, "the answer"),
        ({"max_tokens": 10**6}, "end_turn", None, "the answer is forty-two"),
    ],
)
async def test_why_an_answer_ended(fields: dict[str, Any], reason: str, sequence: str | None, text: str) -> None:
    async with answering_with("the answer is forty-two") as (http, _):
        whole = (await http.post(PATH, json=body(**fields))).json()
        streamed = assembled(events_of((await http.post(PATH, json=body(**fields, stream=True))).text))
    for message in (whole, streamed):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert message["content"] == [{"type": "text", "text": text}]


async def test_the_context_bounds_an_answer_rather_than_refusing_it() -> None:
    async with serving(saying("word " * MAX_MODEL_LEN)) as (http, cluster):
        message = (await http.post(PATH, json=body(max_tokens=64_000))).json()
        (request,) = cluster.requests
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert len(request.prompt_token_ids) + message["usage"]["output_tokens"] == MAX_MODEL_LEN


async def test_an_empty_answer_has_no_blocks() -> None:
    async with answering_with("") as (http, _):
        message = (await http.post(PATH, json=body())).json()
        assert (message["content"], message["stop_reason"]) == ([], "end_turn")
        goes_on = [*body()["messages"], {"role": "assistant", "content": []}, {"role": "user", "content": "again"}]
        assert (await http.post(PATH, json=body(messages=goes_on))).status_code == 200


@pytest.mark.parametrize(
    "arguments", ["{'a': 1}", "[]", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' * 250 + "1" + "}" * 250, "7"]
)
async def test_arguments_that_are_no_object_are_told_as_text(arguments: str) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    async with answering_with(text) as (http, _):
        answer = await http.post(PATH, json=body(tools=[TOOL], max_tokens=4000))
        assert answer.status_code == 200
        for block in answer.json()["content"]:
            if block["type"] == "tool_use":
                ((name, value),) = block["input"].items()
                assert name == "INVALID_JSON"
                assert isinstance(value, str)
        assert (await http.post(PATH, json=body(tools=[TOOL], max_tokens=4000, stream=True))).status_code == 200


async def test_a_call_that_is_cut_off_is_not_to_be_run() -> None:
    async with answering_with(CALL) as (http, _):
        message = (await http.post(PATH, json=body(tools=[TOOL], max_tokens=50))).json()
    assert message["stop_reason"] == "max_tokens"
    assert list(message["content"][0]["input"]) == ["INVALID_JSON"]


async def test_a_conversation_is_the_chat_s() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "what is it?", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "東京"}},
                {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}], **cached},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no city", "is_error": True},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": "be brief", **cached},
        {"type": "text", "text": "be kind"},
    ]
    async with answering_with("the answer") as (http, cluster):
        answer = await http.post(PATH, json=body(messages=messages, system=system))
        assert answer.status_code == 200, answer.text
        assert "x-outrider-warning" not in answer.headers
        text = fast_tokenizer().decode(list(cluster.requests[0].prompt_token_ids), skip_special_tokens=False)
    calls = ['{"name": "get_weather", "arguments": {"city": "東京"}}', '{"name": "get_weather", "arguments": {}}']
    called = "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
    assert text.startswith(
        "<|start|>system\nbe brief\nbe kind<|end|>\n<|start|>user\nhello\nwhat is it?<|end|>\n"
        f"<|start|>assistant\nLet me see.{called}<|end|>\n"
    )
    results = [text.index(f"<tool_response>\n{result}\n</tool_response>") for result in ("sunny", "Error: no city")]
    assert results == sorted(results)
    assert text.endswith("and now?<|end|>\n<|start|>assistant\n")


async def test_an_answer_continues_the_assistant_s_message_at_the_end() -> None:
    messages = [*body()["messages"], {"role": "assistant", "content": "It is ("}]
    async with answering_with("B)") as (http, cluster):
        assert (await http.post(PATH, json=body(messages=messages))).json()["content"] == [{"type": "text", "text": "B)"}]
        text = fast_tokenizer().decode(list(cluster.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert text.endswith("<|start|>assistant\nIt is (")


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [({"type": "enabled", "budget_tokens": 1024}, "True"), ({"type": "adaptive"}, "True"), ({"type": "disabled"}, "False")],
)
async def test_thinking_is_a_variable_of_the_template(thinking: dict[str, Any], shown: str) -> None:
    async with answering_with("the answer", THINKS) as (http, cluster):
        answer = await http.post(PATH, json=body(thinking=thinking))
        ids = list(cluster.requests[0].prompt_token_ids)
    assert fast_tokenizer().decode(ids).endswith(shown)
    assert ("thinking.budget_tokens" in answer.headers.get("x-outrider-warning", "")) == ("budget_tokens" in thinking)


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "any", "disable_parallel_tool_use": False}, {"tool_choice": "required", "parallel_tool_calls": True}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_choices_of_tools_are_those_of_a_chat(choice: dict[str, Any], asked: dict[str, Any]) -> None:
    name = "mcp__" + "a" * 123
    tool = {**TOOL, "name": name, "type": "custom", "description": "of today", "strict": True, "input_examples": [{}]}
    fields = MessagesRequest.model_validate(body(tools=[tool], tool_choice=choice)).chat_fields()
    function = {"name": name, "description": "of today", "strict": True, "parameters": TOOL["input_schema"]}
    assert fields["tools"] == [{"type": "function", "function": function}]
    assert ChatRequest.model_validate(fields).tools
    assert {name: fields[name] for name in ("tool_choice", "parallel_tool_calls") if name in fields} == asked


def test_a_format_of_the_output_is_a_response_format() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    fields = MessagesRequest.model_validate(body(output_config={"format": form})).chat_fields()
    assert fields["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


async def test_what_other_servers_have_is_left_out_with_a_warning() -> None:
    """As Claude Code calls."""
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "mcp_toolset"}]
    fields = {
        "tools": tools,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "user_1"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,context-management-2025-06-27"}
    async with answering_with("the answer") as (http, cluster):
        answer = await http.post(f"{PATH}?beta=true", json=body(**fields), headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        warning = answer.headers["x-outrider-warning"]
        named = ("context_management", "tools.1 (web_search_20250305)", "tools.2 (mcp_toolset)", "output_config.effort")
        assert all(name in warning for name in named), warning
        prompt = fast_tokenizer().decode(list(cluster.requests[0].prompt_token_ids))
    assert "get_weather" in prompt
    assert "web_search" not in prompt


async def test_tokens_are_counted_as_an_answer_counts_them() -> None:
    asked = body(tools=[TOOL], system="be brief", thinking={"type": "adaptive"})
    async with answering_with("the answer") as (http, cluster):
        del asked["max_tokens"]
        counted = await http.post(COUNT, json=asked)
        assert cluster.requests == []
        usage = (await http.post(PATH, json={**asked, "max_tokens": 5})).json()["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        long = await http.post(COUNT, json={**asked, "messages": [{"role": "user", "content": "word " * 5000}]})
        assert long.json()["input_tokens"] > 5000  # beyond the context


def _block(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: "),
        (_block({"source": {"data": "a" * 99}, "type": "image"}), "messages.0.content.0: blocks of type image are not"),
        (_block({"type": "document", "source": {}}), "messages.0.content.0: blocks of type document are not"),
        (_block({"type": "server_tool_use"}, "assistant"), "messages.0.content.0: blocks of type server_tool_use are not"),
        (_block({"type": "text"}), "messages.0.content.0.text: "),
        (_block({"type": "tool_use", "id": "1", "name": "f", "input": {}}), "messages.0: has the role user"),
        (_block({"type": "tool_use", "id": "1", "name": "f", "input": {}}, "assistant"), "messages: must not end with"),
        (
            _block({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
            "messages.0.content.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "prompt is too long: messages: "),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: "),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name: "),
        ({"tools": [{**TOOL, "name": "a" * 257}]}, "tools.0.name: "),
        ({"tools": [{"type": "web_search" * 99}]}, "tools.0.type: "),
        ({"tools": [{"type": 5}]}, "tools.0.type: "),
        ({"tools": [TOOL, TOOL]}, "tools: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"stop_sequences": ["a", ""]}, "stop_sequences.1: "),
        ({"temperature": 5.0}, "temperature: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type: "),
    ],
)
async def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    async with answering_with("the answer") as (http, cluster):
        for stream in (False, True):
            answer = await http.post(PATH, json=body(**{"stream": stream, **fields}))
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (answer.json()["type"], error["type"]) == ("error", "invalid_request_error")
            assert error["message"].startswith(message), error["message"]
        assert cluster.requests == []


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [(LinkClosed("gone"), 503, "overloaded_error"), (Overloaded("full", retry_after_s=1.0), 429, "rate_limit_error")],
)
async def test_failures_have_anthropic_s_types(failure: Exception, status: int, kind: str) -> None:
    async with serving(lambda _: [failure]) as (http, _):
        answer = await http.post(PATH, json=body(max_tokens=5))
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)


async def test_refusals_have_anthropic_s_types(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    key = {"x-api-key": "sk-right"}
    async with serving(api_keys_file=keys, max_request_bytes=5000) as (http, _):
        for answer, status, kind in (
            (await http.post(PATH, json=body()), 401, "authentication_error"),
            (await http.post(PATH, json=body(), headers={"x-api-key": "sk-wrong"}), 401, "authentication_error"),
            (await http.post(PATH, json=body(model="x"), headers=key), 404, "not_found_error"),
            (await http.post(COUNT, json={**body(model="x")}, headers=key), 404, "not_found_error"),
            (await http.post(f"{PATH}/batches", json={}), 404, "not_found_error"),
            (await http.post(PATH, json=body(system="a" * 6000), headers=key), 413, "request_too_large"),
            (await http.get(PATH), 405, "invalid_request_error"),
        ):
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
            assert set(answer.json()) == {"type", "error"}
            assert set(answer.json()["error"]) == {"type", "message"}
        assert "param" in (await http.post("/v1/messages_of_others", json={})).json()["error"]


async def test_a_failure_amid_a_stream_is_its_last_event() -> None:
    text_is_out = asyncio.Event()
    caller = Caller(answering(text_is_out, LinkClosed("the target went")))
    call = caller.start(body(max_tokens=50, stream=True), PATH)
    await caller.got_body.wait()
    text_is_out.set()
    await call
    *_, last = events_of(caller.body)
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    assert "the target went" in last["error"]["message"]
