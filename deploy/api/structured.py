"""Structured output: the grammar that a call asks for, in any of the fields of OpenAI and vLLM."""

import json
from collections.abc import Iterator
from typing import Any

from cluster.errors import InvalidField
from cluster.grammar import Grammar, GrammarKind
from deploy.api.errors import bad_request
from deploy.api.schema import GenerationFields, ResponseFormat, StructuredOutputs

# How GBNF writes the characters that a quoted string cannot hold as they are.
_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', **{code: f"\\x{code:02X}" for code in (*range(32), 127)}}


def grammar_of(fields: GenerationFields) -> tuple[str, Grammar] | None:
    """The grammar of a call, and the path of the field that asks for it. None: any text.

    Raises:
        ApiError: 400 for two grammars at once, or one that is too long.
    """
    found = list(_asked(fields))
    if len(found) > 1:
        raise bad_request(found[1][0], f"contradicts {found[0][0]}; give one of them")
    if not found:
        return None
    field, kind, source = found[0]
    if fields.allowed_token_ids is not None:
        raise bad_request("allowed_token_ids", f"is not possible together with {field}")
    return field, grammar_named(field, kind, source)


def grammar_named(field: str, kind: GrammarKind, source: str) -> Grammar:
    """Raises ApiError: 400 naming ``field``, for a source that is too long."""
    try:
        return Grammar(kind, source)
    except InvalidField as error:
        raise bad_request(field, f"{error.reason}, got {error.value}") from error


def _asked(fields: GenerationFields) -> Iterator[tuple[str, GrammarKind, str]]:
    if fields.response_format is not None:
        yield from _of_response_format(fields.response_format)
    if fields.structured_outputs is not None:
        found = list(_of_structured_outputs(fields.structured_outputs))
        if not found:
            raise bad_request(
                "structured_outputs", "must have one of json, json_object, regex, choice, grammar, structural_tag"
            )
        yield from found
    if fields.guided_json is not None:
        yield "guided_json", GrammarKind.JSON_SCHEMA, _schema(fields.guided_json)
    if fields.guided_regex is not None:
        yield "guided_regex", GrammarKind.REGEX, fields.guided_regex
    if fields.guided_choice is not None:
        yield "guided_choice", GrammarKind.EBNF, _choice(fields.guided_choice)
    if fields.guided_grammar is not None:
        yield "guided_grammar", GrammarKind.EBNF, fields.guided_grammar


def _of_response_format(asked: ResponseFormat) -> Iterator[tuple[str, GrammarKind, str]]:
    if asked.type == "json_object":
        yield "response_format", GrammarKind.JSON_OBJECT, ""
    if asked.type == "json_schema":
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            raise bad_request("response_format.json_schema.schema", "is missing")
        yield "response_format.json_schema.schema", GrammarKind.JSON_SCHEMA, _schema(asked.json_schema.schema_)
    if asked.type == "structural_tag":
        if asked.format is None:
            raise bad_request("response_format.format", "is missing")
        tag = json.dumps({"type": "structural_tag", "format": asked.format}, ensure_ascii=False)
        yield "response_format.format", GrammarKind.STRUCTURAL_TAG, tag


def _of_structured_outputs(asked: StructuredOutputs) -> Iterator[tuple[str, GrammarKind, str]]:
    if asked.json_ is not None:
        yield "structured_outputs.json", GrammarKind.JSON_SCHEMA, _schema(asked.json_)
    if asked.json_object:
        yield "structured_outputs.json_object", GrammarKind.JSON_OBJECT, ""
    if asked.regex is not None:
        yield "structured_outputs.regex", GrammarKind.REGEX, asked.regex
    if asked.choice is not None:
        yield "structured_outputs.choice", GrammarKind.EBNF, _choice(asked.choice)
    if asked.grammar is not None:
        yield "structured_outputs.grammar", GrammarKind.EBNF, asked.grammar
    if asked.structural_tag is not None:
        yield "structured_outputs.structural_tag", GrammarKind.STRUCTURAL_TAG, asked.structural_tag


def _schema(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)


def _choice(choices: list[str]) -> str:
    return "root ::= " + " | ".join(f'"{choice.translate(_ESCAPES)}"' for choice in choices)
