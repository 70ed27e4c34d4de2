"""Anthropic's package over a running server.

See test_langchain.py for what this needs."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("anthropic", reason="anthropic is not installed")

import anthropic

URL = os.environ.get("OUTRIDER_URL")
KEY = os.environ.get("OUTRIDER_API_KEY", "unused")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

pytestmark = pytest.mark.skipif(URL is None, reason="OUTRIDER_URL names no server")

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}
QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}
GREEDY = {"temperature": 0}


@pytest.fixture
def client() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 32, "messages": [QUESTION], "extra_body": GREEDY, **fields}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_an_answer_and_its_stream(client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(**ask(system=system))
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert "Paris" in text_of(whole)
    with client.messages.stream(**ask(system=system)) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model=MODEL, messages=[QUESTION], system=system)
    for message in (whole, last):
        assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_and_a_limit_end_an_answer(client: anthropic.Anthropic) -> None:
    plain = text_of(client.messages.create(**ask()))
    stop = plain[len(plain) // 2 :][:4]
    stopped = client.messages.create(**ask(stop_sequences=[stop]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == plain[: plain.index(stop)]
    assert client.messages.create(**ask(max_tokens=2)).stop_reason == "max_tokens"


def test_a_tool_is_called_and_its_result_is_read(client: anthropic.Anthropic) -> None:
    tools = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    with client.messages.stream(**ask(**tools)) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert call.input in ({"city": "Paris"}, {"city": "Rome"})
    assert client.messages.create(**ask(**tools)).content[0].input == call.input  # type: ignore[union-attr]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert text_of(client.messages.create(**ask(messages=messages, tools=[TOOL])))


def test_a_format_of_the_output_is_enforced(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"]}
    answer = client.messages.create(**ask(output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert text_of(answer) in ('{"capital": "Paris"}', '{"capital": "Rome"}')


def test_what_agents_send_beside_it_is_ignored(client: anthropic.Anthropic) -> None:
    fields = ask(
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        thinking={"type": "adaptive"},
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
        metadata={"user_id": "user_1"},
    )
    answer = client.beta.messages.with_raw_response.create(**fields)
    assert "tools.0 (web_search_20250305)" in answer.headers["x-outrider-warning"]
    assert text_of(answer.parse())


def test_errors_have_the_package_s_classes(client: anthropic.Anthropic) -> None:
    image: Any = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.example/b"}}]}
    with pytest.raises(anthropic.BadRequestError, match="blocks of type image"):
        client.messages.create(**ask(messages=[image]))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**ask(messages=[{"role": "user", "content": "word " * 100_000}]))
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**ask(model="claude"))
