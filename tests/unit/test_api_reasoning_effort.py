"""How much a model is to reason: OpenAI's field, which becomes variables of the chat template."""

from typing import Any

import httpx
import pytest

from tests.support.api import CHAT_TEMPLATE, chat_body, fast_tokenizer, serving

EFFORT = "{{ reasoning_effort | default('medium') }}\n"
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


async def asked(template: str, path: str, body: dict[str, Any]) -> tuple[str, httpx.Response]:
    """The prompt's text, and the answer."""
    async with serving(None, template, 4096) as (http, cluster):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        ids = list(cluster.requests[0].prompt_token_ids)
        return fast_tokenizer().decode(ids, skip_special_tokens=False), response


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max", "some other"])
async def test_the_template_is_told_the_effort(effort: str) -> None:
    for path, body in (
        ("/v1/chat/completions", chat_body(reasoning_effort=effort)),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": effort}}),
    ):
        text, response = await asked(EFFORT + CHAT_TEMPLATE, path, body)
        assert text.startswith(f"{effort}\n")
        assert "x-outrider-warning" not in response.headers
        text, _ = await asked(CHAT_TEMPLATE + THINKING, path, body)
        assert text.endswith("<think></think>") == (effort == "none")


async def test_the_caller_s_own_variables_come_first() -> None:
    own = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}
    text, _ = await asked(EFFORT + CHAT_TEMPLATE + THINKING, "/v1/chat/completions", chat_body(**own))
    assert text.startswith("low\n")
    assert text.endswith("<think></think>")


async def test_an_effort_of_which_the_template_knows_nothing_is_named() -> None:
    for path, body, name in (
        ("/v1/chat/completions", chat_body(reasoning_effort="high"), "reasoning_effort"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ):
        _, response = await asked(CHAT_TEMPLATE, path, body)
        assert response.headers["x-outrider-warning"] == f"fields without effect: {name}"
