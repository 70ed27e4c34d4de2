"""The page about the API knows every field."""

import re
from pathlib import Path

from deploy.api.schema import ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_field_is_documented() -> None:
    named = set(re.findall(r"`([a-z_]+)`", PAGE.read_text("utf-8")))
    assert set(ChatRequest.model_fields) | set(CompletionRequest.model_fields) <= named
