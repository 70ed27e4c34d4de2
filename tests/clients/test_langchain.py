"""LangChain's own suite for chat models, over ``ChatOpenAI`` and a running server.

It needs packages of its own (langchain-tests, langchain-openai) and the address of a server, so it runs apart from the
other tests: make test-clients, or over a server of one's own
OUTRIDER_URL=http://127.0.0.1:8000 python -m pytest -c tests/clients/pytest.ini tests/clients"""

import json
import os
from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ.get("OUTRIDER_URL")
KEY = os.environ.get("OUTRIDER_API_KEY", "unused")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

pytestmark = pytest.mark.skipif(URL is None, reason="OUTRIDER_URL names no server")


class CallingChatOpenAI(ChatOpenAI):
    """Calls a tool where the suite leaves the choice to the model: the suite runs over one that is too small to choose."""

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **fields: Any) -> Any:
        return super().bind_tools(tools, tool_choice=tool_choice or "any", **fields)


class TestChatOpenAI(ChatModelIntegrationTests):
    """The whole suite but for images, audio and PDFs."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return CallingChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "stream_usage": True}

    @property
    def standard_chat_model_params(self) -> dict[str, object]:
        return {"temperature": 0, "max_tokens": 300, "timeout": 60, "max_retries": 0}

    @property
    def model_override_value(self) -> str:
        return MODEL

    @property
    def structured_output_kwargs(self) -> dict[str, object]:
        """Against endless repetition, in which the small model would reach max_tokens amid JSON."""
        return {"frequency_penalty": 0.6}

    @property
    def supports_json_mode(self) -> bool:
        """JSON mode promises an object, and the suite's test asks for keys that the model must choose by itself."""
        return False


def test_json_mode_answers_with_an_object() -> None:
    model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, temperature=0, max_tokens=200)
    asked = "Tell me a joke about cats. Return the result as a JSON with 'setup' and 'punchline' keys."
    answer = model.bind(response_format={"type": "json_object"}).invoke(asked)
    assert isinstance(json.loads(str(answer.content)), dict)
