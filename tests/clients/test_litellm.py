"""LiteLLM over a running server: the errors and fields on which its callers rely.

See test_langchain.py for what this needs."""

import os
from typing import Any

import pytest

pytest.importorskip("litellm", reason="litellm is not installed")

import litellm

URL = os.environ.get("OUTRIDER_URL")
KEY = os.environ.get("OUTRIDER_API_KEY", "unused")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

pytestmark = pytest.mark.skipif(URL is None, reason="OUTRIDER_URL names no server")


def complete(content: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return litellm.completion(f"openai/{MODEL}", messages, api_base=f"{URL}/v1", api_key=KEY, **fields)


@pytest.mark.parametrize(("content", "max_tokens"), [("word " * 20_000, 8), ("word", 1_000_000)])
def test_what_exceeds_the_context_is_told_as_such(content: str, max_tokens: int) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(content, max_tokens=max_tokens)


@pytest.mark.parametrize("effort", ["none", "low", "high"])
def test_efforts_are_taken(effort: str) -> None:
    answer = complete("Say one word.", max_tokens=4, reasoning_effort=effort, allowed_openai_params=["reasoning_effort"])
    assert answer.usage.completion_tokens <= 4
