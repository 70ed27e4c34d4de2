"""Grammars that no output matches, and those that nested repetitions make too large, are refused."""

import json
from pathlib import Path

import pytest

from cluster.errors import InvalidField
from cluster.grammar import Grammar, GrammarKind
from engine.grammar.checking import refusal
from engine.grammar.compiling import Grammars, grammars_of
from engine.grammar.json_pattern import repeats_fault

EOS = 256
NESTED = '"a"{1,500}){1,500}){1,500}'


@pytest.fixture(scope="module")
def grammars(tiny_model_folder: Path) -> Grammars:
    """Of 256 one-byte tokens and the end of sequence."""
    return grammars_of(tiny_model_folder, EOS + 1, (EOS,))


@pytest.mark.parametrize(
    "source",
    [
        "root ::= root | root root",
        "root ::= x\nx ::= y\ny ::= x",
        'root ::= x "a"\nx ::= x',
        'root ::= "a" x\nx ::= x',
    ],
)
def test_a_grammar_that_no_output_matches_is_refused(grammars: Grammars, source: str) -> None:
    refused = refusal(grammars, Grammar(GrammarKind.EBNF, source))
    assert refused is not None
    assert "allows no token" in refused
    tag = {"format": {"type": "grammar", "grammar": source}}
    assert refusal(grammars, Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))) is not None


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
        (GrammarKind.STRUCTURAL_TAG, json.dumps({"format": {"type": "regex", "pattern": "(a{1,500}){500,}"}})),
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
