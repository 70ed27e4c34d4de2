"""Pydantic AI over a running server: text, streams, and outputs of a pydantic model, by a tool call and by a format.

See test_langchain.py for what this needs."""

import os
from typing import Any

import pytest

pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed")

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ.get("OUTRIDER_URL")
KEY = os.environ.get("OUTRIDER_API_KEY", "unused")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

pytestmark = [
    pytest.mark.skipif(URL is None, reason="OUTRIDER_URL names no server"),
    pytest.mark.parametrize("model_class", [OpenAIChatModel, OpenAIResponsesModel]),
]


class Capital(BaseModel):
    name: str = Field(max_length=200)
    country: str = Field(min_length=2, max_length=20)
    num_people: int = Field(ge=0, le=10**9)


def agent(model_class: Any, **fields: Any) -> Agent[Any, Any]:
    model = model_class(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
    return Agent(model, instructions="Be brief.", model_settings={"temperature": 0, "max_tokens": 400}, retries=0, **fields)


async def test_a_stream_is_the_answer(model_class: Any) -> None:
    question = "What is the capital of France?"
    whole = await agent(model_class).run(question)
    async with agent(model_class).run_stream(question) as stream:
        assert await stream.get_output() == whole.output
    assert "Paris" in whole.output
    assert whole.usage.output_tokens > 0


@pytest.mark.parametrize("how", [ToolOutput, NativeOutput])
async def test_the_output_has_its_type(model_class: Any, how: Any) -> None:
    outcome = await agent(model_class, output_type=how(Capital)).run("What is the capital of France?")
    assert isinstance(outcome.output, Capital)
    assert outcome.usage.requests == 1
