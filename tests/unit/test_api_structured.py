"""Structured output in the API: which field asks for which grammar, and which grammars are refused."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from cluster.errors import Overloaded
from cluster.sampling_params import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from cluster.types import ModelInfo
from deploy.api import grammar_checker
from deploy.api.errors import ApiError
from deploy.api.grammar_checker import Checked, CheckLimits, GrammarChecker, GrammarProcess
from deploy.api.schema import ChatRequest, CompletionRequest
from deploy.api.structured import grammar_of
from deploy.api.tokenizer import Tokenizer
from tests.support.api import MODEL, app_of, chat_body, client_of, completion_body, saying
from tests.support.scripted import ScriptedClient

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}

ASKED: list[tuple[dict[str, Any], str, GrammarKind, str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format", GrammarKind.JSON_OBJECT, ""),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        "response_format.json_schema.schema",
        GrammarKind.JSON_SCHEMA,
        json.dumps(SCHEMA),
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        "response_format.format",
        GrammarKind.STRUCTURAL_TAG,
        json.dumps({"type": "structural_tag", "format": {"type": "any_text"}}),
    ),
    ({"guided_json": SCHEMA}, "guided_json", GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ({"guided_json": '{"type": "null"}'}, "guided_json", GrammarKind.JSON_SCHEMA, '{"type": "null"}'),
    ({"guided_regex": "a+"}, "guided_regex", GrammarKind.REGEX, "a+"),
    ({"guided_choice": ["a", 'b"\\\n']}, "guided_choice", GrammarKind.EBNF, 'root ::= "a" | "b\\"\\\\\\x0A"'),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", GrammarKind.EBNF, 'root ::= "a"'),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", GrammarKind.JSON_OBJECT, ""),
    ({"structured_outputs": {"regex": "b"}}, "structured_outputs.regex", GrammarKind.REGEX, "b"),
    ({"structured_outputs": {"choice": ["c"]}}, "structured_outputs.choice", GrammarKind.EBNF, 'root ::= "c"'),
    ({"structured_outputs": {"grammar": "g"}}, "structured_outputs.grammar", GrammarKind.EBNF, "g"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        GrammarKind.STRUCTURAL_TAG,
        "{}",
    ),
]


@pytest.mark.parametrize(("fields", "path", "kind", "source"), ASKED)
def test_each_field_asks_for_its_grammar_on_both_routes(
    fields: dict[str, Any], path: str, kind: GrammarKind, source: str
) -> None:
    for body in (ChatRequest(**chat_body(**fields)), CompletionRequest(**completion_body(**fields))):
        assert grammar_of(body) == (path, Grammar(kind, source))


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_text_needs_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(ChatRequest(**chat_body(**fields))) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        grammar_of(ChatRequest(**chat_body(**fields)))
    assert (refused.value.status, refused.value.param) == (HTTPStatus.BAD_REQUEST, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"guided_json": 5},
        {"structured_outputs": {"whitespace_pattern": " *"}},
        {"structured_outputs": {"xml": "a"}},
        {"response_format": {"type": "xml"}},
    ],
)
def test_malformed_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatRequest(**chat_body(**fields))


def test_a_grammar_that_is_too_long_is_refused() -> None:
    with pytest.raises(ApiError, match=f"at most {MAX_GRAMMAR_CHARS} characters, got") as refused:
        grammar_of(ChatRequest(**chat_body(guided_regex="a" * (MAX_GRAMMAR_CHARS + 1))))
    assert refused.value.param == "guided_regex"


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedClient]]:
    tokenizer = Tokenizer.from_folder(folder)
    info = ModelInfo(MODEL, tokenizer.vocab_size, 256, (tokenizer.vocab_size - 1,), "tiny")
    cluster = ScriptedClient(info, saying(""))
    async with client_of(app_of(cluster, tokenizer, **settings)) as http:
        yield http, cluster


@pytest.mark.slow
async def test_a_grammar_is_checked_before_it_reaches_a_target(tiny_model_folder: Path) -> None:
    async with serving(tiny_model_folder) as (http, cluster):

        async def refusal(**fields: Any) -> dict[str, Any]:
            response = await http.post("/v1/completions", json=completion_body(**fields))
            assert response.status_code == HTTPStatus.BAD_REQUEST, response.text
            return dict(response.json()["error"])

        answer = await http.post("/v1/completions", json=completion_body(guided_json=SCHEMA, n=2))
        assert answer.status_code == HTTPStatus.OK, answer.text
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
        assert [request.sampling.grammar for request in cluster.requests] == [grammar, grammar]
        for fields, param, reason in (
            ({"guided_json": ENDLESS}, "guided_json", "no output was found that matches it and ends"),
            (
                {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}},
                "guided_json",
                "minimum greater than maximum",
            ),
            ({"guided_json": '{"items":' * 3000}, "guided_json", "is not JSON"),
            ({"guided_regex": "(("}, "guided_regex", "parenthesis is not closed"),
            ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "is not defined"),
        ):
            error = await refusal(**fields)
            assert error["param"] == param
            assert reason in error["message"]
        assert len(cluster.requests) == 2


TINY = ModelInfo(MODEL, 257, 256, (256,), "tiny")


@pytest.mark.slow
async def test_a_check_is_limited_in_processor_time_and_the_next_one_runs(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, 1.0, CheckLimits(cpu_s=1))
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    await checker.check("guided_json", Grammar(GrammarKind.JSON_OBJECT))
    process = checker.process._process
    for _ in range(2):
        with pytest.raises(ApiError, match="takes more than 1 seconds of processor time") as refused:
            await checker.check("guided_json", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wide)))
        assert refused.value.status == HTTPStatus.BAD_REQUEST
    await checker.check("guided_json", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    assert checker.process._process is process


@pytest.mark.slow
async def test_a_check_that_hangs_or_is_killed_refuses_no_grammar(tiny_model_folder: Path) -> None:
    """As a loaded machine, or one without memory, has it."""
    checker = GrammarChecker(tiny_model_folder, TINY, 1.0, CheckLimits(hang_s=0.001))
    for _ in range(2):
        with pytest.raises(Overloaded, match="SIGALRM"):
            await checker.check("guided_json", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    for ended, what in ((signal.SIGKILL, "SIGKILL"), (signal.SIGALRM, "SIGALRM")):
        with pytest.raises(Overloaded, match=what):
            checker.process._checked({"ended": ended, "cpu_s": 1.0})
    for ended in (signal.SIGSEGV, signal.SIGABRT, 1):
        assert checker.process._checked({"ended": ended, "cpu_s": 1.0}).refusal is not None


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["(.{1,1000}){1,1000}", "(((((a*)*)*)*)*)*b", "(" * 5000 + ")" * 5000])
async def test_a_hostile_pattern_is_checked_in_bounded_time_whatever_comes_of_it(
    tiny_model_folder: Path, pattern: str
) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, 1.0, CheckLimits(cpu_s=1))
    try:
        await checker.check("guided_regex", Grammar(GrammarKind.REGEX, pattern))
    except ApiError as refused:
        assert (refused.status, refused.param) == (HTTPStatus.BAD_REQUEST, "guided_regex")  # noqa: PT017
    assert [*checker._known.values()] != []
    await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a+"))


@pytest.mark.slow
async def test_a_process_that_has_ended_is_started_again(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, retry_after_s=1.0)
    await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a"))
    assert checker.process._process is not None
    checker.process._process.kill()
    checker.process._process.wait()
    await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "b"))


@pytest.mark.slow
def test_the_late_error_of_a_check_leaves_the_next_process_alone(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, read, first = GrammarProcess(tiny_model_folder, TINY, 1.0), grammar_checker._read, list[Any]()

    def read_late(line: socket.socket) -> dict[str, Any]:
        """Of the first check: its process ends, and another check has started the next one, before the error shows."""
        if line.gettimeout() == CheckLimits().answer_s and not first:
            first.append(process._process)
            first[0].kill()
            first[0].wait()
            process.check(Grammar(GrammarKind.REGEX, "b"))
        return read(line)

    monkeypatch.setattr(grammar_checker, "_read", read_late)
    with pytest.raises(Overloaded):
        process.check(Grammar(GrammarKind.REGEX, "a"))
    assert process._process not in (None, first[0])
    assert process._process.poll() is None


@pytest.mark.parametrize("command", ["sleep 60", "false", "/nowhere/python"])
async def test_a_check_that_does_not_start_refuses_no_grammar(tiny_model_folder: Path, command: str) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, 1.0, CheckLimits(start_s=0.05))
    checker.process._command = ["sh", "-c", command]
    for _ in range(2):
        with pytest.raises(Overloaded):
            await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a"))
    assert not checker._known


class Held:
    """Checks that end when they are told to. ``begun``: the patterns of those that have begun, in order."""

    def __init__(self, checker: GrammarChecker) -> None:
        self.begun: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._ends: dict[str, threading.Event] = {}
        self._outcomes: dict[str, Checked | Overloaded] = {}
        checker.process.check = self._check  # type: ignore[method-assign]

    def _check(self, grammar: Grammar) -> Checked:
        end = self._ends.setdefault(grammar.source, threading.Event())
        self.begun.append(grammar.source)
        self._loop.call_soon_threadsafe(self._changed.set)
        assert end.wait(60)
        outcome = self._outcomes[grammar.source]
        if isinstance(outcome, Overloaded):
            raise outcome
        return outcome

    async def wait_for(self, num_begun: int) -> None:
        while len(self.begun) < num_begun:
            self._changed.clear()
            await self._changed.wait()

    def end(self, source: str, outcome: Checked | Overloaded | None = None) -> None:
        self._outcomes[source] = outcome or Checked(None, 0.1)
        self._ends.setdefault(source, threading.Event()).set()


def checking(checker: GrammarChecker, source: str, tenant: str = "") -> asyncio.Task[None]:
    return asyncio.create_task(checker.check("guided_regex", Grammar(GrammarKind.REGEX, source), tenant))


async def test_a_slow_grammar_of_one_tenant_holds_up_no_other_tenant(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, retry_after_s=1.0)
    checker.set_tenants(("greedy", "other"))
    held = Held(checker)
    slow = [checking(checker, source, "greedy") for source in ("slow", "slower")]
    await held.wait_for(1)
    held.end("quick")
    await checking(checker, "quick", "other")
    assert held.begun == ["slow", "quick"]
    held.end("slow", Checked("takes long", 5.0))
    held.end("slower")
    (refused, _) = await asyncio.gather(*slow, return_exceptions=True)
    assert isinstance(refused, ApiError)


async def test_next_is_the_tenant_whose_checks_took_the_least_time(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, retry_after_s=1.0)
    checker.set_tenants("abc")
    held = Held(checker)
    begun = [checking(checker, "a1", "a"), checking(checker, "b1", "b")]
    await held.wait_for(2)
    waiting = [checking(checker, *one) for one in (("a2", "a"), ("b2", "b"), ("a3", "a"), ("c1", "c"))]
    await asyncio.sleep(0)
    held.end("a1", Checked(None, 5.0))
    await held.wait_for(3)
    held.end("b1", Checked(None, 0.01))
    await held.wait_for(4)  # while c1 goes on: the threads of two that end at once may be heard in any order
    for source in ("c1", "b2", "a2", "a3"):
        held.end(source, Checked(None, 0.01))
    await asyncio.gather(*begun, *waiting)
    assert held.begun[2] == "c1"
    assert held.begun.index("b2") < held.begun.index("a2")


async def test_calls_with_one_grammar_share_its_check(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, 1.0, CheckLimits(max_waiting=0))
    held = Held(checker)
    calls = [checking(checker, "a") for _ in range(64)]
    await held.wait_for(1)
    calls[0].cancel()
    held.end("a")
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in outcomes] == [asyncio.CancelledError, *[type(None)] * 63]
    await checking(checker, "a")
    assert held.begun == ["a"]
    assert checker.is_idle


async def test_a_check_that_could_not_be_made_is_made_at_the_next_call(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, retry_after_s=1.0)
    held = Held(checker)
    held.end("a", Overloaded("try again later", 1.0))
    for _ in range(3):
        with pytest.raises(Overloaded):
            await checking(checker, "a")
    held.end("a")
    await checking(checker, "a")
    assert held.begun == ["a"] * 4


async def test_a_cancelled_check_is_not_made(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, retry_after_s=1.0)
    held = Held(checker)
    checks = [checking(checker, one) for one in "abcd"]
    await held.wait_for(2)
    assert await asyncio.to_thread(lambda: "the threads of others are free") != ""
    checks[2].cancel()
    await asyncio.wait(checks[2:3])
    again = checking(checker, "d")
    for source in "abd":
        held.end(source)
    await asyncio.gather(*checks[:2], checks[3], again)
    assert sorted(held.begun) == ["a", "b", "d"]
    assert checker.is_idle


async def test_a_check_ends_with_the_deadline_of_its_call(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(GrammarProcess, "check", lambda *_: Checked(None, 0.0) if go_on.wait(60) else None)
    async with serving(tiny_model_folder, request_timeout_s=0.2) as (http, cluster):
        response = await http.post("/v1/completions", json=completion_body(guided_regex="a"))
        go_on.set()
        assert response.status_code == HTTPStatus.GATEWAY_TIMEOUT, response.text
        assert cluster.requests == []


async def test_too_many_waiting_checks_are_refused_and_leave_room_for_other_tenants(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, TINY, 1.0, CheckLimits(max_waiting=2))
    checker.set_tenants(("greedy", "other"))
    held = Held(checker)
    greedy = [checking(checker, source, "greedy") for source in "abcd"]
    others = [checking(checker, source, "other") for source in "ef"]
    for source in "abcdef":
        held.end(source)
    outcomes = await asyncio.gather(*greedy, *others, return_exceptions=True)
    assert [getattr(one, "code", None) for one in outcomes] == [None, None, "queue_full", "queue_full", None, None]
    assert checker.is_idle
