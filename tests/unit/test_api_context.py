"""Prompts and answers beyond the model's context, and the sentence by which clients know them."""

from typing import Any

import pytest

from tests.support.api import MAX_MODEL_LEN, chat_body, completion_body, serving, token_ids

LONG = "a b " * MAX_MODEL_LEN  # is tokenized to its end
HUGE = "a b " * 50_000  # is not
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


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
