"""The log as JSON: ids of requests, access lines, and no text of prompts in either format."""

import json
import logging
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest

from cluster.errors import LinkClosed
from cluster.types import Request
from deploy.api.logs import JsonFormatter, log_json
from tests.support.api import chat_body, serving
from tests.support.asgi import CHAT, answering
from tests.support.scripted import Step

MARKER = "marker-in-prompt"
MESSAGES = [{"role": "user", "content": MARKER}]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[StringIO]:
    """What JSON logs write to stderr."""
    stream = StringIO()
    loggers = [logging.getLogger(name) for name in ("actors", "cluster", "engine", "deploy")]
    before = [(logger, logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    monkeypatch.setattr("sys.stderr", stream)
    log_json()
    yield stream
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def lines(written: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


async def test_a_request_s_lines_carry_its_id_and_the_last_is_its_access(written: StringIO) -> None:
    def script(request: Request) -> list[Step]:
        return [LinkClosed("the target went") if request.id.endswith("-1") else KeyError(MARKER)]

    async with serving(script) as (http, _):
        headers = {"x-request-id": "mine"}
        assert (await http.post(CHAT, json=chat_body(messages=MESSAGES), headers=headers)).status_code == 500
    error, access = lines(written)
    assert (error["level"], error["request_id"], access["request_id"]) == ("error", "mine", "mine")
    assert error["exception"].startswith("KeyError\n")
    assert "scripted.py" in error["exception"]
    assert (access["logger"], access["message"], access["status"]) == ("deploy.api.access", f"POST {CHAT} 500", 500)


async def test_an_access_line_counts_tokens(written: StringIO) -> None:
    async with serving() as (http, _):
        usage = (await http.post(CHAT, json=chat_body(n=2))).json()["usage"]
        await http.get("/health")  # probes write none
    (access,) = lines(written)
    assert (access["prompt_tokens"], access["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (access["finish_reasons"], access["duration_ms"] > 0, "error_type" in access) == (["stop", "stop"], True, False)


async def test_lines_outside_of_requests_have_no_id(written: StringIO) -> None:
    async with serving() as (http, _):
        await http.post(CHAT, json=chat_body())
    logging.getLogger("deploy").warning("elsewhere")
    assert "request_id" not in lines(written)[-1]


def defect(request: Request) -> list[Step]:
    raise KeyError(MARKER)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [defect, answering(ValueError(MARKER)), answering(LinkClosed("gone"))])
async def test_no_prompt_reaches_a_log(script: Any, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(script) as (http, _):
        await http.post(CHAT, json=chat_body(messages=MESSAGES, stream=stream))
        await http.post(CHAT, json=chat_body(messages=MESSAGES, temperature=MARKER))
        await http.post(CHAT, content=f'{{"messages": "{MARKER}')
        await http.post("/tokenize", json={"prompt": MARKER})
    as_json = "\n".join(map(JsonFormatter().format, caplog.records))
    assert "deploy.api.access" in as_json
    assert MARKER not in caplog.text + as_json


async def test_a_defect_of_the_answer_s_writer_is_logged_without_its_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> bytes:
        raise ValueError(MARKER)

    monkeypatch.setattr("deploy.api.choice_writer.ChoiceWriter.document", breaks)
    async with serving() as (http, _):
        assert (await http.post(CHAT, json=chat_body(messages=MESSAGES))).status_code == 500
    assert "ValueError" in caplog.text
    assert MARKER not in caplog.text
