"""Tools on a real server, by the official client: a loop of calls and results, whole and streamed."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage

from benchmarks.server import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.model]

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]
RESULTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "get_weather": lambda arguments: f"It is sunny in {arguments['city']}, 20 degrees {arguments['unit']}.",
    "add": lambda arguments: str(arguments["a"] + arguments["b"]),
}
TURNS: Any = [
    ("What is the weather in Paris?", "required"),
    ("Now add 20 and 22.", {"type": "function", "function": {"name": "add"}}),
    ("What is the result?", "none"),
]


def answer(client: OpenAI, messages: list[Any], stream: bool, **fields: Any) -> ChatCompletionMessage:
    asked: Any = {
        "model": "smollm2-135m",
        "messages": messages,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 120,
        **fields,
    }
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as events:
        for _ in events:
            continue
        message = events.get_final_completion().choices[0].message
    return ChatCompletionMessage.model_validate(message.model_dump())


def played(client: OpenAI, stream: bool, **fields: Any) -> list[Any]:
    """The conversation of three turns, two of which call a tool."""
    messages: list[Any] = []
    for question, tool_choice in TURNS:
        messages.append({"role": "user", "content": question})
        message = answer(client, messages, stream, tool_choice=tool_choice, **fields)
        calls = message.tool_calls or []
        assert bool(calls) == (tool_choice != "none")
        sent = [_call(call) for call in calls]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": sent or None})
        for call in calls:
            assert call.type == "function"
            result = RESULTS[call.function.name](json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages


def _call(call: Any) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def told(messages: list[Any]) -> list[Any]:
    """Without the ids of calls, which differ. A stream begins with empty content."""
    return [(m["role"], m["content"] or "", [call["function"] for call in m.get("tool_calls") or ()]) for m in messages]


def test_a_loop_of_tools_over_three_turns(server: ServerProcess) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        whole = played(client, stream=False)
        calls = [call["function"]["name"] for message in whole for call in message.get("tool_calls") or ()]
        assert len(calls) == 2
        assert calls[1] == "add"
        assert whole[-1]["content"]
        assert told(played(client, stream=True)) == told(whole)
        assert told(played(client, stream=False, extra_body={"drafting": "off"})) == told(whole)
