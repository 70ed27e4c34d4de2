"""The grammar that a request's output must match."""

from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import InvalidField

MAX_GRAMMAR_CHARS = 65536


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # source: the schema, as JSON
    JSON_OBJECT = "json_object"  # any JSON object; no source
    REGEX = "regex"  # matches the whole output
    EBNF = "ebnf"  # GBNF, llama.cpp's dialect; the root rule is `root`
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's format, as JSON


@dataclass(frozen=True, slots=True)
class Grammar:
    """Part of a request's sampling parameters. Equal grammars are compiled once per process.

    Raises:
        InvalidField: the source is too long.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.source) > MAX_GRAMMAR_CHARS:
            raise InvalidField("grammar", len(self.source), f"must have at most {MAX_GRAMMAR_CHARS} characters")
