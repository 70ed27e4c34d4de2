"""Structured output in the API: which field asks for which grammar, and which grammars are refused."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from cluster.errors import Overloaded
from cluster.grammar import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from cluster.types import ModelInfo
from deploy.api import grammar_checker
from deploy.api.app import create_app
from deploy.api.errors import ApiError
from deploy.api.grammar_checker import GrammarChecker
from deploy.api.schema import ChatRequest, CompletionRequest
from deploy.api.settings import ApiSettings
from deploy.api.structured import grammar_of
from deploy.api.tokenizer import Tokenizer
from tests.support.api import MODEL, chat_body, completion_body, saying
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
    app = create_app(cluster, tokenizer, ApiSettings(**settings))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
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


@pytest.mark.slow
async def test_a_check_that_takes_too_long_is_ended_and_the_next_one_runs(tiny_model_folder: Path) -> None:
    info = ModelInfo(MODEL, 257, 256, (256,), "tiny")
    checker = GrammarChecker(tiny_model_folder, info, retry_after_s=1.0)
    await checker.check("guided_json", Grammar(GrammarKind.JSON_OBJECT))
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    checker._check_s = 0.0
    for kind in (Overloaded, ApiError):
        with pytest.raises(kind, match="takes more than 0 seconds"):
            await checker.check("guided_json", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(many)))
    checker._check_s = 60.0
    await checker.check("guided_json", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", ["(.{1,1000}){1,1000}", "((a{1,1000}){1,1000}){1,1000}", "(((((a*)*)*)*)*)*b", "(" * 5000 + ")" * 5000]
)
async def test_a_hostile_pattern_is_checked_in_bounded_time_whatever_comes_of_it(
    tiny_model_folder: Path, pattern: str
) -> None:
    """Refused, or quick enough on this machine to be served: `engine.grammar.checking` measures that."""
    checker = GrammarChecker(tiny_model_folder, ModelInfo(MODEL, 257, 256, (256,), "tiny"), retry_after_s=1.0)
    try:
        with suppress(Overloaded):  # the first check may fail
            await checker.check("guided_regex", Grammar(GrammarKind.REGEX, pattern))
        await checker.check("guided_regex", Grammar(GrammarKind.REGEX, pattern))
    except ApiError as refused:
        assert (refused.status, refused.param) == (HTTPStatus.BAD_REQUEST, "guided_regex")  # noqa: PT017
    assert [*checker._known.values()] != []
    await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a+"))


@pytest.mark.slow
async def test_a_check_whose_process_dies_refuses_the_grammar(tiny_model_folder: Path) -> None:
    checker = GrammarChecker(tiny_model_folder, ModelInfo(MODEL, 257, 256, (256,), "tiny"), retry_after_s=1.0)
    process = checker._running()
    process.kill()
    checker._running = lambda: process  # type: ignore[method-assign]
    for kind in (Overloaded, ApiError):
        with pytest.raises(kind, match="takes the compiler down"):
            await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a"))


@pytest.mark.parametrize("failure", [TimeoutError, ConnectionError])
async def test_a_check_that_fails_once_refuses_no_grammar(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    checker = GrammarChecker(tiny_model_folder, ModelInfo(MODEL, 257, 256, (256,), "tiny"), retry_after_s=1.0)
    outcomes: list[Exception | None] = [failure(), None]

    def refusal(grammar: Grammar) -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    monkeypatch.setattr(checker, "_refusal", refusal)
    with pytest.raises(Overloaded):
        await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a"))
    for _ in range(2):
        await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a"))
    assert outcomes == []


@pytest.mark.parametrize("failure", [TimeoutError, ConnectionError])
@pytest.mark.parametrize(("refused_s", "expected"), [(60.0, 2), (0.0, 4)])
async def test_a_check_that_fails_again_refuses_the_grammar_for_a_time(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, failure: type[Exception], refused_s: float, expected: int
) -> None:
    monkeypatch.setattr(grammar_checker, "REFUSED_S", refused_s)
    checker = GrammarChecker(tiny_model_folder, ModelInfo(MODEL, 257, 256, (256,), "tiny"), retry_after_s=1.0)
    num_checks = 0

    def refusal(grammar: Grammar) -> None:
        nonlocal num_checks
        num_checks += 1
        raise failure

    monkeypatch.setattr(checker, "_refusal", refusal)
    for kind in (Overloaded, ApiError, ApiError, ApiError):
        with pytest.raises(kind):
            await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a"))
    assert num_checks == expected


@pytest.mark.parametrize("command", ["sleep 60", "false", "/nowhere/python"])
async def test_a_check_that_does_not_start_refuses_no_grammar(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(grammar_checker, "START_S", 0.05)
    checker = GrammarChecker(tiny_model_folder, ModelInfo(MODEL, 257, 256, (256,), "tiny"), retry_after_s=1.0)
    checker._command = command.split()
    for _ in range(2):
        with pytest.raises(Overloaded):
            await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a"))
    assert not checker._known


@pytest.mark.slow
async def test_a_cancelled_check_is_not_made(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(tiny_model_folder, ModelInfo(MODEL, 257, 256, (256,), "tiny"), retry_after_s=1.0)
    begun, go_on, made = asyncio.Event(), threading.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def refusal(grammar: Grammar) -> str | None:
        made.append(grammar.source)
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)
        return None

    monkeypatch.setattr(checker, "_refusal", refusal)
    checks = [asyncio.create_task(checker.check("guided_regex", Grammar(GrammarKind.REGEX, one))) for one in "abc"]
    await begun.wait()
    assert await asyncio.to_thread(lambda: "the threads of others are free") != ""
    checks[1].cancel()
    await asyncio.wait(checks[1:2])
    go_on.set()
    await asyncio.gather(checks[0], checks[2])
    assert made == ["a", "c"]
    assert checker.waiting.num_held == 0


@pytest.mark.slow
async def test_a_check_ends_with_the_deadline_of_its_call(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(GrammarChecker, "_refusal", lambda *_: None if go_on.wait(60) else "waited too long")
    async with serving(tiny_model_folder, request_timeout_s=0.2) as (http, cluster):
        response = await http.post("/v1/completions", json=completion_body(guided_regex="a"))
        go_on.set()
        assert response.status_code == HTTPStatus.GATEWAY_TIMEOUT, response.text
        assert cluster.requests == []


async def test_too_many_waiting_checks_are_refused(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 0)
    checker = GrammarChecker(tiny_model_folder, ModelInfo(MODEL, 257, 256, (256,), "tiny"), retry_after_s=1.0)
    with pytest.raises(Overloaded):
        await checker.check("guided_regex", Grammar(GrammarKind.REGEX, "a"))


async def test_a_tenant_leaves_room_for_the_grammars_of_others(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 4)
    checker = GrammarChecker(tiny_model_folder, ModelInfo(MODEL, 257, 256, (256,), "tiny"), retry_after_s=1.0)
    checker.waiting.is_shared = True
    go_on = threading.Event()
    monkeypatch.setattr(checker, "_refusal", lambda _: None if go_on.wait(60) else "waited too long")

    def check(source: str, tenant: str) -> asyncio.Task[None]:
        return asyncio.create_task(checker.check("guided_regex", Grammar(GrammarKind.REGEX, source), tenant))

    greedy = [check(source, "greedy") for source in "abc"]
    other = check("d", "other")
    await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED)
    go_on.set()
    outcomes = await asyncio.gather(*greedy, other, return_exceptions=True)
    assert [type(one) for one in outcomes] == [type(None), type(None), Overloaded, type(None)]
    assert checker.waiting.num_held == 0
