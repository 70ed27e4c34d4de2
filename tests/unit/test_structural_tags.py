"""Structural tags and patterns: what in them cannot be enforced is refused, and what is let pass is enforced."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cluster.errors import InvalidField
from cluster.grammar import Grammar, GrammarKind
from engine.grammar.checking import refusal
from engine.grammar.compiling import Grammars, grammars_of
from engine.grammar.vocabulary import GrammarVocabulary

EOS = 256
HEAD = '{"name": "get", "arguments": '


@pytest.fixture(scope="module")
def grammars(tiny_model_folder: Path) -> Grammars:
    """Of 256 one-byte tokens and the end of sequence."""
    return grammars_of(tiny_model_folder, EOS + 1, (EOS,))


def tag_of(content: Any) -> Grammar:
    tag = {"type": "tag", "begin": HEAD, "content": content, "end": "}"}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": tag}))


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

    def takes(spelled: str) -> bool:
        ids = [*grammars.vocabulary.tokens_of(f'{HEAD}"{spelled}"}}'.encode()), EOS]
        return compiled.follow(()).num_valid(ids) == len(ids)

    assert takes(text)
    for wrong in ("\t", "\x01", "\n", '"', "\\", text + "abcdef"):
        assert not takes(wrong), repr(wrong)


def test_a_special_token_is_taken_by_its_id_and_never_as_text(tiny_model_folder: Path, tmp_path: Path) -> None:
    marked = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    marked.add_special_tokens(["[TOOL_CALLS]"])
    marked.save(str(tmp_path / "tokenizer.json"))
    marker = marked.token_to_id("[TOOL_CALLS]")
    assert marker == EOS + 1
    grammars = Grammars(GrammarVocabulary(tmp_path, EOS + 2, (EOS,)))
    named = {"type": "sequence", "elements": [{"type": "token", "token": marker}, {"type": "const_string", "value": "now"}]}
    tag = {"type": "structural_tag", "format": named}
    state = grammars.compile(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))).follow(())
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
