"""Fields with wrong values: each a 4xx in OpenAI's shape that names the field, and the server serves on."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.schema import ChatRequest, CompletionRequest
from tests.support.api import MAX_MODEL_LEN, chat_body, completion_body, model_info, serving
from tests.support.complaints import BODIES, CHAT, COMPLETIONS, complaint, refused

HUGE = 10**4000

NOT_A_NUMBER: list[Any] = ["1", "high", True, [1], {"value": 1}]
NOT_AN_INTEGER: list[Any] = [*NOT_A_NUMBER, 1.5]
NOT_A_BOOLEAN: list[Any] = ["true", 1, 0, [True], {}]
NOT_A_STRING: list[Any] = [5, True, ["a"], {"a": 1}]

# Field -> values that it cannot have, in chat and in plain completions.
EVERYWHERE: dict[str, list[Any]] = {
    "model": [*NOT_A_STRING, "", "gpt-17", "x" * 1000],
    "max_tokens": [*NOT_AN_INTEGER, 0, -1, MAX_MODEL_LEN, HUGE],
    "temperature": [*NOT_A_NUMBER, -0.1, 2.1, HUGE],
    "top_p": [*NOT_A_NUMBER, 0, -1, 1.01],
    "top_k": [*NOT_AN_INTEGER, -2, HUGE],
    "min_p": [*NOT_A_NUMBER, -0.5, 1.5],
    "presence_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "repetition_penalty": [*NOT_A_NUMBER, 0, -1, 11],
    "min_tokens": [*NOT_AN_INTEGER, -1, 2000, HUGE],
    "seed": [*NOT_AN_INTEGER, 2**64, -(2**63) - 1, HUGE],
    "n": [*NOT_AN_INTEGER, 0, -1, 17, HUGE],
    "stream": NOT_A_BOOLEAN,
    "ignore_eos": NOT_A_BOOLEAN,
    "drafting_details": NOT_A_BOOLEAN,
    "store": NOT_A_BOOLEAN,
    "user": NOT_A_STRING,
    "stop": [5, True, "", {"a": 1}, ["a"] * 17],
    "stop_token_ids": [5, "5", {"a": 1}, [0] * 257],
    "logit_bias": [5, "5", [1, 2]],
    "stream_options": [True, "usage", [], {"include_usage": True}],
    "drafting": [*NOT_A_STRING, "", "unknown", "ngram>unknown", "ngram>ngram", ">", "Auto", "x" * 300],
    "slo": [5, True, ["a"], "", "unknown", "x" * 100],
    "metadata": [5, "a", []],
    "moderation": ["auto", True, {}],
    "allowed_token_ids": [5, "5", [], [0] * 5000],
    "skip_special_tokens": NOT_A_BOOLEAN,
    "include_stop_str_in_output": NOT_A_BOOLEAN,
    "return_token_ids": NOT_A_BOOLEAN,
    "bad_words": ["a", 5, ["a"] * 200],
    "priority": ["high", True, 0.5],
    "prompt_logprobs": [21, -1, True, "1"],
    "logits_processors": [["a"], "a"],
    "response_format": ["text", 5],
    "structured_outputs": [{}, True],
    "guided_json": [{}, 5, []],
    "guided_regex": ["a", 5, ["a"]],
    "guided_choice": [["a"], [], "a"],
    "guided_grammar": ["a", 5],
    "use_beam_search": [True, 1],
    "length_penalty": ["1", []],
    "truncate_prompt_tokens": [*NOT_AN_INTEGER, 0, -2, HUGE],
    "truncation_side": ["middle", 5],
    "spaces_between_special_tokens": ["no"],
    "return_tokens_as_token_ids": [True],
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
CHAT_ALONE: dict[str, list[Any]] = {
    "messages": [None, 5, "hello", {}, [], [{"role": "user", "content": "word " * 4 * MAX_MODEL_LEN}]],
    "max_completion_tokens": [*NOT_AN_INTEGER, 0, -1, MAX_MODEL_LEN, HUGE],
    "logprobs": [*NOT_A_BOOLEAN, 5],
    "top_logprobs": [*NOT_AN_INTEGER, -1, 21, 3],
    "tools": [[FUNCTION, FUNCTION], "f", 5],
    "add_generation_prompt": NOT_A_BOOLEAN,
    "continue_final_message": NOT_A_BOOLEAN,
    "chat_template_kwargs": [5, "a", []],
    "chat_template": ["{{ messages }}"],
    "documents": [[{"text": "a"}]],
    "mm_processor_kwargs": [5],
    "media_io_kwargs": [[]],
    "echo": [True],
    "add_special_tokens": [True],
    "tool_choice": ["required", "any", {"type": "function", "function": {"name": "f"}}, 5],
    "parallel_tool_calls": NOT_A_BOOLEAN,
    "functions": [[{"name": "f"}], {}],
    "function_call": ["auto", {"name": "f"}],
    "modalities": [["audio"], ["text", "audio"], "text"],
    "prediction": ["a", 5, []],
    "reasoning_effort": [5, "x" * 100],
    "web_search_options": [5],
    "prompt": ["hello"],
}
COMPLETIONS_ALONE: dict[str, list[Any]] = {
    "prompt": [None, 5, 1.5, True, {}, [], [True], [1.5], [None], "", "word " * 4 * MAX_MODEL_LEN, ["a"] * 65],
    "logprobs": [*NOT_AN_INTEGER, -1, 6],
    "best_of": [*NOT_AN_INTEGER, 2, -1, 0],
    "echo": NOT_A_BOOLEAN,
    "add_special_tokens": NOT_A_BOOLEAN,
    "suffix": ["end", 5],
    "messages": [[{"role": "user", "content": "hello"}]],
    "max_completion_tokens": [5],
}
# What is wrong lies deeper than the field: path -> the fields to send.
DEEPER: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "messages.0", {"messages": ["hello"]}),
    (CHAT, "messages.0", {"messages": [None]}),
    (CHAT, "messages.0.role", {"messages": [{"content": "hello"}]}),
    (CHAT, "messages.0.role", {"messages": [{"role": "robot", "content": "hello"}]}),
    (CHAT, "messages.0.role", {"messages": [{"role": 5, "content": "hello"}]}),
    (CHAT, "messages.0.content", {"messages": [{"role": "user"}]}),
    (CHAT, "messages.0.content", {"messages": [{"role": "user", "content": None}]}),
    (CHAT, "messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
    (CHAT, "messages.0.content", {"messages": [{"role": "user", "content": []}]}),
    (CHAT, "messages.0.content", {"messages": [{"role": "user", "content": {"type": "text", "text": "a"}}]}),
    (CHAT, "messages.0.content.0", {"messages": [{"role": "user", "content": ["hello"]}]}),
    (CHAT, "messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, "messages.0.content.0.text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    (CHAT, "messages.0.content.0.text", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
    (CHAT, "messages.1.content", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": False}]}),
    (CHAT, "messages.0.contents", {"messages": [{"role": "user", "content": "a", "contents": "b"}]}),
    (CHAT, "messages.0.name", {"messages": [{"role": "user", "content": "a", "name": 5}]}),
    (
        CHAT,
        "messages.0.tool_calls.0.function",
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
    ),
    (
        CHAT,
        "messages.0.tool_calls.0.function.arguments",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}]},
    ),
    (CHAT, "messages.0.content", {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}),
    (
        CHAT,
        "messages.0.function_call",
        {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
    ),
    (CHAT, "tool_choice.function", {"tool_choice": {"type": "function"}}),
    (CHAT, "tools.0", {"tools": ["f"]}),
    (CHAT, "tools.0.type", {"tools": [{"type": "web"}]}),
    (CHAT, "tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
    (CHAT, "tools.0.function.name", {"tools": [{"type": "function", "function": {"name": "f g"}}]}),
    (CHAT, "tools.0.function.parameters", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
    (
        CHAT,
        "tool_choice.function.name",
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ),
    (CHAT, "continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    (CHAT, "chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
    (CHAT, "chat_template_kwargs.eos_token", {"chat_template_kwargs": {"eos_token": "a"}}),
    (CHAT, "chat_template_kwargs.a b", {"chat_template_kwargs": {"a b": "a"}}),
    (CHAT, "allowed_token_ids.0", {"allowed_token_ids": ["5"]}),
    (CHAT, "allowed_token_ids.0", {"allowed_token_ids": [-1]}),
    (CHAT, "allowed_token_ids.1", {"allowed_token_ids": [1, 10**6]}),
    (CHAT, "bad_words.1", {"bad_words": ["a", " "]}),
    (CHAT, "bad_words.0", {"bad_words": [""]}),
    (CHAT, "bad_words.1", {"bad_words": ["a", 5]}),
    (CHAT, "bad_words.0", {"bad_words": ["a" * 200]}),
    (CHAT, "bad_words", {"bad_words": ["a"], "allowed_token_ids": [5]}),
    (COMPLETIONS, "prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    (CHAT, "max_completion_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    (CHAT, "top_logprobs", {"top_logprobs": 2, "logprobs": False}),
    (CHAT, "stop.1", {"stop": ["a", 5]}),
    (CHAT, "stop.1", {"stop": ["a", ""]}),
    (CHAT, "stop.0", {"stop": ["a" * 2000]}),
    (CHAT, "stop_token_ids.0", {"stop_token_ids": [-1]}),
    (CHAT, "stop_token_ids.1", {"stop_token_ids": [1, 10**6]}),
    (CHAT, "stop_token_ids.0", {"stop_token_ids": ["1"]}),
    (CHAT, "logit_bias.x", {"logit_bias": {"x": 1}}),
    (CHAT, "logit_bias.-1", {"logit_bias": {"-1": 1}}),
    (CHAT, "logit_bias.1.0", {"logit_bias": {"1.0": 1}}),
    (CHAT, "logit_bias.٣", {"logit_bias": {"٣": 1}}),
    (CHAT, "logit_bias.1", {"logit_bias": {"1": 101}}),
    (CHAT, "logit_bias.1", {"logit_bias": {"1": "5"}}),
    (CHAT, "logit_bias.99999999", {"logit_bias": {"99999999": 1}}),
    (CHAT, "logit_bias", {"logit_bias": {f"{'0' * i}{j}": 1 for i in range(5) for j in range(256)}}),
    (CHAT, "stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": "yes"}}),
    (CHAT, "stream_options.usage", {"stream": True, "stream_options": {"usage": True}}),
    (CHAT, "slo.ttft_ms", {"slo": {"ttft_ms": 0}}),
    (CHAT, "slo.tpot_ms", {"slo": {"tpot_ms": "5"}}),
    (CHAT, "slo.tpot_ms", {"slo": {"tpot_ms": 1e9}}),
    (CHAT, "slo.tpot_ms", {"slo": {"tpot_ms": 5e-324}}),  # 0 seconds, in which no token can come
    (CHAT, "slo.ttft_ms", {"slo": {"ttft_ms": 5e-324}}),
    (CHAT, "metadata.a", {"metadata": {"a": 5}}),
    (CHAT, "prediction.type", {"prediction": {"content": "a"}}),
    (CHAT, "prediction.type", {"prediction": {"type": "text", "content": "a"}}),
    (CHAT, "prediction.content", {"prediction": {"type": "content"}}),
    (CHAT, "prediction.content", {"prediction": {"type": "content", "content": None}}),
    (CHAT, "prediction.content", {"prediction": {"type": "content", "content": []}}),
    (CHAT, "prediction.content.0.text", {"prediction": {"type": "content", "content": [{"type": "text"}]}}),
    (COMPLETIONS, "prompt.1", {"prompt": ["a", 5]}),
    (COMPLETIONS, "prompt.1", {"prompt": ["a", ""]}),
    (COMPLETIONS, "prompt.1", {"prompt": [5, "a"]}),
    (COMPLETIONS, "prompt.0", {"prompt": [-1]}),
    (COMPLETIONS, "prompt.0", {"prompt": [""]}),
    (COMPLETIONS, "prompt.0", {"prompt": [[]]}),
    (COMPLETIONS, "prompt.1", {"prompt": [1, 10**6]}),
    (COMPLETIONS, "prompt.0", {"prompt": [2**64]}),
    (COMPLETIONS, "prompt.1.0", {"prompt": [[1], ["a"]]}),
    (COMPLETIONS, "prompt.1.2", {"prompt": [[1], [1, 2, 10**6]]}),
    (COMPLETIONS, "prompt.1", {"prompt": [[1], []]}),
    (COMPLETIONS, "prompt.0", {"prompt": [[1] * MAX_MODEL_LEN]}),
    (COMPLETIONS, "prompt", {"prompt": ["a"] * 16, "n": 8}),
    (COMPLETIONS, "max_tokens", {"prompt": [1] * (MAX_MODEL_LEN - 1), "max_tokens": 2}),
]


def wrong_values() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, alone in ((CHAT, CHAT_ALONE), (COMPLETIONS, COMPLETIONS_ALONE)):
        for field, values in {**EVERYWHERE, **alone}.items():
            yield from ((path, field, {field: value}) for value in values)


CASES = [*wrong_values(), *DEEPER]


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 350


async def test_wrong_fields_are_named_and_the_server_serves_on() -> None:
    async with serving(unknown_fields="refuse") as (http, cluster):
        answers = [
            await complaint(http, path, json.dumps(BODIES[path](**fields)).encode(), param) for path, param, fields in CASES
        ]
        assert "\n".join(filter(None, answers)) == ""
        assert cluster.requests == []
        for path, good_body in BODIES.items():
            assert (await http.post(path, json=good_body())).status_code == 200


async def test_an_infinite_number_is_refused_by_its_field() -> None:
    async with serving() as (http, _):
        body = json.dumps(chat_body()).replace("{", '{"temperature": 1e999, ', 1).encode()
        await refused(http, CHAT, body, "temperature")


async def test_token_ids_up_to_the_last_are_accepted() -> None:
    async with serving() as (http, cluster):
        last = model_info().vocab_size - 1
        fields = {"prompt": [0, last], "stop_token_ids": [last], "logit_bias": {str(last): -100}}
        assert (await http.post(COMPLETIONS, json=completion_body(**fields))).status_code == 200
        assert cluster.requests[0].prompt_token_ids == (0, last)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
field_names = st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields}))


@settings(deadline=None)  # a busy machine is no failure
@given(st.sampled_from(sorted(BODIES)), st.dictionaries(field_names | st.text(max_size=8), json_values, max_size=4))
def test_whatever_comes_is_answered_or_refused(path: str, fields: dict[str, Any]) -> None:
    async def ask() -> None:
        async with serving() as (http, _):
            response = await http.post(path, json=BODIES[path](**fields))
            assert response.status_code < 500, response.text
            if response.status_code != 200:
                param = response.json()["error"]["param"]
                assert any(param == field or param.startswith(f"{field}.") for field in fields)

    asyncio.run(ask())
