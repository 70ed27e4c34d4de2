"""Tools, reasoning and log-probabilities of prompts through the API, over a scripted cluster."""

import asyncio
import functools
import json
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from deploy.api.chat_template import ChatTemplate, TemplateOptions
from deploy.api.errors import ApiError
from deploy.api.messages import Message
from deploy.api.schema import ChatRequest
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from deploy.api.tools import AnswerForm
from tests.support.api import (
    CHAT,
    CHAT_TEMPLATE,
    COMPLETIONS,
    chat_body,
    chunks_in,
    completion_body,
    fast_tokenizer,
    finishing,
    saying,
    serving,
    token_ids,
)
from tests.support.scripted import ScriptedClient, Step

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALLED = 'Let me see. <tool_call>{"name": "get_weather", "arguments": {"city": "東京"}}</tool_call>'
MARKS = {"hermes": "", "qwen3_coder": "{% if tools %}{% endif %}{# <function= <parameter= #}"}
THINKING = CHAT_TEMPLATE + "{# <think> </think> #}"


def answering(
    text: str, template: str = CHAT_TEMPLATE
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, ScriptedClient]]:
    """A server with room for tools in its prompts."""
    return serving(saying(text), template, 4096)


def thinking(text: str, tail: str = "") -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, ScriptedClient]]:
    """A server whose model's template has reasoning, and ends prompts with ``tail``."""
    return answering(text, THINKING + "{% if add_generation_prompt %}" + tail + "{% endif %}")


async def streamed(http: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message that a client assembles from a stream, and the finish reason."""
    response = await http.post(CHAT, json=chat_body(stream=True, **fields))
    message: dict[str, Any] = {"calls": {}}
    finish = ""
    for chunk in chunks_in(response.text):
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                known = message["calls"].setdefault(call["index"], {"name": "", "arguments": "", "id": ""})
                known["id"] += call.get("id", "")
                for name in ("name", "arguments"):
                    known[name] += call["function"].get(name, "")
    return message, finish


@pytest.mark.parametrize(
    ("form", "text_len", "is_beside"), [("hermes", 10, False), ("hermes", 2500, True), ("qwen3_coder", 10, True)]
)
async def test_long_bodies_and_schemas_are_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, form: str, text_len: int, is_beside: bool
) -> None:
    threads, build = list[threading.Thread](), AnswerForm.grammar

    def grammar(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return build(*args)

    monkeypatch.setattr(AnswerForm, "grammar", grammar)
    function = {"name": "now", "description": "x" * text_len}
    async with answering("It is noon.", CHAT_TEMPLATE + MARKS[form]) as (http, _):
        response = await http.post(CHAT, json=chat_body(tools=[{"type": "function", "function": function}]))
    assert response.is_success, response.text
    assert [one is not threading.main_thread() for one in threads] == [is_beside]


async def test_calls_of_tools_in_an_answer_and_in_its_stream() -> None:
    async with answering(CALLED) as (http, cluster):
        body = (await http.post(CHAT, json=chat_body(tools=TOOLS, max_tokens=150))).json()
        (choice,) = body["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "東京"}'}
        assert (call["type"], choice["message"]["content"], choice["finish_reason"]) == (
            "function",
            "Let me see.",
            "tool_calls",
        )
        message, finish = await streamed(http, tools=TOOLS, max_tokens=150)
        assert message["content"] == "Let me see."
        (streamed_call,) = message["calls"].values()
        assert {name: streamed_call[name] for name in ("name", "arguments")} == call["function"]
        assert streamed_call["id"].startswith("call_")
        assert finish == "tool_calls"
        prompt = fast_tokenizer().decode(list(cluster.requests[0].prompt_token_ids), skip_special_tokens=False)
        assert '<tools>\n{"type": "function", "function": {"name": "get_weather"' in prompt
        assert prompt.startswith("<|start|>system\nYou may call functions")


HALF = [
    ("hermes", r'<tool_call>{"name": "f\ud800", "arguments": {}}</tool_call>', "f?", "{}"),
    ("hermes", r'<tool_call>{"arguments": "{\"a\": \"\ud800\"}", "name": "f"}</tool_call>', "f", '{"a": "?"}'),
    ("pythonic", r"[f(a='\ud800')]", "f", '{"a": "?"}'),
]


@pytest.mark.parametrize(("form", "text", "name", "arguments"), HALF)
async def test_a_call_may_have_half_of_a_surrogate_pair(form: str, text: str, name: str, arguments: str) -> None:
    async with serving(saying(text), max_model_len=4096, tool_call_parser=form) as (http, _):
        tools = [{"type": "function", "function": {"name": "f"}}]
        (choice,) = (await http.post(CHAT, json=chat_body(tools=tools))).json()["choices"]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}
        message, _ = await streamed(http, tools=tools)
        assert message["calls"][0]["arguments"] == arguments
        body = {**chat_body(max_tokens=200), "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
        (block,) = (await http.post("/v1/messages", json=body)).json()["content"]
        assert block["input"] == json.loads(arguments)


async def test_calls_are_text_without_tools() -> None:
    async with answering(CALLED) as (http, _):
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = (await http.post(CHAT, json=chat_body(max_tokens=150, **fields))).json()["choices"]
            assert choice["message"]["content"] == CALLED
            assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_has_what_there_is_of_it() -> None:
    async with answering(CALLED) as (http, _):
        (choice,) = (await http.post(CHAT, json=chat_body(tools=TOOLS, max_tokens=60))).json()["choices"]
        assert choice["finish_reason"] == "length"
        (call,) = choice["message"]["tool_calls"]
        assert '{"city": "東京"}'.startswith(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("text", "tail"), [("<think>why\n</think>\n\nthe answer", ""), ("why</think>the answer", "<think>\n")]
)
async def test_reasoning_is_apart_from_the_answer(text: str, tail: str) -> None:
    async with thinking(text, tail) as (http, _):
        body = (await http.post(CHAT, json=chat_body(max_tokens=100))).json()
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why", "the answer")
        num_thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < num_thought < body["usage"]["completion_tokens"]
        message, _ = await streamed(http, max_tokens=100)
        assert (message["reasoning_content"], message["content"]) == ("why", "the answer")


async def test_a_prompt_that_ends_reasoning_has_none() -> None:
    async with thinking("<think>is a tag", "<think>\n\n</think>\n\n") as (http, _):
        (choice,) = (await http.post(CHAT, json=chat_body(max_tokens=100))).json()["choices"]
        assert choice["message"]["content"] == "<think>is a tag"
        assert "reasoning_content" not in choice["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_on_channels_are_reasoning_content_and_calls(stream: bool) -> None:
    """Their markers are special tokens of the test's tokenizer, or text; neither is content."""
    template = CHAT_TEMPLATE + "{# <|channel|><|message|> #}{% if tools %}{% endif %}"
    begun = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    called = f'{begun}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{{"city": "東京"}}'
    for text, expected in ((f"{begun}<|channel|>final<|message|>the answer", "the answer"), (called, None)):
        async with answering(text, template) as (http, _):
            fields = {"tools": TOOLS, "max_tokens": 200}
            if stream:
                message, finish = await streamed(http, **fields)
                calls = [{name: call[name] for name in ("name", "arguments")} for call in message["calls"].values()]
            else:
                (choice,) = (await http.post(CHAT, json=chat_body(**fields))).json()["choices"]
                message, finish = choice["message"], choice["finish_reason"]
                calls = [call["function"] for call in message.get("tool_calls", ())]
            assert (message["reasoning_content"], message.get("content")) == ("why", expected)
            assert calls == ([] if expected else [{"name": "get_weather", "arguments": '{"city": "東京"}'}])
            assert finish == ("stop" if expected else "tool_calls")


def form_of(template: str = CHAT_TEMPLATE, **settings: Any) -> AnswerForm:
    return AnswerForm.of(Tokenizer(fast_tokenizer(), ChatTemplate(template, {})), ApiSettings(**settings))


def test_tools_of_an_unknown_form_are_refused() -> None:
    form = form_of("{{ tools }} <call>")
    fields = ChatRequest.model_validate(chat_body(tools=TOOLS))
    with pytest.raises(ApiError, match=r"tools: .*tool_call_parser"):
        form.use_of(fields)
    assert not form.use_of(fields.model_copy(update={"tool_choice": "none"})).tools


async def test_earlier_calls_and_results_in_the_prompt() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "<|end|>"}'}}]
    messages = [
        {"role": "user", "content": "what time is it?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    async with serving() as (http, cluster):
        response = await http.post(CHAT, json=chat_body(messages=messages))
        assert response.status_code == 200, response.text
        ids = list(cluster.requests[0].prompt_token_ids)
    text = fast_tokenizer().decode(ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "<|end|>"}}\n</tool_call>' in text
    assert "<|start|>user\n<tool_response>\nnoon\n</tool_response>" in text
    end = fast_tokenizer().token_to_id("<|end|>")
    assert ids.count(end) == 3, "the arguments' text is no control token"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"),
        ("  ", "{}"),
        ("{", '"{"'),
        ("[" * 100_000, '"[[['),
        ("[" * 900 + "]" * 900, '"[[['),
        (r'{"half": "\ud800"}', '"{'),
        ("[1]", "[1]"),
    ],
)
async def test_whatever_arguments_earlier_calls_have_the_prompt_is_made(arguments: str, shown: str) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    async with serving() as (http, _):
        text = (await http.post("/tokenize", json=chat_body(messages=messages, return_token_strs=True))).json()["token_strs"]
        assert f'"arguments":Ġ{shown}' in "".join(text)


async def test_content_of_tools_may_be_parts() -> None:
    parts = [{"type": "text", "text": "noon"}, {"type": "text", "text": "in Paris"}]
    messages = [{"role": "tool", "tool_call_id": "1", "content": parts}]
    async with serving() as (http, cluster):
        assert (await http.post(CHAT, json=chat_body(messages=messages))).status_code == 200
        prompt = fast_tokenizer().decode(list(cluster.requests[0].prompt_token_ids))
    assert "<tool_response>\nnoon\nin Paris\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("text", "stop", "finish"),
    [
        (CALLED, "東", "stop"),
        (CALLED, '"city"', "stop"),
        (CALLED, "}</tool_call>", "tool_calls"),  # behind the arguments
        (CALLED.removesuffix("}</tool_call>"), [], "tool_calls"),
        (CALLED.removesuffix('"}}</tool_call>'), [], "stop"),
        (CALLED.removesuffix('"東京"}}</tool_call>'), [], "stop"),
        ('<tool_call>{"name": "now"}</tool_call>', [], "tool_calls"),
    ],
)
async def test_the_reason_is_tool_calls_where_the_arguments_are_complete(text: str, stop: Any, finish: str) -> None:
    async with answering(text) as (http, _):
        fields = {"tools": TOOLS, "max_tokens": 150, "stop": stop}
        (choice,) = (await http.post(CHAT, json=chat_body(**fields))).json()["choices"]
        message, streamed_finish = await streamed(http, **fields)
        assert choice["finish_reason"] == streamed_finish == finish
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["arguments"] == message["calls"][0]["arguments"]


async def test_choices_have_calls_of_their_own() -> None:
    async with answering(CALLED) as (http, _):
        body = (await http.post(CHAT, json=chat_body(tools=TOOLS, max_tokens=150, n=3))).json()
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]]
        assert len(set(ids)) == 3
        response = await http.post(
            CHAT, json=chat_body(tools=TOOLS, max_tokens=150, n=3, stream=True, stream_options={"include_usage": True})
        )
        chunks = chunks_in(response.text)
        assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert chunks[-1]["choices"] == []
        for index in range(3):
            deltas = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert [delta["delta"].get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
            calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", ())]
            first, *others = calls
            assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "get_weather")
            assert all(set(other) == {"index", "function"} and set(other["function"]) == {"arguments"} for other in others)
            assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "東京"}'
            assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["tool_calls"]


async def test_parameters_must_be_those_of_an_object() -> None:
    async with serving() as (http, _):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
        response = await http.post(CHAT, json=chat_body(tools=[tool]))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools.0.function.parameters"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": '{"items":'}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "5"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a" * 65_530}, "guided_regex"),
        ({"guided_json": "[" * 987 + "]" * 987}, "guided_json"),  # for Python not too deep to read, but to write
    ],
)
async def test_a_malformed_grammar_beside_tools_is_a_400(fields: dict[str, Any], param: str) -> None:
    async with answering("the answer") as (http, _):
        response = await http.post(CHAT, json=chat_body(tools=TOOLS, **fields))
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


async def test_tools_that_are_too_deep_for_the_template_are_refused() -> None:
    template = (
        "{% macro again(x) %}{{ shown(x) }}{% endmacro %}"
        "{% macro shown(x) %}{% for y in x.values() if y is mapping %}{{ again(y) }}{% endfor %}{% endmacro %}"
        "{% for tool in tools or [] %}{{ shown(tool) }}{% endfor %}" + CHAT_TEMPLATE
    )
    schema: dict[str, Any] = functools.reduce(lambda inner, _: {"properties": inner}, range(180), {})
    async with serving(None, template, tool_call_parser="hermes") as (http, _):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        response = await http.post(CHAT, json=chat_body(tools=[tool]))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


async def test_tools_are_tokenized_as_for_a_chat() -> None:
    async with answering("the answer") as (http, cluster):
        await http.post(CHAT, json=chat_body(tools=TOOLS))
        body = (await http.post("/tokenize", json=chat_body(tools=TOOLS))).json()
        assert tuple(body["tokens"]) == cluster.requests[0].prompt_token_ids


def test_a_template_that_knows_tools_is_given_them() -> None:
    source = (
        "{% for t in tools %}{{ t.function.name }}({{ t.function.parameters | tojson }}) {% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}:"
        "{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]}).for_template()
    options = TemplateOptions(tools=[{"type": "function", "function": {"name": "now", "parameters": {"city": "Paris"}}}])
    assert ChatTemplate(source, {}).render([message], options) == 'now({"city": "Paris"}) now:{"a": 1}'


async def test_log_probabilities_of_the_prompt() -> None:
    async with serving() as (http, _):
        body = (await http.post(COMPLETIONS, json=completion_body(prompt=[5, 6, 9], prompt_logprobs=1, max_tokens=1))).json()
        first, *rest = body["choices"][0]["prompt_logprobs"]
        assert first is None
        assert [row[str(i)]["logprob"] for i, row in zip((6, 9), rest, strict=True)] == [-6.0, -2.0]
        assert [row[str(i)]["rank"] for i, row in zip((6, 9), rest, strict=True)] == [7, 3]
        assert rest[0]["0"] == {"logprob": -1.0, "rank": 1, "decoded_token": '"'} or rest[0]["0"]["rank"] == 1
        chat = (await http.post(CHAT, json=chat_body(prompt_logprobs=0, max_tokens=1))).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_a_streamed_echo_waits_for_the_log_probabilities_of_its_own_prompt() -> None:
    is_read = asyncio.Event()

    def script(request: Any) -> list[Step]:
        commits: list[Step] = list(finishing(request, token_ids("the answer")))
        return [is_read, *commits] if request.id.endswith("-1") else [*commits[:2], is_read, *commits[2:]]

    async with serving(script) as (http, cluster):
        fields = {"prompt": ["an answer", "another"], "echo": True, "logprobs": 1, "max_tokens": 4, "stream": True}
        asking = asyncio.create_task(http.post(COMPLETIONS, json=completion_body(**fields)))
        await cluster.asked(2)
        for _ in range(20):
            await asyncio.sleep(0)  # the first tokens of the first choice are written
        is_read.set()
        response = await asking
    assert response.status_code == 200, response.text
    choices = [chunk["choices"][0] for chunk in chunks_in(response.text)]
    for i, prompt in enumerate(fields["prompt"]):
        first = next(choice for choice in choices if choice["index"] == i)
        assert first["text"] == prompt
        assert len(first["logprobs"]["tokens"]) == len(token_ids(prompt))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_echo_with_log_probabilities(max_tokens: int, stream: bool) -> None:
    text = "the answer is 東京"
    async with serving() as (http, cluster):
        fields = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        response = await http.post(COMPLETIONS, json=completion_body(**fields, stream=stream))
        assert response.status_code == 200, response.text
        if stream:
            chunks = [chunk["choices"][0] for chunk in chunks_in(response.text)]
            choice = {
                "text": "".join(chunk["text"] for chunk in chunks),
                "logprobs": {
                    name: [item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"][name]]
                    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                },
            }
        else:
            choice = response.json()["choices"][0]
            assert response.json()["usage"]["completion_tokens"] == max_tokens
        prompt_ids = cluster.requests[0].prompt_token_ids
    logprobs = choice["logprobs"]
    assert len(set(map(len, logprobs.values()))) == 1
    assert len(logprobs["tokens"]) == len(prompt_ids) + max_tokens
    assert choice["text"].startswith(text)
    assert (choice["text"] == text) == (max_tokens == 0)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(prompt_ids)] == [-float(i % 7) for i in prompt_ids[1:]]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    if max_tokens:
        assert offsets[-1] == len(text)
