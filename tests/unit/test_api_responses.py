"""The Responses API over a scripted cluster, read by the official client."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.errors import LinkClosed
from deploy.api.responses import ResponsesRequest
from tests.support.api import (
    CHAT_TEMPLATE,
    MODEL,
    app_of,
    client_of,
    fast_tokenizer,
    listening,
    model_info,
    saying,
    tokenizer,
)
from tests.support.asgi import Caller, answering
from tests.support.scripted import ScriptedClient

TOOL: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALLED = 'Let me see. <tool_call>{"name": "get_weather", "arguments": {"city": "東京"}}</tool_call>'


@contextmanager
def serving(text: str, template: str = CHAT_TEMPLATE) -> Iterator[tuple[OpenAI, ScriptedClient]]:
    cluster = ScriptedClient(model_info(16384), saying(text))
    app = app_of(cluster, tokenizer(template))
    with listening(app) as address, OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        yield client, cluster


def test_an_answer_and_its_stream_are_the_same() -> None:
    with serving(CALLED) as (client, _):
        asked: Any = {"model": MODEL, "input": "what is it?", "tools": [TOOL], "max_output_tokens": 200}
        whole = client.responses.create(**asked, instructions="be brief", store=True)
        message, call = whole.output
        assert isinstance(message, ResponseOutputMessage)
        assert isinstance(call, ResponseFunctionToolCall)
        assert (whole.output_text, call.name, json.loads(call.arguments)) == ("Let me see.", "get_weather", {"city": "東京"})
        assert (whole.status, whole.store, whole.instructions) == ("completed", False, "be brief")
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            last = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [kind for i, kind in enumerate(e.type for e in events) if i == 0 or kind != events[i - 1].type]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert last.output_text == whole.output_text
        (streamed,) = [item for item in last.output if item.type == "function_call"]
        assert (streamed.name, streamed.arguments, streamed.status) == (call.name, call.arguments, "completed")


@pytest.mark.parametrize("max_tokens", [200, 60, 2])
async def test_each_event_has_the_fields_that_the_client_s_types_ask_for(max_tokens: int) -> None:
    text = f"<think>why</think>{CALLED}"
    app = app_of(ScriptedClient(model_info(4096), saying(text)), tokenizer(CHAT_TEMPLATE + "{# </think> #}"))
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    async with client_of(app) as http:
        body = {"model": MODEL, "input": "a", "tools": [TOOL], "max_output_tokens": max_tokens}
        Response.model_validate((await http.post("/v1/responses", json=body)).json())
        stream = (await http.post("/v1/responses", json={**body, "stream": True})).text
    for block in filter(None, stream.split("\n\n")):
        name, _, data = block.removeprefix("event: ").partition("\ndata: ")
        event = event_type.validate_python(json.loads(data))
        assert event.type == name


def test_reasoning_is_an_item() -> None:
    with serving("<think>why</think>the answer", CHAT_TEMPLATE + "{# </think> #}") as (client, _):
        response = client.responses.create(model=MODEL, input="what is it?", max_output_tokens=100)
        reasoning, message = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert (reasoning.content[0].text, response.output_text) == ("why", "the answer")
        assert message.type == "message"
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        with client.responses.stream(model=MODEL, input="what is it?", max_output_tokens=100) as stream:
            events = list(stream)
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "why"


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    with serving("the answer is long") as (client, _):
        response = client.responses.create(model=MODEL, input="a", max_output_tokens=2)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        with client.responses.stream(model=MODEL, input="a", max_output_tokens=2) as stream:
            *_, last = stream
        assert last.type == "response.incomplete"


def test_what_is_complete_before_a_cut_is_complete() -> None:
    with serving(CALLED) as (client, _):
        asked: Any = {"model": MODEL, "input": "a", "tools": [TOOL], "max_output_tokens": 60}
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            *_, last = stream
        assert last.type == "response.incomplete"
        for response in (whole, last.response):
            statuses = [(item.type, getattr(item, "status", None)) for item in response.output]
            assert statuses == [("message", "completed"), ("function_call", "incomplete")]


async def test_a_failure_amid_a_stream_is_told_by_both_events() -> None:
    text_is_out = asyncio.Event()
    caller = Caller(answering(text_is_out, LinkClosed("the target went")))
    call = caller.start({"model": MODEL, "input": "a", "stream": True}, "/v1/responses")
    await caller.got_body.wait()
    text_is_out.set()
    await call
    events = [json.loads(block.partition("data: ")[2]) for block in caller.body.split("\n\n") if block]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    *before, error, failed = events
    assert before[0]["type"] == "response.created"
    assert (error["type"], error["code"]) == ("error", "no_target")
    assert failed["type"] == "response.failed"
    response = Response.model_validate(failed["response"])
    assert response.status == "failed"
    assert response.error is not None
    assert "the target went" in response.error.message
    assert [item["status"] for item in failed["response"]["output"]] == ["incomplete"]


def test_a_conversation_goes_on_with_the_items_of_its_answers() -> None:
    with serving(CALLED) as (client, cluster):
        first = client.responses.create(model=MODEL, input="what is it?", tools=[TOOL], max_output_tokens=200)
        items: list[Any] = [{"role": "user", "content": "what is it?"}, *(item.model_dump() for item in first.output)]
        (call,) = [item for item in first.output if item.type == "function_call"]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        second: Response = client.responses.create(model=MODEL, input=items, max_output_tokens=200)
        assert second.output_text == CALLED  # without tools, it is text
        text = fast_tokenizer().decode(list(cluster.requests[1].prompt_token_ids), skip_special_tokens=False)
    assert text == (
        "<|start|>user\nwhat is it?<|end|>\n"
        '<|start|>assistant\nLet me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京"}}\n</tool_call>'
        "<|end|>\n<|start|>user\n<tool_response>\nsunny\n</tool_response><|end|>\n<|start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 20_000}, "max_output_tokens"),
        ({"input": "word " * 20_000}, "input"),
        ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "a b", "arguments": ""}]}, "input.0.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"enum": ["a" * 70_000]}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),  # of a tokenizer without a folder
        ({"temperature": 5.0}, "temperature"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with serving("the answer") as (client, _):
        body = {"model": MODEL, "input": "a", **fields}
        response = httpx.post(f"{client.base_url}responses", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert response.json()["error"]["message"].startswith(f"{param}: ")


def test_formats_of_text_become_response_formats() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    fields = ResponsesRequest.model_validate({"model": MODEL, "input": "a", "text": {"format": form}})
    assert fields.chat_fields()["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ('"tools": [{"type": "function", "name": "f", "parameters": {"default": 1e999}}]', "tools.0.parameters"),
        ('"text": {"format": {"type": "json_schema", "schema": {"maximum": 1e999}}}', "text.format.schema"),
    ],
)
def test_numbers_that_no_answer_can_repeat_are_refused(field: str, param: str) -> None:
    with serving("the answer") as (client, _):
        body = f'{{"model": "{MODEL}", "input": "a", {field}}}'
        response = httpx.post(f"{client.base_url}responses", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_embeddings_are_refused_clearly() -> None:
    with serving("the answer") as (client, _), pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model=MODEL, input="a")
