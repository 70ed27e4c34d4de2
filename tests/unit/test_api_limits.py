"""What the API refuses, when it gives up, and that it lets go of the engine whenever it does."""

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import deploy.api.call
from cluster.errors import InvalidField, LinkClosed, Overloaded
from cluster.types import Commit, FinishReason, Request
from deploy.api.admission import Admission
from deploy.api.app import create_app
from deploy.api.boundary import SPARE_CALLS
from deploy.api.cached import Cached
from deploy.api.chat_template import ChatTemplate
from deploy.api.errors import ApiError
from deploy.api.keys import ApiKeys
from deploy.api.scripted import ScriptedClient, Step, spell
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from tests.support.api import (
    CHAT_TEMPLATE,
    MODEL,
    chat_body,
    events,
    fast_tokenizer,
    finishing,
    model_info,
    saying,
    serving,
    token_ids,
    tokenizer,
)

CHAT = "/v1/chat/completions"


def answering(*steps: Step) -> Any:
    """A script of the given steps after two tokens of text."""

    def script(request: Request) -> Iterable[Step]:
        return [*spell(request, token_ids("the answer")[:2]), *steps]

    return script


# ---- keys


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-hashed").hexdigest()
    file.write_text(f"# who may call\n\nalice:{digest}\nsk-plain\n")
    return file


@pytest.mark.parametrize("key", ["sk-plain", "sk-hashed"])
async def test_a_known_key_is_served(keys_file: Path, key: str) -> None:
    async with serving(api_keys_file=keys_file) as (http, _):
        response = await http.post(CHAT, json=chat_body(), headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer sk-wrong", "Basic sk-plain", "sk-plain", "Bearer alice", "Bearer é"]
)
async def test_other_keys_are_refused_before_anything_is_read(keys_file: Path, header: str | None) -> None:
    async with serving(api_keys_file=keys_file) as (http, cluster):
        headers = {} if header is None else {"authorization": header.encode()}
        for method, path in (("POST", CHAT), ("GET", "/v1/models")):
            response = await http.request(method, path, content=b"no json", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert cluster.requests == []
        assert (await http.get("/health")).status_code == 200  # probes have no key


def test_keys_are_named_and_not_kept(keys_file: Path) -> None:
    keys = ApiKeys.from_file(keys_file)
    assert keys.name_of("sk-hashed") == "alice"
    assert keys.name_of("sk-plain") == "line-4"
    assert keys.name_of("sk-other") is None
    assert b"sk-plain" not in json.dumps({name: digest.hex() for name, digest in vars(keys)["_digests"].items()}).encode()


@pytest.mark.parametrize("text", ["", "# nothing\n", "two words", "naïve-key", f"a:{'0' * 64}\na:{'1' * 64}"])
def test_a_bad_key_file_is_one_clear_line_without_its_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InvalidField, match="api_keys_file") as raised:
        ApiKeys.from_file(file)
    assert not text.strip() or text not in str(raised.value)
    with pytest.raises(InvalidField, match="cannot be read"):
        ApiKeys.from_file(tmp_path / "missing")


# ---- the body


@pytest.mark.parametrize("declared", [True, False])
async def test_a_large_body_is_refused_while_it_is_read(declared: bool) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1_000_000:
            sent += 1000
            yield b" " * 1000

    async with serving(max_request_bytes=5000) as (http, cluster):
        content: Any = b" " * 6000 if declared else endless()
        response = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"]["param"] == "body"
        assert response.headers["connection"] == "close"
        assert sent < 1_000_000
        assert (await http.post(CHAT, json=chat_body())).status_code == 200
        assert len(cluster.requests) == 1


async def test_a_prompt_longer_than_the_server_wants() -> None:
    async with serving(max_prompt_tokens=5) as (http, _):
        response = await http.post("/v1/completions", json={"model": MODEL, "prompt": [1] * 6})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "prompt_too_long")


async def test_bodies_may_not_fill_the_memory_together() -> None:
    settings = {"max_request_bytes": 4000, "max_held_bytes": 5000}
    first = Caller(**settings)
    call = first.start(None)
    first.put(type="http.request", body=b" " * 3000, more_body=True)
    await asyncio.sleep(0)
    second = Caller(app=first.app)
    second.put(type="http.request", body=b" " * 3000, more_body=True)
    await second.start(None)
    assert second.status == 429
    assert dict(second.sent[0]["headers"])[b"retry-after"] == b"1"
    first.put(type="http.request", body=b"", more_body=False)
    await call
    assert first.status == 400
    third = Caller(app=first.app)
    await third.start(chat_body())
    assert third.status == 200


class Caller:
    """Speaks ASGI by hand, to send slowly and to hang up."""

    def __init__(self, script: Any = None, app: FastAPI | None = None, **settings: Any) -> None:
        self.cluster = ScriptedClient(model_info(), script or saying("the answer"))
        self.app = app or create_app(self.cluster, tokenizer(), ApiSettings(**settings))
        self.reads = True
        self.stalls_at: bytes | None = None  # takes nothing from these bytes on
        self.sent: list[dict[str, Any]] = []
        self.got_body = asyncio.Event()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def put(self, **message: Any) -> None:
        self._incoming.put_nowait(message)

    def start(self, body: dict[str, Any] | None, path: str = CHAT) -> asyncio.Task[None]:
        """``body`` None: it never comes."""
        if body is not None:
            self.put(type="http.request", body=json.dumps(body).encode(), more_body=False)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"api")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        return asyncio.create_task(self.app(scope, self._incoming.get, self._take))

    async def _take(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_body.set()
        stalls = self.stalls_at is not None and self.stalls_at in message.get("body", b"")
        if message.get("body") and (stalls or not self.reads):
            await asyncio.Event().wait()  # as a server does whose connection takes no more

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def test_a_slow_body_is_given_up() -> None:
    caller = Caller(body_timeout_s=0.02)
    await caller.start(None)
    assert caller.status == 408
    assert json.loads(caller.body)["error"]["param"] == "body"


async def test_a_caller_that_hangs_up_amid_its_body_gets_nothing() -> None:
    caller = Caller()
    call = caller.start(None)
    caller.put(type="http.disconnect")
    await call
    assert caller.sent == []


# ---- hanging up


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_hangs_up_ends_the_work_at_once(stream: bool) -> None:
    started, never = asyncio.Event(), asyncio.Event()

    def script(request: Request) -> Iterable[Step]:
        yield from spell(request, token_ids("the answer")[:2])
        started.set()
        yield never

    caller = Caller(script)
    call = caller.start(chat_body(stream=stream, n=2))
    await started.wait()
    if stream:
        await caller.got_body.wait()
    caller.put(type="http.disconnect")
    await call
    assert len(caller.cluster.requests) == 2
    assert sorted(caller.cluster.aborted) == sorted(request.id for request in caller.cluster.requests)
    assert caller.cluster.num_open == 0


async def test_a_cancelled_call_ends_the_work_too() -> None:
    never = asyncio.Event()
    caller = Caller(answering(never))
    call = caller.start(chat_body(stream=True))
    await caller.got_body.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert caller.cluster.num_open == 0


async def test_a_caller_that_hangs_up_in_the_queue_leaves_it() -> None:
    release = asyncio.Event()

    def script(request: Request) -> list[Step]:
        return [release, *finishing(request, token_ids("the answer"))]

    caller = Caller(script, max_concurrent=1, max_sequences=1, max_n=1)
    first = caller.start(chat_body())
    await caller.cluster.asked(1)
    second = Caller(app=caller.app)
    waiting = second.start(chat_body())
    second.put(type="http.disconnect")
    await waiting
    assert second.sent == []
    release.set()
    caller.put(type="http.request", body=b"", more_body=False)
    await first
    assert caller.status == 200
    assert len(caller.cluster.requests) == 1


# ---- deadlines


async def test_an_answer_that_takes_too_long_is_given_up() -> None:
    async with serving(answering(asyncio.Event()), request_timeout_s=0.05) as (http, cluster):
        response = await http.post(CHAT, json=chat_body())
        assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")
        assert len(cluster.aborted) == 1


async def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    async with serving(answering(asyncio.Event()), request_timeout_s=0.05) as (http, cluster):
        response = await http.post(CHAT, json=chat_body(stream=True))
        assert response.status_code == 200
        *_, last = events(response.text)
        assert json.loads(last)["error"]["code"] == "timeout"
        assert len(cluster.aborted) == 1


async def test_a_caller_that_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.api.call, "_SEND_ERROR_S", 0.02)
    caller = Caller(answering(asyncio.Event()), request_timeout_s=0.05)
    caller.reads = False
    await caller.start(chat_body(stream=True))
    assert caller.cluster.num_open == 0
    assert len(caller.cluster.aborted) == 1


async def test_a_caller_that_does_not_read_a_whole_answer_holds_nobody_up() -> None:
    caller = Caller(body_timeout_s=0.05, max_concurrent=1, max_sequences=1, max_n=1)
    caller.reads = False
    call = caller.start(chat_body())
    await caller.cluster.asked(1)
    other = Caller(app=caller.app)
    await other.start(chat_body())
    assert other.status == 200
    await call


async def test_a_stream_that_is_generated_gives_its_turn_away_however_slowly_it_is_read() -> None:
    reader = Caller(max_concurrent=1, max_sequences=1, max_n=1)
    reader.reads = False
    slow = reader.start(chat_body(stream=True))
    await reader.got_body.wait()
    other = Caller(app=reader.app)
    await other.start(chat_body())
    assert other.status == 200
    assert not slow.done()
    reader.put(type="http.disconnect")
    await slow
    assert reader.cluster.num_open == 0


async def test_a_reader_of_a_stream_that_takes_nothing_is_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.api.call, "_STALL_S", 0.02)
    caller = Caller(answering(asyncio.Event()))
    caller.reads = False
    await caller.start(chat_body(stream=True))
    assert len(caller.cluster.aborted) == 1


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_reader_that_takes_no_end_of_a_stream_is_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch, include_usage: bool
) -> None:
    monkeypatch.setattr(deploy.api.call, "_STALL_S", 0.02)
    caller = Caller(request_timeout_s=2.0)
    caller.stalls_at = b"data: [DONE]"
    await caller.start(chat_body(stream=True, stream_options={"include_usage": include_usage}))
    assert caller.body.endswith("data: [DONE]\n\n"), "the reader was waited for until the deadline of the call"


# ---- too many


class HeldTokenizer(Tokenizer):
    """Encodes and decodes long inputs once ``release`` is set; ``started`` tells that it was asked to."""

    def __init__(self) -> None:
        super().__init__(fast_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {}))
        self.started, self.release = threading.Event(), threading.Event()
        self.on_loop: list[bool] = []
        self._loop_thread = threading.get_ident()

    def _hold(self) -> None:
        self.on_loop.append(threading.get_ident() == self._loop_thread)
        self.started.set()
        if not self.on_loop[-1]:
            self.release.wait()

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int) -> tuple[int, ...]:
        self._hold()
        return super()._encode(text, add_special_tokens, max_tokens)

    def text_of(self, token_ids: Sequence[int]) -> str:
        self._hold()
        return super().text_of(token_ids)


TOKENIZING = [("/tokenize", {"prompt": "a" * 3000}), ("/detokenize", {"tokens": [5] * 3000})]


@pytest.mark.parametrize(("path", "body"), TOKENIZING)
@pytest.mark.parametrize("hangs_up", [False, True])
async def test_tokenizing_ends_at_the_deadline_and_when_the_caller_hangs_up(
    path: str, body: dict[str, Any], hangs_up: bool
) -> None:
    words = HeldTokenizer()
    settings = ApiSettings(request_timeout_s=300.0 if hangs_up else 0.05)
    caller = Caller(app=create_app(ScriptedClient(model_info(), saying("")), words, settings))
    call = caller.start(body, path)
    try:
        assert await asyncio.to_thread(words.started.wait, 60.0)
        if hangs_up:
            caller.put(type="http.disconnect")
        await call
    finally:
        words.release.set()
    assert words.on_loop == [False]
    if hangs_up:
        assert caller.sent == []
    else:
        assert (caller.status, json.loads(caller.body)["error"]["code"]) == (504, "timeout")


async def test_many_tokens_are_spelled_in_a_thread() -> None:
    spelled_on = []

    class Spelling(HeldTokenizer):
        def token_strs(self, token_ids: Sequence[int]) -> list[str]:
            spelled_on.append(threading.get_ident() == self._loop_thread)
            return super().token_strs(token_ids)

    words = Spelling()
    words.release.set()
    app = create_app(ScriptedClient(model_info(), saying("")), words, ApiSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
        for num_words in (1, 10_000):
            body = {"prompt": "the answer " * num_words, "return_token_strs": True}
            answer = (await http.post("/tokenize", json=body)).json()
            assert tuple(answer["tokens"]) == token_ids(body["prompt"])
            assert answer["count"] == len(answer["tokens"]) > num_words
            assert answer["token_strs"] == tokenizer().token_strs(answer["tokens"])
            text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
            assert text == {"prompt": body["prompt"]}
    assert spelled_on == [True, False]


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize"])
async def test_calls_beyond_those_that_run_and_wait_are_refused_before_their_bodies_are_read(path: str) -> None:
    limits = {"max_concurrent": 2, "max_queued": 3, "max_sequences": 2, "max_n": 2}
    caller = Caller(**limits)
    callers = [Caller(app=caller.app) for _ in range(2 + 3 + SPARE_CALLS)]
    calls = [caller.start(None, path) for caller in callers]  # their bodies never come
    await asyncio.sleep(0)
    refused = Caller(app=caller.app)
    await refused.start(None, path)
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "overloaded")
    assert dict(refused.sent[0]["headers"])[b"retry-after"] == b"1"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(caller.app), base_url="http://api") as http:
        assert (await http.get("/health")).status_code == 200
    callers[0].put(type="http.disconnect")
    await calls[0]
    served = Caller(app=caller.app)
    await served.start(chat_body())
    assert served.status == 200
    for one in callers[1:]:
        one.put(type="http.disconnect")
    await asyncio.gather(*calls)


async def test_calls_wait_their_turn_and_further_ones_are_refused() -> None:
    release = asyncio.Event()

    def script(request: Request) -> list[Step]:
        return [release, *finishing(request, token_ids("the answer"))]

    async with serving(script, max_concurrent=2, max_queued=1, max_sequences=2, max_n=2, retry_after_s=2.5) as (
        http,
        cluster,
    ):
        running = [asyncio.create_task(http.post(CHAT, json=chat_body())) for _ in range(2)]
        await cluster.asked(2)
        waiting = asyncio.create_task(http.post(CHAT, json=chat_body(n=2)))
        while "outrider_requests_queued 1.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110 - seen from outside
            await asyncio.sleep(0)
        refused = await http.post(CHAT, json=chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "3"
        assert len(cluster.requests) == 2
        release.set()
        answers = await asyncio.gather(*running, waiting)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert len(cluster.requests) == 4


async def test_admission_is_fair_and_forgets_nobody() -> None:
    admission = Admission(ApiSettings(max_concurrent=3, max_sequences=3, max_n=3, max_queued=4))
    order: list[str] = []
    leave = {name: asyncio.Event() for name in "abcde"}

    async def call(name: str, num_sequences: int) -> None:
        async with admission.admitted(num_sequences):
            order.append(name)
            await leave[name].wait()

    tasks = {name: asyncio.create_task(call(name, size)) for name, size in zip("abcde", (2, 3, 1, 1, 1), strict=True)}
    await asyncio.sleep(0)
    assert order == ["a"]  # c would fit, but b came first
    tasks["d"].cancel()
    leave["a"].set()
    await asyncio.wait([tasks["d"], tasks["a"]])
    await asyncio.sleep(0)
    assert order == ["a", "b"]
    tasks["b"].cancel()
    await asyncio.wait([tasks["b"]])
    await asyncio.sleep(0)
    assert order == ["a", "b", "c", "e"]
    assert admission.num_running == 2
    for event in leave.values():
        event.set()
    await asyncio.gather(tasks["c"], tasks["e"])
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_turn_that_comes_as_its_caller_leaves_is_passed_on() -> None:
    admission = Admission(ApiSettings(max_concurrent=1, max_sequences=1, max_n=1))
    entered: list[str] = []

    async def call(name: str) -> None:
        async with admission.admitted(1):
            entered.append(name)

    async with admission.admitted(1):
        first, second = asyncio.create_task(call("first")), asyncio.create_task(call("second"))
        await asyncio.sleep(0)
    first.cancel()  # its turn has come, but it has not run since
    await asyncio.wait([first, second])
    assert entered == ["second"]
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_full_queue_is_an_error_that_says_when_to_come_back() -> None:
    admission = Admission(ApiSettings(max_concurrent=1, max_sequences=1, max_n=1, max_queued=1))
    async with admission.admitted(1):
        waiting = asyncio.create_task(admission.admitted(1).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="1 calls are queued"):
            await admission.admitted(1).__aenter__()
        waiting.cancel()
        await asyncio.wait([waiting])


# ---- the cluster's failures


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


async def test_an_overloaded_finish_is_a_429() -> None:
    def script(request: Request) -> list[Step]:
        return [Commit(request.id, 0, (), finish=FinishReason.OVERLOADED, error="full")]

    async with serving(script) as (http, _):
        response = await http.post(CHAT, json=chat_body())
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize("failure", [LinkClosed("the target went"), KeyError("a defect")])
async def test_a_failure_amid_a_stream_is_its_last_event(failure: Exception) -> None:
    text_is_out = asyncio.Event()
    caller = Caller(answering(text_is_out, failure))
    call = caller.start(chat_body(stream=True))
    await caller.got_body.wait()
    text_is_out.set()
    await call
    assert caller.status == 200
    *chunks, last = events(caller.body)
    assert chunks
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
    assert f"{request_id}: the logits are no numbers" in caplog.text


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


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_keys_that_everybody_can_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key\n")
    file.chmod(mode)
    ApiKeys.from_file(file)
    assert ("can read the API keys" in caplog.text) is warns


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


@pytest.mark.parametrize(("given", "kept"), [("my-id", True), ("x" * 129, False), ("no spaces", False)])
async def test_a_client_s_request_id_is_kept_where_it_is_sane(given: str, kept: bool) -> None:
    async with serving() as (http, _):
        response = await http.get("/health", headers={"x-request-id": given})
        (request_id,) = response.headers.get_list("x-request-id")
        assert (request_id == given) is kept


# ---- what is measured


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
