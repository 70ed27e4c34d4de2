"""Requests with a grammar through a real target: compiling, masks, forced drafts, and the same tokens under any drafting."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.embedded import Completion, EmbeddedCluster, PoolEntry
from benchmarks.fault_injection import MidRequest, TruncatedDrafter, every_second
from cluster.config import DrafterConfig, NgramOptions
from cluster.errors import Overloaded
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from cluster.types import FORCED, FinishReason, ModelInfo, Request
from drafters.registry import make_drafter
from engine.factory import load_target
from engine.grammar import waiting
from engine.grammar.compiling import Grammars
from engine.grammar.state import GrammarState
from engine.native import NativeTarget
from router.cost_model import TableCost
from router.planning.planner import StepPlanner
from tests.support.quick import first

pytestmark = pytest.mark.slow  # together they take seconds

EOS = 256
COST = TableCost((1, 64), (0.02, 0.03))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "colour": {"enum": ["red", "green"]}},
    "required": ["name", "age", "colour"],
}
GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    Grammar(GrammarKind.JSON_OBJECT),
    Grammar(GrammarKind.REGEX, "[a-z]{2,5}( [a-z]+){1,3}\\."),
    Grammar(GrammarKind.EBNF, 'root ::= "yes, " more | "no"\nmore ::= "always" | "sometimes"'),
)


@pytest.fixture(scope="module")
def engine(tiny_model_folder: Path) -> NativeTarget:
    target = load_target(tiny_model_folder, dtype="float32", kv_cache_bytes=2**22, max_model_len=512)
    assert isinstance(target, NativeTarget)
    return target


@pytest.fixture
def cluster(engine: NativeTarget) -> Iterator[EmbeddedCluster]:
    model = ModelInfo("tiny", EOS + 1, 512, (EOS,), "tiny")
    entry = PoolEntry(make_drafter(DrafterConfig(name="lookup", options=NgramOptions()), model))
    other = PoolEntry(TruncatedDrafter(make_drafter(DrafterConfig(name="o", options=NgramOptions()), model), len))
    pool = {"lookup": entry, "other": other}
    with EmbeddedCluster(engine, model, COST, pool, grammars=engine.grammars) as running:
        yield running
    engine.check_integrity()


def request(i: int, grammar: Grammar, drafting: bool = True, **parameters: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 90, "temperature": i % 2, "seed": i, "grammar": grammar, **parameters})
    return Request(f"r{i}", (1, 2, i % 12), sampling, float(i), chain=None if drafting else ())


def text(engine: NativeTarget, done: Completion) -> str:
    assert engine.grammars is not None
    return b"".join(engine.grammars.vocabulary.token_bytes[i] for i in done.token_ids).decode(errors="replace")


@pytest.mark.parametrize(
    "parameters",
    first(
        2,
        [
            {},
            {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": ((40, 5.0),)},
            {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
            {"top_logprobs": 2},
            {"ignore_eos": True, "min_tokens": 40},
            {"max_tokens": 60},
        ],
    ),
)
def test_drafting_changes_no_token(cluster: EmbeddedCluster, parameters: dict[str, Any]) -> None:
    grammars = [GRAMMARS[i // 2 % len(GRAMMARS)] for i in range(12)]
    drafted = cluster.complete([request(i, grammar, **parameters) for i, grammar in enumerate(grammars)])
    plain = cluster.complete([request(i, grammar, False, **parameters) for i, grammar in enumerate(grammars)])
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    assert {commit.drafter for done in drafted for commit in done.commits} >= {FORCED}
    assert {commit.drafter for done in plain for commit in done.commits} == {None}
    assert all(done.commits[-1].error is None for done in drafted)
    if "top_logprobs" in parameters:
        assert [[c.logprobs for c in done.commits] for done in plain]
        assert sum(len(commit.logprobs) for done in drafted for commit in done.commits) == sum(
            len(done.token_ids) for done in drafted
        )


def test_outputs_match_and_end(cluster: EmbeddedCluster, engine: NativeTarget) -> None:
    requests = [request(i, GRAMMARS[i % 2]) for i in range(16)]
    done = cluster.complete(requests)
    assert {one.commits[-1].finish for one in done} == {FinishReason.STOP}
    for one, asked in zip(done, requests, strict=True):
        value = json.loads(text(engine, one))
        assert isinstance(value, dict)
        if asked.sampling.grammar == GRAMMARS[0]:
            assert list(value) == ["name", "age", "colour"]


def test_what_is_forced_is_drafted_without_a_drafter(cluster: EmbeddedCluster) -> None:
    (done,) = cluster.complete([request(0, Grammar(GrammarKind.EBNF, 'root ::= "a" "nswer: forty-two"'))])
    assert len(done.commits) < len(done.token_ids) // 4
    assert {commit.drafter for commit in done.commits[1:]} == {FORCED}


def test_a_request_with_too_few_tokens_is_cut_off(cluster: EmbeddedCluster) -> None:
    (done,) = cluster.complete([request(0, GRAMMARS[0], max_tokens=7)])
    assert len(done.token_ids) == 7
    assert done.commits[-1].finish is FinishReason.LENGTH


def test_a_stop_token_ends_before_the_grammar_does(cluster: EmbeddedCluster, engine: NativeTarget) -> None:
    assert engine.grammars is not None
    (comma,) = engine.grammars.vocabulary.tokens_of(b",")
    (done,) = cluster.complete([request(0, GRAMMARS[0], stop_token_ids=(comma,))])
    assert done.token_ids[-1] == comma
    assert done.commits[-1].finish is FinishReason.STOP


def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_request_alone(cluster: EmbeddedCluster) -> None:
    bad, good = cluster.complete([request(0, Grammar(GrammarKind.REGEX, "((")), request(1, GRAMMARS[3])])
    assert bad.commits[-1].finish is FinishReason.REFUSED
    assert "its grammar cannot be compiled" in str(bad.commits[-1].error)
    assert good.commits[-1].finish is FinishReason.STOP


@pytest.fixture
def compile_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Grammar], Any]], None]:
    return lambda compiles: monkeypatch.setattr(Grammars, "compile", lambda self, grammar: compiles(grammar))


def test_a_compiler_that_fails_unexpectedly_ends_its_request_alone(cluster: EmbeddedCluster, compile_by: Any) -> None:
    def failing(grammar: Grammar) -> Any:
        raise TypeError("a defect")

    plain = request(1, GRAMMARS[0])
    plain = replace(plain, sampling=replace(plain.sampling, grammar=None, max_tokens=5, ignore_eos=True))
    compile_by(failing)
    bad, good = cluster.complete([request(0, Grammar(GrammarKind.REGEX, "fails|here")), plain])
    assert bad.commits[-1].error == "its grammar cannot be compiled: TypeError: a defect"
    assert len(good.token_ids) == 5


def test_no_round_waits_for_a_compile(cluster: EmbeddedCluster, engine: NativeTarget, compile_by: Any) -> None:
    release, grammars = threading.Event(), engine.grammars
    assert grammars is not None
    compile_now = grammars.compile

    def late(grammar: Grammar) -> Any:
        assert release.wait(60)
        return compile_now(grammar)

    compile_by(late)
    slow = cluster.begin([request(0, Grammar(GrammarKind.REGEX, "late|never"))])
    plain = replace(request(1, GRAMMARS[0]), sampling=SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    (quick,) = cluster.complete([plain])
    assert len(quick.token_ids) == 5
    assert not slow.completions[0].commits
    release.set()
    slow.ended.result()
    assert slow.completions[0].commits[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("source", ["root ::= root | root root", 'root ::= "yes" x\nx ::= x'])
def test_a_grammar_that_allows_no_token_refuses_its_request_alone(cluster: EmbeddedCluster, source: str) -> None:
    bad, good = cluster.complete([request(0, Grammar(GrammarKind.EBNF, source)), request(1, GRAMMARS[3])])
    assert bad.commits[-1].finish is FinishReason.REFUSED
    assert "every token is masked" in str(bad.commits[-1].error)
    assert good.commits[-1].finish is FinishReason.STOP


def test_a_compile_that_outlasts_its_deadline_refuses_the_request_for_now(
    cluster: EmbeddedCluster, compile_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def never(grammar: Grammar) -> Any:
        assert release.wait(60)
        raise RuntimeError("nobody waits for this")

    compile_by(never)
    monkeypatch.setattr(waiting, "COMPILE_S", 0.0)
    try:
        with pytest.raises(Overloaded, match="was not compiled within"):
            cluster.complete([request(0, Grammar(GrammarKind.REGEX, "too|late"))])
    finally:
        release.set()


def test_grammars_beyond_the_queue_are_refused_for_now(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_QUEUED", 0)
    with pytest.raises(Overloaded, match="try again later"):
        cluster.complete([request(0, Grammar(GrammarKind.REGEX, "queue|full"))])


def test_a_token_that_its_mask_allows_and_the_grammar_refuses_ends_its_request_alone(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    masks, defect = GrammarState.masks, Grammar(GrammarKind.EBNF, 'root ::= "yes, " [a-z]* "!"')

    def all_allowed(self: GrammarState, *asked: Any) -> Any:
        found = masks(self, *asked)
        return found.fill_(-1) if self.grammar.grammar == defect else found

    monkeypatch.setattr(GrammarState, "masks", all_allowed)
    bad, good = cluster.complete([request(2, defect), request(1, GRAMMARS[0])])
    assert bad.commits[-1].finish is FinishReason.ERROR
    assert "the grammar refuses token" in str(bad.commits[-1].error)
    assert good.commits[-1].finish is FinishReason.STOP
    assert "a defect: the grammar refuses token" in caplog.text
    assert cluster.complete([request(3, GRAMMARS[0])])[0].commits[-1].finish is FinishReason.STOP


def test_a_preempted_request_goes_on_in_its_grammar(engine: NativeTarget) -> None:
    model = ModelInfo("tiny", EOS + 1, 512, (EOS,), "tiny")
    planner = MidRequest(StepPlanner(), 40, every_second)
    outputs = []
    for chosen in (StepPlanner(), planner):
        with EmbeddedCluster(engine, model, COST, {}, chosen, grammars=engine.grammars) as running:
            outputs.append([one.token_ids for one in running.complete([request(i, GRAMMARS[0]) for i in range(4)])])
            num_preempted = running.loop.telemetry.num_preempted
    assert num_preempted > 0
    assert outputs[0] == outputs[1]


def test_a_bad_word_gives_way_where_the_grammar_leaves_nothing_else(cluster: EmbeddedCluster, engine: NativeTarget) -> None:
    assert engine.grammars is not None
    (a,) = [i for i, spelled in enumerate(engine.grammars.vocabulary.token_bytes) if spelled == b"a"]
    grammar = Grammar(GrammarKind.REGEX, "(ab){9}[ac]{20}")
    for i, drafting in enumerate((True, False, True, False)):
        (done,) = cluster.complete([request(i // 2, grammar, drafting, bad_words=((a,),))])
        assert text(engine, done) == "ab" * 9 + "c" * 20
