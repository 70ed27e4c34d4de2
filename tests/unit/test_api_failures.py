"""What callers see of a cluster that refuses, fails or is away; request ids, metrics and logs."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest

from actors.drafter import DrafterActor
from actors.ray_pool import Deployment, PoolSupervisor, RayTargets
from actors.router import RouterActor
from actors.target import RankActor, TargetActor
from cluster.config import Config, ObservabilityConfig
from cluster.errors import LinkClosed, Overloaded
from cluster.logs import PACKAGES, JsonFormatter, RequestIds, current_ids, log_json
from cluster.types import Commit, FinishReason, Request
from deploy.api.tasks import Cached
from router.drafter.policies import build_policy, build_pool
from router.drafter.router import Router
from tests.support.api import chat_body, events, saying, serving
from tests.support.asgi import CHAT, Caller, answering
from tests.support.scripted import Step
from tests.support.toys import MODEL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "retry_after"),
    [(Overloaded("too many wait", 2.2), 429, "3"), (LinkClosed("no target"), 503, "1"), (KeyError("a defect"), 500, None)],
)
async def test_a_refusal_before_the_first_token_has_its_own_status(
    failure: Exception, status: int, retry_after: str | None, stream: bool
) -> None:
    async with serving(lambda request: [failure]) as (http, _):
        response = await http.post(CHAT, json=chat_body(stream=stream))
        assert response.status_code == status
        assert response.headers.get("retry-after") == retry_after
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert "defect" not in response.text


@pytest.mark.parametrize(("finish", "status"), [(FinishReason.OVERLOADED, 429), (FinishReason.DRAINING, 503)])
async def test_a_refusal_says_when_to_come_again(finish: FinishReason, status: int) -> None:
    def script(request: Request) -> list[Step]:
        return [Commit(request.id, 0, (), finish=finish, error="not now")]

    async with serving(script) as (http, _):
        response = await http.post(CHAT, json=chat_body())
        assert (response.status_code, response.headers["retry-after"]) == (status, "1")


@pytest.mark.parametrize("failure", [LinkClosed("the target went"), KeyError("a defect")])
async def test_a_failure_amid_a_stream_is_told_before_its_end(failure: Exception) -> None:
    text_is_out = asyncio.Event()
    caller = Caller(answering(text_is_out, failure))
    call = caller.start(chat_body(stream=True))
    await caller.got_body.wait()
    text_is_out.set()
    await call
    assert caller.status == 200
    *chunks, last, done = events(caller.body)
    assert chunks
    assert done == "[DONE]"
    assert set(json.loads(last)["error"]) == {"message", "type", "param", "code"}
    assert caller.sent[-1]["more_body"] is False


async def test_an_engine_s_error_has_an_id_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Request) -> list[Step]:
        return [Commit(request.id, 0, (), finish=FinishReason.ERROR, error="the logits are no numbers")]

    async with serving(script) as (http, _):
        with caplog.at_level(logging.ERROR):
            response = await http.post(CHAT, json=chat_body())
    assert response.status_code == 500
    request_id = response.headers["x-request-id"]
    assert request_id in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"
    assert f"call {request_id} failed: the logits are no numbers" in caplog.text


async def test_one_failing_choice_ends_the_others() -> None:
    never = asyncio.Event()

    def script(request: Request) -> list[Step]:
        return [LinkClosed("the target went")] if request.id.endswith("-1") else [never]

    async with serving(script) as (http, cluster):
        assert (await http.post(CHAT, json=chat_body(n=3))).status_code == 503
        assert len(cluster.aborted) == 2


async def test_a_stream_without_an_end_is_a_failure() -> None:
    async with serving(answering()) as (http, _):
        assert (await http.post(CHAT, json=chat_body())).status_code == 503


async def test_no_cluster_is_a_503_everywhere() -> None:
    async with serving() as (http, cluster):
        cluster.failure = LinkClosed("nobody listens")
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT)):
            response = await http.request(method, path, **({"json": chat_body()} if method == "POST" else {}))
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
        metrics = await http.get("/metrics")
        assert metrics.status_code == 200
        assert "outrider_cluster_up 0.0" in metrics.text
        cluster.failure = None
        assert (await http.post(CHAT, json=chat_body())).status_code == 200


async def test_health_needs_a_link_to_a_target() -> None:
    async with serving() as (http, cluster):
        cluster.is_linked = False  # as after the death of the gateway's thread, whatever the supervisor says
        response = await http.get("/health")
        assert (response.status_code, "no link to a target" in response.text) == (503, True)


async def test_health_needs_a_target_that_is_ready() -> None:
    async with serving(status_ttl_s=1e-6) as (http, cluster):
        assert (await http.get("/health")).json()["targets"] == {"target-0": "ready"}
        cluster.target_state = "starting"
        response = await http.get("/health")
        assert response.status_code == 503
        assert "target-0 is starting" in response.json()["error"]["message"]


async def test_those_who_ask_for_the_status_at_once_share_one_answer() -> None:
    num_asked, release = 0, asyncio.Event()

    async def ask() -> int:
        nonlocal num_asked
        num_asked += 1
        await release.wait()
        return num_asked

    cached = Cached(ask, ttl_s=300.0)
    first, *others = [asyncio.create_task(cached.get()) for _ in range(5)]
    await asyncio.sleep(0)
    first.cancel()  # the others still get it
    release.set()
    assert await asyncio.gather(*others) == [1] * 4
    assert await cached.get() == 1


async def test_the_shared_status_belongs_to_no_request() -> None:
    seen: list[RequestIds | None] = []

    async def ask() -> None:
        seen.append(current_ids.get())

    ids = current_ids.set(RequestIds("mine", None))
    await Cached(ask, ttl_s=300.0).get()
    assert (seen, current_ids.get()) == ([None], RequestIds("mine", None))
    current_ids.reset(ids)


async def test_a_failure_to_get_the_status_is_shared_and_not_kept() -> None:
    outcomes: list[int | Exception] = [LinkClosed("nobody listens"), 2, 3]

    async def ask() -> int:
        outcome = outcomes.pop(0)
        await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    cached = Cached(ask, ttl_s=1e-6)
    failures = await asyncio.gather(cached.get(), cached.get(), return_exceptions=True)
    assert [type(failure) for failure in failures] == [LinkClosed, LinkClosed]
    assert [await cached.get(), await cached.get()] == [2, 3]


async def test_a_trailing_slash_is_an_unknown_url_and_no_redirect() -> None:
    async with serving() as (http, _):
        for path in ("/health/", "/metrics/", CHAT + "/"):
            response = await http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/v1/models", 200), ("/", 200), (CHAT, 405), ("/no", 404)])
async def test_head_is_answered_as_get(path: str, status: int) -> None:
    async with serving() as (http, _):
        response = await http.head(path)
        assert (response.status_code, "x-request-id" in response.headers) == (status, True)


@pytest.mark.parametrize(("given", "kept"), [("my-id", True), ("x" * 129, False), ("no spaces", False)])
async def test_a_client_s_request_id_is_kept_where_it_is_sane(given: str, kept: bool) -> None:
    async with serving() as (http, _):
        response = await http.get("/health", headers={"x-request-id": given})
        (request_id,) = response.headers.get_list("x-request-id")
        assert (request_id == given) is kept


async def test_metrics_count_what_happened() -> None:
    async with serving(saying("the answer", num_per_round=2)) as (http, _):
        answer = (await http.post(CHAT, json=chat_body())).json()
        await http.post(CHAT, json={})
        await http.get("/no/such/place")
        lines = (await http.get("/metrics")).text.splitlines()
    usage = answer["usage"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert f"outrider_prompt_tokens_total {float(usage['prompt_tokens'])}" in lines
    assert f"outrider_completion_tokens_total {float(usage['completion_tokens'])}" in lines
    assert f'outrider_prediction_tokens_accepted_total{{drafter="ngram"}} {float(accepted)}' in lines
    assert f'outrider_requests_total{{endpoint="{CHAT}",status="200"}} 1.0' in lines
    assert f'outrider_requests_total{{endpoint="{CHAT}",status="400"}} 1.0' in lines
    assert 'outrider_requests_total{endpoint="unmatched",status="404"} 1.0' in lines
    assert "outrider_ttft_seconds_count 1.0" in lines
    assert "outrider_tpot_seconds_count 1.0" in lines
    assert "outrider_requests_in_flight 0.0" in lines
    assert 'outrider_target_ready{target="target-0"} 1.0' in lines
    assert 'outrider_drafter_verified_total{drafter="ngram"} 8.0' in lines
    assert 'outrider_drafter_accepted_total{drafter="ngram"} 5.0' in lines


async def test_a_known_model_is_served_while_the_cluster_does_not_describe_it() -> None:
    async with serving() as (http, cluster):
        before = await http.get("/v1/models")
        cluster.failure = LinkClosed("the supervisor is away")
        assert (await http.get("/v1/models")).json() == before.json()
        assert (await http.post(CHAT, json=chat_body())).status_code == 200


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

    monkeypatch.setattr("deploy.api.choice_writer.ChoiceWriter.document", breaks)
    async with serving() as (http, _):
        assert (await http.post(CHAT, json=chat_body(messages=MESSAGES))).status_code == 500
    assert "ValueError" in caplog.text
    assert MARKER not in caplog.text
