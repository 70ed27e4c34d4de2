"""The log as JSON: ids of requests, access lines, and no text of prompts in either format."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest

from actors.drafter import DrafterActor
from actors.rank import RankActor
from actors.ray_pool import Deployment, PoolSupervisor, RayTargets
from actors.router import RouterActor
from actors.target import TargetActor
from cluster.config import Config, ObservabilityConfig
from cluster.errors import LinkClosed
from cluster.logs import PACKAGES, JsonFormatter, log_json
from cluster.types import Request
from router.drafter.policies import build_policy, build_pool
from router.drafter.router import Router
from tests.support.api import chat_body, serving
from tests.support.asgi import CHAT, answering
from tests.support.scripted import Step
from tests.support.toys import MODEL

NO_TARGETS = RayTargets(())
MARKER = "marker-in-prompt"
MESSAGES = [{"role": "user", "content": MARKER}]


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[StringIO]:
    """As it was before a process has begun to write JSON."""
    stream = StringIO()
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger, logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    monkeypatch.setattr("sys.stderr", stream)
    yield stream
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture
def written(stderr: StringIO) -> StringIO:
    """What JSON logs write to stderr."""
    log_json()
    return stderr


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


JSON = Config(observability=ObservabilityConfig(log_format="json"))
PROCESSES: dict[str, Callable[[Config], object]] = {
    "target": lambda config: TargetActor(config, "target-0", "memory://logs", ""),
    "rank": lambda config: RankActor(config, 1, lambda: "127.0.0.1"),
    "router": lambda config: RouterActor(config, Router(build_policy(config.router.policy), build_pool(config)), NO_TARGETS),
    "drafter": lambda config: DrafterActor(config.drafters[0], "a", MODEL, (), "", observability=config.observability),
    "supervisor": lambda config: PoolSupervisor(Deployment(config, {}, "/folder", "")),
}


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("package", ["drafters.loop", "router.estimates.drift", "profiler.profile", "engine.round"])
async def test_every_process_of_the_deployment_writes_json_if_asked(process: str, package: str, stderr: StringIO) -> None:
    with redirect_stderr(stderr):
        PROCESSES[process](Config())
        logging.getLogger(package).info("as text, or not at all")
        PROCESSES[process](JSON)
    logging.getLogger(package).info("a line")
    assert [(line["logger"], line["message"]) for line in lines(stderr)] == [(package, "a line")]


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

    monkeypatch.setattr("deploy.api.formats.ChoiceWriter.document", breaks)
    async with serving() as (http, _):
        assert (await http.post(CHAT, json=chat_body(messages=MESSAGES))).status_code == 500
    assert "ValueError" in caplog.text
    assert MARKER not in caplog.text
