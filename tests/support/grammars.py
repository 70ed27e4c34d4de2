"""Grammars over 256 one-byte tokens and the end of sequence."""

import json
from pathlib import Path
from typing import Any

from cluster.sampling_params import Grammar, GrammarKind
from engine.grammar.compiling import CompiledGrammar, Grammars, grammars_of

EOS = 256


def of_tiny_model(folder: Path) -> Grammars:
    return grammars_of(folder, EOS + 1, (EOS,))


def schema_grammar(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def tag_grammar(content: Any) -> Grammar:
    tag = {"type": "structural_tag", "format": content}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False))


def of_schema(grammars: Grammars, schema: Any) -> CompiledGrammar:
    return grammars.compile(schema_grammar(schema))


def takes(grammar: CompiledGrammar, text: str) -> bool:
    """Whether the text is a whole output."""
    ids = [*grammar.vocabulary.tokens_of(text.encode()), EOS]
    return grammar.follow(()).num_valid(ids) == len(ids)
