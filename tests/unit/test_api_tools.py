"""Tools, reasoning and log-probabilities of prompts through the API, over a scripted cluster."""

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import xgrammar

from cluster.grammar import Grammar, GrammarKind
from deploy.api.answer_parts import CallStart
from deploy.api.app import create_app
from deploy.api.chat_template import ChatTemplate, TemplateOptions
from deploy.api.errors import ApiError
from deploy.api.messages import Message
from deploy.api.schema import ChatRequest
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from deploy.api.tools import AnswerForm
from tests.support.api import CHAT_TEMPLATE, chat_body, completion_body, events, fast_tokenizer, model_info, saying, serving
from tests.support.scripted import ScriptedClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
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
THINKING = CHAT_TEMPLATE + "{# <think> </think> #}"


@asynccontextmanager
async def answering(text: str, template: str = CHAT_TEMPLATE) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedClient]]:
    """A server with room for tools in its prompts."""
    words = Tokenizer(fast_tokenizer(), ChatTemplate(template, {}))
    cluster = ScriptedClient(replace(model_info(), max_model_len=4096), saying(text))
    app = create_app(cluster, words, ApiSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
        yield http, cluster


def thinking(text: str, tail: str = "") -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, ScriptedClient]]:
    """A server whose model's template has reasoning, and ends prompts with ``tail``."""
    return answering(text, THINKING + "{% if add_generation_prompt %}" + tail + "{% endif %}")


async def streamed(http: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message that a client assembles from a stream, and the finish reason."""
    response = await http.post(CHAT, json=chat_body(stream=True, **fields))
    message: dict[str, Any] = {"calls": {}}
    finish = ""
    for data in events(response.text):
        if data == "[DONE]":
            continue
        for choice in json.loads(data)["choices"]:
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


def form_of(template: str = CHAT_TEMPLATE, **settings: Any) -> AnswerForm:
    return AnswerForm.of(Tokenizer(fast_tokenizer(), ChatTemplate(template, {})), ApiSettings(**settings))


TEMPLATES = {
    "hermes": "{{ tools }} <tool_call>",
    "mistral": "{{ tools }} [TOOL_CALLS]",
    "llama3_json": '{{ tools }} {"name": function name, "parameters": ...}',
    None: "{{ tools }} <tool_call><function=name>",
}


@pytest.mark.parametrize("calls", TEMPLATES)
def test_the_form_of_calls_is_the_template_s(calls: str | None) -> None:
    assert form_of(TEMPLATES[calls]).calls == calls
    assert form_of(TEMPLATES[calls], tool_call_parser="mistral").calls == "mistral"


def test_tools_of_an_unknown_form_are_refused() -> None:
    form = form_of(TEMPLATES[None])
    fields = ChatRequest.model_validate(chat_body(tools=TOOLS))
    with pytest.raises(ApiError, match=r"tools: .*tool_call_parser"):
        form.use_of(fields)
    assert not form.use_of(fields.model_copy(update={"tool_choice": "none"})).tools


def accepts(asked: tuple[str, Grammar] | None, text: str) -> bool:
    """Whether the grammar takes all of the text, and an end after it."""
    assert asked is not None
    _, grammar = asked
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    vocabulary = [bytes([i]) for i in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(grammar.source)
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(256)


PARIS, NOW = {"city": "Paris"}, {}
FORMS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "%s", "arguments": %s}]',
}


@pytest.mark.parametrize("calls", FORMS)
def test_forced_calls_match_the_tools_schemas_and_are_parsed(calls: str) -> None:
    form = form_of(tool_call_parser=calls)

    def grammar(**fields: Any) -> tuple[str, Grammar] | None:
        asked = ChatRequest.model_validate(chat_body(tools=TOOLS, **fields))
        return form.grammar(form.use_of(asked), "answer", None)

    weather = FORMS[calls] % ("get_weather", json.dumps(PARIS))
    now = FORMS[calls] % ("now", "{}")
    named = {"type": "function", "function": {"name": "now"}}
    assert accepts(grammar(tool_choice="required"), weather)
    assert accepts(grammar(tool_choice="required"), now)
    assert not accepts(grammar(tool_choice="required"), "")
    assert not accepts(grammar(tool_choice="required"), f"Well. {weather}")
    assert not accepts(grammar(tool_choice="required"), FORMS[calls] % ("get_weather", "{}"))
    assert not accepts(grammar(tool_choice="required"), FORMS[calls] % ("other", "{}"))
    assert accepts(grammar(tool_choice=named), now)
    assert not accepts(grammar(tool_choice=named), weather)
    two = {"hermes": f"{weather}\n{now}", "llama3_json": f"{weather}; {now}", "mistral": f"{weather[:-1]}, {now[14:]}"}[
        calls
    ]
    assert accepts(grammar(tool_choice="required", parallel_tool_calls=True), two)
    assert not accepts(grammar(tool_choice="required", parallel_tool_calls=False), two)
    assert not accepts(grammar(tool_choice="required"), two)
    assert grammar() is None
    assert grammar(tool_choice="none") is None
    new_parser = form.new_parser(form.use_of(ChatRequest.model_validate(chat_body(tools=TOOLS))), "answer")
    assert new_parser is not None
    parser = new_parser()
    names = [part.name for part in [*parser.feed(two), *parser.end()] if isinstance(part, CallStart)]
    assert names == ["get_weather", "now"]


def test_a_strict_function_s_arguments_match_where_the_model_chooses() -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
    form = form_of()
    use = form.use_of(ChatRequest.model_validate(chat_body(tools=tools)))
    grammar = form.grammar(use, "answer", None)
    weather, wrong = (FORMS["hermes"] % ("get_weather", json.dumps(arguments)) for arguments in (PARIS, {"town": "x"}))
    assert accepts(grammar, "Just text.")
    assert accepts(grammar, f"Let me see.\n{weather}\n{weather}")
    assert accepts(grammar, FORMS["hermes"] % ("now", '{"any": 1}'))
    assert not accepts(grammar, f"Let me see.\n{wrong}")


@pytest.mark.parametrize(
    "asked",
    [
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PARAMETERS)),
        Grammar(GrammarKind.JSON_OBJECT),
        Grammar(GrammarKind.REGEX, r'\{"city": "[A-Z][a-z]+"\}'),
        Grammar(GrammarKind.EBNF, 'root ::= "{" [^}]+ "}"'),
    ],
    ids=lambda grammar: str(grammar.kind),
)
def test_a_grammar_begins_after_the_reasoning(asked: Grammar) -> None:
    form = form_of(THINKING)
    use = form.use_of(ChatRequest.model_validate(chat_body()))
    answer = json.dumps(PARIS)
    field_and_grammar = ("response_format", asked)
    assert form.grammar(use, "answer", field_and_grammar) is field_and_grammar
    opened = form.grammar(use, "reasoning", field_and_grammar)
    assert accepts(opened, f'It is "Paris", is it?</think>{answer}')
    assert accepts(opened, f"Well.\n</think>\n\n{answer}")
    assert not accepts(opened, answer)
    assert not accepts(opened, f"Well.</think>Well. {answer}")
    either = form.grammar(use, "either", field_and_grammar)
    assert accepts(either, answer)
    assert accepts(either, f"<think>Well.</think>{answer}")
    assert not accepts(either, f"Well.</think>{answer}")


def test_tools_may_be_called_instead_of_an_answer_of_a_grammar() -> None:
    form = form_of()
    use = form.use_of(ChatRequest.model_validate(chat_body(tools=TOOLS)))
    found = form.grammar(use, "answer", ("response_format", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PARAMETERS))))
    assert accepts(found, json.dumps(PARIS))
    assert accepts(found, FORMS["hermes"] % ("now", "{}"))
    assert not accepts(found, "Just text.")


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
    options = TemplateOptions(tools=[{"type": "function", "function": {"name": "now", "parameters": PARIS}}])
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_echo_with_log_probabilities(max_tokens: int, stream: bool) -> None:
    text = "the answer is 東京"
    async with serving() as (http, cluster):
        fields = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        response = await http.post(COMPLETIONS, json=completion_body(**fields, stream=stream))
        assert response.status_code == 200, response.text
        if stream:
            chunks = [json.loads(data)["choices"][0] for data in events(response.text) if data != "[DONE]"]
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
