"""Tools, items and hints of the Responses API, as Codex CLI and other agents send them."""

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from deploy.api.prompts import Messages, fitting
from deploy.api.responses import ResponsesRequest
from tests.support.api import MAX_MODEL_LEN, MODEL, fast_tokenizer, serving
from tests.unit.test_api_responses import serving as answering

# Recorded from Codex CLI 0.171, texts shortened.
CODEX: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/codex-0.171-turn-2.json").read_text("utf-8"))
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
NAMESPACE = {"type": "namespace", "name": "files", "description": "", "tools": [{**FUNCTION, "name": "read"}]}
CUSTOM = {"type": "custom", "name": "patch", "description": "Applies a patch.", "format": {"type": "text"}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: begin"}


def call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def post(text: str, body: dict[str, Any]) -> tuple[httpx.Response, str]:
    """The answer, and the prompt's text."""
    with answering(text) as (client, cluster):
        response = httpx.post(f"{client.base_url}responses", json=body)
        assert response.status_code == 200, response.text
        ids = list(cluster.requests[0].prompt_token_ids)
        return response, fast_tokenizer().decode(ids, skip_special_tokens=False)


def events_of(response: httpx.Response) -> list[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    blocks = filter(None, response.text.split("\n\n"))
    return [adapter.validate_python(json.loads(block.partition("\ndata: ")[2])) for block in blocks]


def test_a_recorded_call_of_codex_is_answered() -> None:
    response, prompt = post(call("multi_agent_v1__wait_agent", {"targets": ["a"]}), {**CODEX, "max_output_tokens": 200})
    *_, last = events_of(response)
    assert last.type == "response.completed"
    (item,) = last.response.output
    assert (item.type, item.name, item.namespace) == ("function_call", "wait_agent", "multi_agent_v1")
    assert json.loads(item.arguments) == {"targets": ["a"]}
    number = next(i for i, tool in enumerate(CODEX["tools"]) if tool["type"] == "web_search")
    ignored = f"fields without effect: reasoning.summary, tools.{number} (web_search)"
    assert response.headers["x-outrider-warning"] == ignored
    assert '"name": "multi_agent_v1__wait_agent"' in prompt
    assert "web_search" not in prompt
    assert prompt.count("<|start|>system") == 2  # those at the beginning are one message
    assert '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo hi"}}\n</tool_call>' in prompt
    assert "Process exited with code 0" in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n+é"}', "*** Begin\n+é"),
        ('{"input": "half: \\ud800"}', "half: ?"),
        ('{"text": "a"}', '{"text": "a"}'),
    ],
)
def test_a_custom_tool_is_called_with_a_text(stream: bool, arguments: str, text: str) -> None:
    body = {"input": "a", "tools": [{**CUSTOM, "format": GRAMMAR}], "max_output_tokens": 200, "stream": stream}
    response, prompt = post(f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>', body)
    assert "start: begin" in prompt
    if stream:
        events = events_of(response)
        kinds = [event.type for event in events]
        assert "response.custom_tool_call_input.done" in kinds
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == text
        (item,) = events[-1].response.output
    else:
        (item,) = Response.model_validate(response.json()).output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", text)


def test_what_agents_send_back_becomes_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "function_call", "call_id": "1", "name": "read", "namespace": "files", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "d"}]},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "e"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "f"},
        {"type": "local_shell_call", "id": "s", "call_id": "3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "function_call_output", "call_id": "3", "output": "g"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "h"}], "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "i", "annotations": [{"a": 1}]}],
        },
    ]
    fields = ResponsesRequest.model_validate({"instructions": "a", "input": items})
    assert list(fields.without_effect()) == ["input.2.encrypted_content", "input.3 (web_search_call)"]
    messages = fields.chat_fields()["messages"]
    assert messages[:2] == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    called = [(one["function"]["name"], one["function"]["arguments"]) for m in messages for one in m.get("tool_calls", ())]
    assert called == [
        ("files__read", "{}"),
        ("patch", '{"input": "e"}'),
        ("local_shell", '{"type": "exec", "command": ["ls"], "env": {}}'),
    ]
    assert [(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"] == [
        ("1", "d"),
        ("2", "f"),
        ("3", "g"),
    ]
    assert messages[-1] == {"role": "assistant", "content": "i", "reasoning_content": "h"}
    assert len(messages) == 9


@pytest.mark.parametrize(
    ("choice", "offered", "expected"),
    [
        ({"type": "function", "name": "files__read"}, 3, {"type": "function", "function": {"name": "files__read"}}),
        ({"type": "function", "name": "read"}, 3, {"type": "function", "function": {"name": "files__read"}}),
        ({"type": "custom", "name": "patch"}, 3, {"type": "function", "function": {"name": "patch"}}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, 1, "required"),
        ("required", 3, "required"),
    ],
)
def test_choices_of_tools(choice: Any, offered: int, expected: Any) -> None:
    tools = [FUNCTION, NAMESPACE, CUSTOM, {"type": "web_search", "external_web_access": False}]
    fields = ResponsesRequest.model_validate({"input": "a", "tools": tools, "tool_choice": choice}).chat_fields()
    assert (len(fields["tools"]), fields["tool_choice"]) == (offered, expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [FUNCTION, NAMESPACE], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        (
            {"tools": [NAMESPACE, {**NAMESPACE, "name": "other"}], "tool_choice": {"type": "function", "name": "read"}},
            "tool_choice.name",
        ),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
            },
            "tool_choice.tools",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools.0"),
        ({"tools": [NAMESPACE, {**FUNCTION, "name": "files__read"}]}, "tools"),
        ({"tools": [{**NAMESPACE, "tools": [{**FUNCTION, "name": "a b"}]}]}, "tools.0.tools.0.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "a"}]}, "input.0.input"),
        ({"truncation": "some"}, "truncation"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"background": True}, "background"),
    ],
)
async def test_impossible_tools_are_named(fields: dict[str, Any], param: str) -> None:
    async with serving() as (http, _):
        response = await http.post("/v1/responses", json={"input": "a", **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert response.json()["error"]["message"].startswith(f"{param}: ")


async def test_hints_of_the_responses_api_are_named() -> None:
    hints = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        "max_tool_calls": 2,
        "text": {"verbosity": "high"},
        "reasoning": {"summary": "auto", "effort": None},
    }
    silent = {
        "include": ["reasoning.encrypted_content"],
        "top_logprobs": 0,
        "text": {"verbosity": "medium"},
        "reasoning": {},
        "store": False,
        "parallel_tool_calls": True,
        "prompt_cache_key": "a",
        "client_metadata": {"a": "b"},
        "truncation": "disabled",
    }
    async with serving() as (http, _):
        response = await http.post("/v1/responses", json={"input": "a", **hints})
        assert response.status_code == 200, response.text
        kind, _, named = response.headers["x-outrider-warning"].partition(": ")
        assert kind == "fields without effect"
        assert set(named.split(", ")) == {"include", "top_logprobs", "max_tool_calls", "text.verbosity", "reasoning.summary"}
        assert "x-outrider-warning" not in (await http.post("/v1/responses", json={"input": "a", **silent})).headers


async def test_the_oldest_messages_give_way_where_the_caller_allows_it() -> None:
    items = [{"role": "system", "content": "rules"}]
    items += [{"role": ("user", "assistant")[i % 2], "content": f"{i} {'word ' * 10}"} for i in range(21)]
    async with serving() as (http, cluster):
        refused = await http.post("/v1/responses", json={"input": items})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        for most in (None, 30):
            body = {"input": items, "truncation": "auto", "max_output_tokens": most}
            response = await http.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            ids = cluster.requests[-1].prompt_token_ids
            assert len(ids) + (most or 1) <= MAX_MODEL_LEN
            text = fast_tokenizer().decode(list(ids), skip_special_tokens=False)
            assert text.startswith("<|start|>system\nrules<|end|>\n<|start|>")
            assert "20 word" in text
            assert "\n0 word" not in text
        too_long = {"input": [{"role": "user", "content": "word " * 400}], "truncation": "auto"}
        assert (await http.post("/v1/responses", json=too_long)).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("most", range(2, 12))
async def test_as_many_messages_are_kept_as_fit(most: int) -> None:
    roles = ["system", "user", "assistant", "tool", "tool", "user", "assistant", "tool", "user"]
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    asked = 0

    async def fits(some: Any) -> bool:
        nonlocal asked
        asked += 1
        return len(some) <= most

    kept = [int(message["content"]) for message in await fitting(messages, fits)]
    assert kept[0] == 0
    assert kept[1:] == list(range(kept[1], len(messages)))
    assert roles[kept[1]] != "tool"
    longer = [start for start in range(1, kept[1]) if roles[start] != "tool"]
    assert all(len(messages) - start + 1 > most for start in longer)
    assert asked <= 4


def test_models_are_named_in_the_answer() -> None:
    response, _ = post("the answer", {"input": "a"})
    assert response.json()["model"] == MODEL


async def test_the_conversations_that_are_tried_are_not_kept() -> None:
    """4096 messages have 8 million in their suffixes."""
    messages = [{"role": "user", "content": "a"}] * 4096

    async def fits(tried: Messages) -> bool:
        return len(tried) <= 10

    tracemalloc.start()
    kept = await fitting(messages, fits)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == 10
    assert peak < 2**20
