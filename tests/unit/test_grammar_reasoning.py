"""Drafts that cross the border of reasoning and answer: free text before it, the grammar behind it."""

import json
from pathlib import Path

import pytest

from cluster.grammar import Grammar, GrammarKind
from deploy.api.tools import THINK, AnswerForm, ToolUse
from engine.grammar.compiling import Grammars, grammars_of
from engine.grammar.state import GrammarState

EOS = 256
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
BORDER = "</think>"


@pytest.fixture(scope="module")
def grammars(tiny_model_folder: Path) -> Grammars:
    """Of 256 one-byte tokens and the end of sequence."""
    return grammars_of(tiny_model_folder, EOS + 1, (EOS,))


@pytest.fixture
def state(grammars: Grammars) -> GrammarState:
    """Of an answer whose prompt opened the reasoning."""
    asked = ("response_format", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    found = AnswerForm(reasoning=THINK).grammar(ToolUse(), "reasoning", asked)
    assert found is not None
    return GrammarState(grammars.compile(found[1]), (), 200)


def tokens(grammars: Grammars, text: str) -> list[int]:
    return grammars.vocabulary.tokens_of(text.encode())


def test_a_draft_is_judged_on_both_sides_of_the_border(grammars: Grammars, state: GrammarState) -> None:
    thought = f'So {{"name": 5}}?{BORDER}'
    for answer, num_valid in (('{"name": "a', 11), ('{"nane"', 4), ("So", 0), ("\n\n{", 3)):
        drafts = tokens(grammars, thought + answer)
        assert state.num_valid(drafts) == len(thought) + num_valid, answer
    masks = state.masks(tokens(grammars, f'So{BORDER}{{"name"'), 0, (), 0)
    allowed = [bytes(grammars.vocabulary.allowed_bytes(mask.numpy()).tolist()) for mask in masks]
    assert all(len(row) > 200 for row in allowed[: len(f"So{BORDER}")]), "reasoning is free"
    at_border, behind = allowed[len(f"So{BORDER}")], allowed[len(f"So{BORDER}") + 1]
    assert b"{" in at_border
    assert b"S" not in at_border
    assert b'"' in behind
    assert b"}" not in behind


def test_the_state_is_where_it_was_after_drafts_across_the_border(grammars: Grammars, state: GrammarState) -> None:
    across = tokens(grammars, f'a{BORDER}{{"name": "b"}}')
    for _ in range(3):
        assert state.num_valid(across) == len(across)
        state.masks(across, 0, (), 0)
    state.advance(tokens(grammars, "a</thi"))  # committed up to amid the border
    assert state.num_valid(tokens(grammars, "s is no border")) == len("s is no border")
    rest = tokens(grammars, 'nk>{"name": "b"}')
    assert state.num_valid([*rest, EOS]) == len(rest) + 1
    state.advance([*rest, EOS])
    assert state.has_ended
