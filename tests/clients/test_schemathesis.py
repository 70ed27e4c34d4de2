"""schemathesis calls every operation of our OpenAPI document, with fields of the right and of wrong types: no answer is a
server error, or one that the document does not describe.

See test_langchain.py for what this needs. The server is one of its own (tests/unit/test_api_fuzz.py), whose answers cost
nothing. The cases are the same in each run, unless OUTRIDER_FUZZ_CASES says how many others to draw, of each operation."""

import os
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis
from hypothesis import settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

URL = os.environ.get("OUTRIDER_FUZZED_URL")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")
if URL is None:
    pytest.skip("OUTRIDER_FUZZED_URL names no server", allow_module_level=True)

DRAWN = os.environ.get("OUTRIDER_FUZZ_CASES")
NUM_CASES = int(DRAWN or 60)  # of each operation, at most
MAX_TOKENS = 4
ANSWER_S = 60
LENGTHS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]

api = schemathesis.openapi.from_url(f"{URL}/openapi.json")


@api.parametrize()
@settings(max_examples=NUM_CASES, derandomize=DRAWN is None, database=None, deadline=None)
def test_no_case_breaks_the_server(case: Any) -> None:
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = MODEL  # otherwise nothing would reach it
    if isinstance(body, dict) and (length := LENGTHS.get(case.path)) is not None and body.get(length) is None:
        body[length] = MAX_TOKENS
    case.call_and_validate(checks=CHECKS, timeout=ANSWER_S)
