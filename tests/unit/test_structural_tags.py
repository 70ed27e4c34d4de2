"""Structural tags and patterns: those that cannot be enforced or are too large are refused, others are enforced."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cluster.errors import InvalidField
from cluster.sampling_params import Grammar, GrammarKind
from engine.grammar.checking import refusal
from engine.grammar.compiling import Grammars
from engine.grammar.json_pattern import repeats_fault
from engine.grammar.vocabulary import GrammarVocabulary
from tests.support.grammars import EOS, tag_grammar, takes

HEAD = '{"name": "get", "arguments": '


def tag_of(content: Any) -> Grammar:
    return tag_grammar({"type": "tag", "begin": HEAD, "content": content, "end": "}"})


def of_schema(schema: Any) -> Grammar:
    return tag_of({"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1})


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "at #/uniqueItems: is not supported"),
        ({"type": "object", "properties": {"a": {"not": {"const": 1}}}}, "at #/properties/a: must give its type beside not"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no output was found"),
        (False, "allows nothing"),
    ],
)
def test_a_schema_in_a_tag_is_checked_as_one_alone_and_its_tag_is_told(grammars: Grammars, schema: Any, reason: str) -> None:
    refused = refusal(grammars, of_schema(schema))
    assert refused is not None
    assert refused.startswith(f"after {HEAD!r} ")
    assert reason in refused


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 50_000, "is not JSON"),
        ("5", 'must be an object with a "format"'),
        ('{"structures": [], "triggers": []}', 'must be an object with a "format"'),
        ('{"format": {"type": "sequence", "elements": 5}}', "elements must be a list"),
        ('{"format": {"type": "or", "elements": ["a"]}}', "must have objects as formats"),
        ('{"format": {"type": "regex", "pattern": "(?=a)b"}}', "must have no group"),
        ('{"format": {"type": "regex"}}', "must have a pattern"),
        ('{"format": {"type": "json_schema"}}', "must be an object"),
        ('{"format": {"type": "dispatch", "rules": [["a", {"type": "regex", "pattern": "a$b"}]]}}', "must have ^"),
        ('{"format": ' + '{"type": "plus", "content": ' * 99 + "{}" + "}" * 100, "deeper than"),
    ],
)
def test_malformed_tags_are_refused(grammars: Grammars, source: str, reason: str) -> None:
    with pytest.raises(InvalidField) as refused:
        grammars.compile(Grammar(GrammarKind.STRUCTURAL_TAG, source))
    assert reason in refused.value.reason


@pytest.mark.parametrize("text", ["abcde", "東京東京東", ""])
def test_strings_of_bounded_length_in_a_tag_are_valid_json(grammars: Grammars, text: str) -> None:
    grammar = of_schema({"type": "string", "maxLength": 5})
    assert refusal(grammars, grammar) is None
    compiled = grammars.compile(grammar)
    assert takes(compiled, f'{HEAD}"{text}"}}')
    for wrong in ("\t", "\x01", "\n", '"', "\\", text + "abcdef"):
        assert not takes(compiled, f'{HEAD}"{wrong}"}}'), repr(wrong)


def test_a_special_token_is_taken_by_its_id_and_never_as_text(tiny_model_folder: Path, tmp_path: Path) -> None:
    marked = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    marked.add_special_tokens(["[TOOL_CALLS]"])
    marked.save(str(tmp_path / "tokenizer.json"))
    marker = marked.token_to_id("[TOOL_CALLS]")
    assert marker == EOS + 1
    grammars = Grammars(GrammarVocabulary(tmp_path, EOS + 2, (EOS,)))
    named = {"type": "sequence", "elements": [{"type": "token", "token": marker}, {"type": "const_string", "value": "now"}]}
    state = grammars.compile(tag_grammar(named)).follow(())
    now = grammars.vocabulary.tokens_of(b"now")
    assert state.num_valid([marker, *now, EOS]) == 5
    assert state.num_valid(now) == 0
    mask = state.masks([], 0, (), 0)[0].numpy()
    allowed = [i for i in range(EOS + 2) if mask[i // 32] >> (i % 32) & 1]
    assert allowed == [marker]
    state.advance([marker, *now, EOS])
    assert state.has_ended
    for kind, source in ((GrammarKind.REGEX, "[^a]*"), (GrammarKind.EBNF, "root ::= [^a]*"), (GrammarKind.JSON_OBJECT, "")):
        assert grammars.compile(Grammar(kind, source)).follow(()).num_valid([marker]) == 0


NESTED = '"a"{1,500}){1,500}){1,500}'


@pytest.mark.parametrize(
    "source",
    ["root ::= root | root root", "root ::= x\nx ::= y\ny ::= x", 'root ::= x "a"\nx ::= x', 'root ::= "a" x\nx ::= x'],
)
def test_a_grammar_that_no_output_matches_is_refused(grammars: Grammars, source: str) -> None:
    refused = refusal(grammars, Grammar(GrammarKind.EBNF, source))
    assert refused is not None
    assert "allows no token" in refused
    assert refusal(grammars, tag_grammar({"type": "grammar", "grammar": source})) is not None


@pytest.mark.parametrize("source", ['root ::= "a" root | "b"', 'root ::= root "a" | "b"', 'root ::= ""', 'root ::= "a"'])
def test_a_recursive_grammar_with_an_output_is_not(grammars: Grammars, source: str) -> None:
    assert refusal(grammars, Grammar(GrammarKind.EBNF, source)) is None


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "((a{1,500}){1,500}){1,500}"),
        (GrammarKind.REGEX, r"(?:[a-z\]]{400}-){400}"),
        (GrammarKind.EBNF, f"root ::= (({NESTED}"),
        (GrammarKind.EBNF, 'root ::= ("a" {500} ) {500}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^(a{500}){500}$"}'),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "regex", "pattern": "(a{1,500}){500,}"}}'),
        (GrammarKind.STRUCTURAL_TAG, json.dumps({"format": {"type": "grammar", "grammar": f"root ::= (({NESTED}"}})),
    ],
)
def test_nested_repetitions_are_refused_before_they_are_compiled(grammars: Grammars, kind: GrammarKind, source: str) -> None:
    with pytest.raises(InvalidField, match="by nested repetitions, at most 16384 are possible"):
        grammars.compile(Grammar(kind, source))


BESIDE = [
    r"a{4096}b{4096}",
    r"(\({500}){30}",
    r"([({]{500}x){30}",
    r"(a{500})(b{500})",
    r"(a{500})b{500}",
    r"\{5}(a{500}|\(b{5}){30}",
]


@pytest.mark.parametrize("pattern", BESIDE)
def test_repetitions_beside_each_other_are_not(pattern: str) -> None:
    assert repeats_fault(pattern, is_regex=True) is None


def test_quoted_text_of_a_grammar_repeats_nothing() -> None:
    assert repeats_fault('root ::= (("a{500}"{1,500}) "(" "\\"{500}"){1,30}', is_regex=False) is None
