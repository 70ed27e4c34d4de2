"""OpenAI's Agents SDK over a running server: a run with a function tool, through chat completions and through responses.

See test_langchain.py for what this needs. The small model cannot decide to call a tool: the first turn requires it, and the
SDK leaves the choice to the model from then on."""

import os
from typing import Any

import pytest

pytest.importorskip("agents", reason="openai-agents is not installed")

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.items import ToolCallOutputItem
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

URL = os.environ.get("OUTRIDER_URL")
KEY = os.environ.get("OUTRIDER_API_KEY", "unused")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

pytestmark = [
    pytest.mark.skipif(URL is None, reason="OUTRIDER_URL names no server"),
    pytest.mark.parametrize("model_class", [OpenAIChatCompletionsModel, OpenAIResponsesModel]),
]

OFFLINE = RunConfig(tracing_disabled=True)
QUESTION = "What is the weather in Paris?"


class Capital(BaseModel):
    name: str = Field(max_length=200)
    num_people: int = Field(ge=0)


def agent(model_class: Any, *, settings: dict[str, Any], **fields: Any) -> Agent[Any]:
    model = model_class(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120))
    model_settings = ModelSettings(temperature=0, **{"max_tokens": 64, **settings})
    return Agent("forecaster", instructions="Be brief.", model=model, model_settings=model_settings, **fields)


async def test_a_run_calls_the_function_and_reads_its_result(model_class: Any) -> None:
    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"It is sunny, call {len(asked)}"

    caller = agent(model_class, settings={"tool_choice": "required"}, tools=[get_weather])
    whole = await Runner.run(caller, QUESTION, run_config=OFFLINE)
    streamed = Runner.run_streamed(caller, QUESTION, run_config=OFFLINE)
    async for _ in streamed.stream_events():
        pass
    assert len(asked) == 2
    for number, outcome in enumerate((whole, streamed), 1):
        (result,) = [item for item in outcome.new_items if isinstance(item, ToolCallOutputItem)]
        assert result.output == f"It is sunny, call {number}"
        assert outcome.final_output
        assert outcome.context_wrapper.usage.requests == 2


async def test_the_output_has_its_type(model_class: Any) -> None:
    author = agent(model_class, settings={"max_tokens": 400}, output_type=Capital)
    outcome = await Runner.run(author, "What is the capital of France?", run_config=OFFLINE)
    assert isinstance(outcome.final_output, Capital)
