"""instructor over a running server: a pydantic model is answered at the first try, whole and in parts.

See test_langchain.py for what this needs."""

import os
from typing import Any

import pytest

pytest.importorskip("instructor", reason="instructor is not installed")

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

URL = os.environ.get("OUTRIDER_URL")
KEY = os.environ.get("OUTRIDER_API_KEY", "unused")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

pytestmark = [
    pytest.mark.skipif(URL is None, reason="OUTRIDER_URL names no server"),
    pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]),
]


class Person(BaseModel):
    name: str = Field(max_length=200)
    nickname: str = Field(min_length=3, max_length=8)
    age: int = Field(ge=0, le=150)


ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Ada Lovelace, whom some call Countess, is 36 years old."}],
    "response_model": Person,
    "max_retries": 0,
    "max_tokens": 400,
    "temperature": 0,
}


def test_the_model_is_answered_whole_and_in_parts(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120), mode=mode)
    person = client.chat.completions.create(**ASKED)
    assert isinstance(person, Person)
    parts = [part.name or "" for part in client.chat.completions.create_partial(**ASKED)]
    assert len(parts) > 2
    assert parts[-1]
    assert all(parts[-1].startswith(part) for part in parts)
