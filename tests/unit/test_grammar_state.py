"""Masks, forced tokens and ends of one request's output; which grammars wait, and how much memory compiled ones take."""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks.json_schemas import make_schemas
from cluster.errors import InvalidField
from cluster.sampling_params import Grammar, GrammarKind
from deploy.api.tools import THINK, AnswerForm, ToolUse
from engine.grammar import checking, closing, compiling, waiting
from engine.grammar.compiling import CompiledGrammar, Grammars
from engine.grammar.state import GrammarState
from engine.grammar.vocabulary import GrammarVocabulary
from engine.grammar.waiting import GrammarRefusal, PendingGrammars
from tests.support.grammars import EOS, of_schema, schema_grammar, tag_grammar
from tests.support.quick import first
from tests.support.waiting import no_more_threads

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def tokens(grammars: Grammars, text: str) -> list[int]:
    return grammars.vocabulary.tokens_of(text.encode())


def allowed(grammars: Grammars, state: GrammarState, drafts: list[int], row: int, **how: Any) -> str:
    """The characters that a row allows; "$" for the end."""
    mask = state.masks(drafts, 0, how.get("masked_ids", ()), how.get("num_masked", 0))[row].numpy()
    end = "$" if grammars.vocabulary.allows_end(mask) else ""
    return bytes(grammars.vocabulary.allowed_bytes(mask).tolist()).decode("latin-1") + end


def test_each_row_is_masked_after_its_drafts_and_the_state_stays(grammars: Grammars) -> None:
    state = grammars.compile(Grammar(GrammarKind.REGEX, "a[bc]d?")).follow(())
    drafts = tokens(grammars, "ab")
    assert [allowed(grammars, state, drafts, row) for row in range(3)] == ["a", "bc", "d$"]
    assert allowed(grammars, state, [], 0) == "a"


def test_rows_behind_a_forbidden_draft_or_the_end_are_left_alone(grammars: Grammars) -> None:
    state = grammars.compile(Grammar(GrammarKind.REGEX, "ab")).follow(())
    every = allowed(grammars, state, tokens(grammars, "ax"), 2)
    assert len(every) > 200
    assert allowed(grammars, state, [*tokens(grammars, "ab"), EOS, 5], 3) == every
    assert allowed(grammars, state, [*tokens(grammars, "ab"), EOS, 5], 2) == "$"


def test_a_terminated_matcher_takes_nothing_and_raises_nothing(grammars: Grammars) -> None:
    state = grammars.compile(Grammar(GrammarKind.REGEX, "ab")).follow(tokens(grammars, "ab"))
    state.advance([EOS, 7, 8])
    assert state.has_ended
    assert state.num_valid([EOS]) == state.num_valid(tokens(grammars, "a")) == 0
    assert state.forced() == []


def test_drafts_are_cut_where_the_grammar_forbids_them(grammars: Grammars) -> None:
    state = of_schema(grammars, PERSON).follow(tokens(grammars, '{"name": "'))
    assert state.num_valid(tokens(grammars, 'Bob", "age": x')) == len('Bob", "age": ')
    assert state.num_valid([EOS]) == 0
    assert state.num_valid(tokens(grammars, "a\x05b")) == 1
    with pytest.raises(ValueError, match="does not fit the grammar"):
        state.advance(tokens(grammars, "\n"))


def test_rolling_back_takes_the_drafts_and_not_the_output(grammars: Grammars) -> None:
    state = of_schema(grammars, {"type": "string"}).follow(tokens(grammars, '"' + "x" * 500))
    matcher, rolled_back = state._matcher, []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

        def rollback(self, num: int) -> None:
            rolled_back.append(num)
            matcher.rollback(num)

    state._matcher = Spy()  # type: ignore[assignment]
    state.masks(tokens(grammars, "yy"), 0, (), 0)
    state.num_valid(tokens(grammars, 'yy"'))
    assert rolled_back == [2, 3]


def test_min_tokens_gives_way_where_only_the_end_is_left(grammars: Grammars) -> None:
    one_or_more = grammars.compile(Grammar(GrammarKind.REGEX, "ab?")).follow(())
    drafts = tokens(grammars, "ab")
    assert allowed(grammars, one_or_more, drafts, 1) == "b$"
    assert allowed(grammars, one_or_more, drafts, 1, masked_ids=(EOS,), num_masked=3) == "b"
    assert allowed(grammars, one_or_more, drafts, 2, masked_ids=(EOS,), num_masked=3) == "$"


def test_what_the_grammar_forces_is_known(grammars: Grammars) -> None:
    state = of_schema(grammars, PERSON).follow(())
    assert state.forced() == tokens(grammars, '{"name": "')
    assert of_schema(grammars, PERSON).follow(tokens(grammars, '{"name": "x')).forced() == []
    choice = grammars.compile(Grammar(GrammarKind.EBNF, 'root ::= "yes" | "no"'))
    assert choice.follow(tokens(grammars, "y")).forced() == [*tokens(grammars, "es"), EOS]


def test_an_endless_forced_text_is_cut(grammars: Grammars) -> None:
    state = grammars.compile(Grammar(GrammarKind.EBNF, 'root ::= "a" root')).follow(())
    assert 0 < len(state.forced()) <= 128


def output(grammars: Grammars, grammar: CompiledGrammar, max_tokens: int, seed: int) -> list[int]:
    """Random tokens that the masks allow, until the end."""
    choose, state, ids = random.Random(seed), grammar.follow((), max_tokens), list[int]()
    while len(ids) < max_tokens and not state.has_ended:
        mask = state.masks((), 0, (), 0)[0].numpy()
        options = grammars.vocabulary.tokens_of(bytes(grammars.vocabulary.allowed_bytes(mask).tolist()))
        options += [EOS] * grammars.vocabulary.allows_end(mask)
        found = [token for token in options if token != EOS or choose.random() < 0.2]
        ids += state.end_in_time((), 0, [choose.choice(found or options)], max_tokens - len(ids))
        state.advance(ids[-1:])
    return ids


@pytest.mark.parametrize("index", first(15, range(60)))
def test_random_outputs_are_valid_and_end_in_time(grammars: Grammars, index: int) -> None:
    schema = make_schemas(60, seed=1)[index]
    grammar = of_schema(grammars, schema)
    assert grammar.shortest_len is not None
    for max_tokens in (grammar.shortest_len, grammar.shortest_len + 7, 300):
        ids = output(grammars, grammar, max(max_tokens, grammar.shortest_len), seed=max_tokens)
        assert ids[-1] == EOS
        text = b"".join(grammars.vocabulary.token_bytes[i] for i in ids).decode(errors="replace")
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("index", first(6, range(60)))
def test_calls_of_tools_are_valid_and_end_in_time(grammars: Grammars, index: int) -> None:
    schema = make_schemas(60, seed=1)[index]
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    call = {"type": "tag", "begin": '<tool_call>\n{"name": "f", "arguments": ', "content": content, "end": "}\n</tool_call>"}
    calls = {
        "type": "tags_with_separator",
        "tags": [call],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": False,
    }
    grammar = grammars.compile(tag_grammar(calls))
    assert grammar.shortest_len is not None
    for max_tokens in (grammar.shortest_len, grammar.shortest_len + 7, 400):
        ids = output(grammars, grammar, max(max_tokens, grammar.shortest_len), seed=max_tokens)
        assert ids[-1] == EOS
        text = b"".join(grammars.vocabulary.token_bytes[i] for i in ids).decode(errors="surrogatepass")
        for part in text.split("<tool_call>")[1:]:
            arguments = json.loads(part.partition("</tool_call>")[0])["arguments"]
            jsonschema.validate(arguments, schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_a_verify_span_end_as_single_tokens_do(grammars: Grammars, seed: int) -> None:
    grammar = of_schema(grammars, {"type": "array", "items": PERSON})
    max_tokens = 90
    ids = output(grammars, grammar, max_tokens, seed)
    choose = random.Random(seed)
    for at in range(len(ids) - 1):
        drafts = ids[at : at + choose.randint(0, 8)]
        num_before = choose.randint(0, len(drafts))
        rows = ids[at + num_before : at + len(drafts) + 1]
        state = grammar.follow(ids[:at], max_tokens)
        assert state.end_in_time(drafts, num_before, rows, max_tokens - at) == rows


def test_rows_behind_a_replaced_token_end_in_time_where_the_draft_guesses_it(grammars: Grammars) -> None:
    at = tokens(grammars, '[{"name": "x", "age": ')
    grammar, num_left = of_schema(grammars, {"type": "array", "items": PERSON}), len("1}]") + 1
    chosen = tokens(
        grammars, "11,"
    )  # as plain decoding chooses after "", "1" and "1}": it goes on with the number, the array
    state = grammar.follow(at, len(at) + num_left)
    for num_before in (0, 1):
        drafts = tokens(grammars, "1}")
        assert state.end_in_time(drafts, num_before, chosen[num_before:], num_left) == tokens(grammars, "1}]")[num_before:]
    for i, (token, end) in enumerate(zip(chosen, tokens(grammars, "1}]"), strict=True)):
        after = grammar.follow([*at, *tokens(grammars, "1}]")[:i]], len(at) + num_left)
        assert after.end_in_time((), 0, [token], num_left - i) == [end]


def test_a_grammar_whose_ends_are_found_slowly_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target looks for them between its passes."""
    person = schema_grammar(PERSON)
    assert checking.refusal(grammars, person) is None
    monkeypatch.setattr(checking, "MAX_END_S", -1.0)
    assert "finding a short end" in str(checking.refusal(grammars, person))


def test_an_output_that_cannot_end_in_time_is_left_alone(grammars: Grammars) -> None:
    state = of_schema(grammars, PERSON).follow((), 5)
    assert state.end_in_time((), 0, tokens(grammars, "{"), 5) == tokens(grammars, "{")


WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(150)}}
HOSTILE = (
    WIDE | {"required": list(WIDE["properties"])},
    {"type": "array", "minItems": 3, "items": {"type": "string", "minLength": 200, "maxLength": 400}},
    {"type": "array", "items": {"type": "string", "pattern": "^([a-f][0-9]{3}|[g-k]{9}){6}(x|y)$"}, "minItems": 4},
    {"$defs": {"n": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
    {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "string"}}, "required": ["a"]},
    {"anyOf": [{"type": "object", "properties": {f"{i}{j}": {"type": "number"} for j in range(9)}} for i in range(20)]},
)


@pytest.mark.slow
@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_a_search_for_an_end_asks_matchers_a_bounded_number_of_times(
    grammars: Grammars, schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stream of the target waits for it."""
    grammar, num_asked = of_schema(grammars, schema), 0

    class Counting:
        def __init__(self, matcher: Any) -> None:
            self._counted = matcher

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._counted, name)

            def counted(*args: Any) -> Any:
                nonlocal num_asked
                num_asked += 1
                answer = found(*args)
                return Counting(answer) if name == "fork" else answer

            return counted

    choose, state = random.Random(0), grammar.follow((), 400)
    for _ in range(60):
        num_asked = 0
        state._closing.shortest(Counting(state.fork()), state._scan.copy())  # type: ignore[arg-type]
        assert num_asked <= 4 * closing.MAX_COST
        mask = state.masks((), 0, (), 0)[0].numpy()
        options = grammars.vocabulary.tokens_of(bytes(grammars.vocabulary.allowed_bytes(mask).tolist()))
        if not options:
            break
        state.advance([choose.choice(options)])


def test_a_large_object_ends_in_time(grammars: Grammars) -> None:
    """Larger than outputs all of whose rests are tried."""
    names = list(WIDE["properties"])[:60]
    grammar = of_schema(grammars, WIDE | {"properties": {name: {"type": "string"} for name in names}, "required": names})
    assert len(grammar.shortest) > closing.SHORT
    assert grammar.shortest_len is not None
    ids = output(grammars, grammar, grammar.shortest_len + 20, seed=0)
    assert ids[-1] == EOS
    text = b"".join(grammars.vocabulary.token_bytes[i] for i in ids).decode(errors="replace")
    assert len(json.loads(text)) == 60


NAMED = PERSON | {"properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
BORDER = "</think>"


@pytest.fixture
def reasoning(grammars: Grammars) -> GrammarState:
    """Of an answer whose prompt opened the reasoning."""
    asked = ("response_format", schema_grammar(NAMED))
    found = AnswerForm(reasoning=THINK).grammar(ToolUse(), "reasoning", asked)
    assert found is not None
    return GrammarState(grammars.compile(found[1]), (), 200)


def test_a_draft_is_judged_on_both_sides_of_the_border(grammars: Grammars, reasoning: GrammarState) -> None:
    thought = f'So {{"name": 5}}?{BORDER}'
    for answer, num_valid in (('{"name": "a', 11), ('{"nane"', 4), ("So", 0), ("\n\n{", 3)):
        drafts = tokens(grammars, thought + answer)
        assert reasoning.num_valid(drafts) == len(thought) + num_valid, answer
    masks = reasoning.masks(tokens(grammars, f'So{BORDER}{{"name"'), 0, (), 0)
    allowed = [bytes(grammars.vocabulary.allowed_bytes(mask.numpy()).tolist()) for mask in masks]
    assert all(len(row) > 200 for row in allowed[: len(f"So{BORDER}")]), "reasoning is free"
    at_border, behind = allowed[len(f"So{BORDER}")], allowed[len(f"So{BORDER}") + 1]
    assert b"{" in at_border
    assert b"S" not in at_border
    assert b'"' in behind
    assert b"}" not in behind


def test_the_state_is_where_it_was_after_drafts_across_the_border(grammars: Grammars, reasoning: GrammarState) -> None:
    across = tokens(grammars, f'a{BORDER}{{"name": "b"}}')
    for _ in range(3):
        assert reasoning.num_valid(across) == len(across)
        reasoning.masks(across, 0, (), 0)
    reasoning.advance(tokens(grammars, "a</thi"))  # committed up to amid the border
    assert reasoning.num_valid(tokens(grammars, "s is no border")) == len("s is no border")
    rest = tokens(grammars, 'nk>{"name": "b"}')
    assert reasoning.num_valid([*rest, EOS]) == len(rest) + 1
    reasoning.advance([*rest, EOS])
    assert reasoning.has_ended


# ---- which grammars wait, for how long, and how much memory those that are compiled take


A, B, C, D = (Grammar(GrammarKind.REGEX, f"{char}[a-z]{{3}}") for char in "abcd")


@pytest.fixture
def grammars(tiny_model_folder: Path) -> Grammars:
    return Grammars(GrammarVocabulary(tiny_model_folder, 257, (256,)))


class SlowGrammars(Grammars):
    """Each compile waits until it is let go."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        super().__init__(vocabulary)
        self.may_end = {grammar: threading.Event() for grammar in (A, B, C, D)}

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        assert self.may_end[grammar].wait(60)
        return super().compile(grammar)


@pytest.fixture
def slow(grammars: Grammars) -> Iterator[SlowGrammars]:
    slow = SlowGrammars(grammars.vocabulary)
    yield slow
    for event in slow.may_end.values():
        event.set()


class Waiter:
    """Pending grammars, and an event for each end of a compile."""

    def __init__(self, grammars: Grammars) -> None:
        self.ended = threading.Semaphore(0)
        self.pending = PendingGrammars(grammars, lambda: self.ended.release())

    def finished(self, now_s: float) -> dict[str, CompiledGrammar | GrammarRefusal]:
        return dict(self.pending.take_finished(now_s))

    def next_finished(self, now_s: float) -> dict[str, CompiledGrammar | GrammarRefusal]:
        assert self.ended.acquire(timeout=60)
        return self.finished(now_s)


def test_the_time_of_a_compile_counts_from_its_own_beginning(slow: SlowGrammars) -> None:
    """Also where no thread could be started before."""
    waiter = Waiter(slow)
    with no_more_threads():
        waiter.pending.start("a", A, -10.0)
        waiter.pending.start("b", B, 0.0)
    assert waiter.finished(0.0) == waiter.finished(29.0) == {}
    slow.may_end[A].set()
    assert isinstance(waiter.next_finished(29.0)["a"], CompiledGrammar)
    assert waiter.finished(58.0) == {}
    slow.may_end[B].set()
    assert isinstance(waiter.next_finished(58.5)["b"], CompiledGrammar)


def test_a_compile_that_takes_too_long_holds_up_no_other(slow: SlowGrammars) -> None:
    waiter = Waiter(slow)
    waiter.pending.start("a", A, 0.0)
    waiter.pending.start("b", B, 1.0)
    slow.may_end[B].set()
    refused = waiter.finished(waiting.COMPILE_S)
    assert list(refused) == ["a"]
    assert refused["a"] == GrammarRefusal("its grammar was not compiled within 30 seconds; try again later", is_busy=True)
    assert isinstance(waiter.next_finished(waiting.COMPILE_S)["b"], CompiledGrammar)
    assert waiter.pending.refusal(A) == refused["a"]
    slow.may_end[A].set()
    assert waiter.ended.acquire(timeout=60)
    assert waiter.pending.refusal(A) is None


def test_compiles_that_take_too_long_leave_few_threads_behind(slow: SlowGrammars) -> None:
    waiter = Waiter(slow)
    for i, grammar in enumerate((A, B, C)):
        waiter.pending.start(str(i), grammar, 0.0)
    assert list(waiter.finished(waiting.COMPILE_S)) == ["0"]
    assert list(waiter.finished(2 * waiting.COMPILE_S - 1.0)) == []
    slow.may_end[C].set()
    late = waiter.finished(2 * waiting.COMPILE_S)
    assert late["1"] == waiter.pending.refusal(B)
    assert late["2"] == GrammarRefusal("its grammar waited 60 seconds to be compiled; try again later", is_busy=True)
    waiter.pending.start("3", D, 61.0)
    assert waiter.finished(62.0) == {}
    slow.may_end[A].set()
    slow.may_end[D].set()
    assert waiter.ended.acquire(timeout=60)
    assert waiter.finished(63.0) == {}
    assert isinstance(waiter.next_finished(64.0)["3"], CompiledGrammar)


def test_a_full_queue_takes_what_needs_no_place_in_it(slow: SlowGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_QUEUED", 1)
    waiter = Waiter(slow)
    for i, grammar in enumerate((A, B, B)):
        assert waiter.pending.refusal(grammar) is None
        waiter.pending.start(str(i), grammar, 0.0)
    assert waiter.pending.refusal(B) is None
    refused = waiter.pending.refusal(C)
    assert refused is not None
    assert refused.is_busy
    waiter.pending.forget("1")
    assert waiter.pending.refusal(C) == refused
    waiter.pending.forget("2")
    assert waiter.pending.refusal(C) is None


def test_unused_grammars_make_room_and_used_ones_do_not(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    used = grammars.compile(A)
    monkeypatch.setattr(compiling, "MAX_TOTAL_BYTES", int(2.5 * used.num_bytes))
    state = used.follow(())
    grammars.compile(B)
    del used
    grammars.compile(C)
    assert [grammars.known(one) is not None for one in (A, B, C)] == [True, False, True]
    assert not grammars.is_full
    assert state.grammar is grammars.known(A)


def test_a_grammar_that_those_in_use_leave_no_memory_for_is_refused_for_now(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = grammars.compile(A)
    monkeypatch.setattr(compiling, "MAX_TOTAL_BYTES", int(1.5 * used.num_bytes))
    waiter = Waiter(grammars)
    waiter.pending.start("b", B, 0.0)
    refused = waiter.next_finished(0.0)["b"]
    assert isinstance(refused, GrammarRefusal)
    assert refused.is_busy
    assert "leave no memory" in refused.reason
    assert grammars.known(B) is None
    del used
    waiter.pending.start("b", B, 0.0)
    assert isinstance(waiter.next_finished(0.0)["b"], CompiledGrammar)


def test_a_grammar_that_is_too_large_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_BYTES", 0)
    with pytest.raises(InvalidField, match="takes 0 MiB compiled, at most 0 are possible"):
        grammars.compile(A)
