"""Simon Willison's command ``llm`` over a running server: a stream, a conversation, a schema, a tool and an effort.

See test_langchain.py for what this needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llm", reason="llm is not installed")

URL = os.environ.get("OUTRIDER_URL")
KEY = os.environ.get("OUTRIDER_API_KEY", "unused")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

pytestmark = pytest.mark.skipif(URL is None, reason="OUTRIDER_URL names no server")

SETTINGS = f"""
- model_id: local
  model_name: {MODEL}
  api_base: {URL}/v1
  supports_schema: true
  supports_tools: true
  reasoning: true
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(SETTINGS)
    return tmp_path


def llm(home: Path, *words: str) -> str:
    outcome = subprocess.run(
        [sys.executable, "-m", "llm", "prompt", "-m", "local", "--key", KEY, "-o", "temperature", "0", *words],
        env={**os.environ, "LLM_USER_PATH": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return outcome.stdout


def test_a_conversation_streamed_and_not(home: Path) -> None:
    question = "What is the capital of France?"
    whole = llm(home, "--no-stream", "-o", "max_tokens", "48", question)
    assert "Paris" in whole
    assert llm(home, "-o", "max_tokens", "48", question) == whole
    assert llm(home, "--continue", "-o", "max_tokens", "16", "And of Italy?")


def test_a_schema_is_enforced(home: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 200}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    answer = json.loads(llm(home, "--schema", json.dumps(schema), "-o", "max_tokens", "400", "Ada is 36 years old."))
    assert isinstance(answer["name"], str)
    assert len(answer["name"]) <= 200
    assert isinstance(answer["age"], int)


def test_tools_and_an_effort_are_taken(home: Path) -> None:
    effort = ["-o", "reasoning_effort", "low"]
    assert llm(home, "-T", "llm_time", *effort, "-o", "max_tokens", "16", "Say one word.")
