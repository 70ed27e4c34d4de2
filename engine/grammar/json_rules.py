"""JSON of a schema as a grammar in EBNF, on one line as json.dumps writes it. A grammar that leaves whitespace free lets a
model write it without end.
"""

import json
from typing import Any

import xgrammar

from cluster.errors import InvalidField
from engine.grammar.property_names import with_names
from engine.grammar.string_rules import with_placeholders, with_strings

_SEPARATORS = (", ", ": ")


def rules_of(schema: Any) -> tuple[str, bool]:
    """Of a schema that `schema_rules` let pass; and whether the grammar counts the characters of strings.

    Raises InvalidField: it cannot be enforced; says why.
    """
    try:
        text = json.dumps(with_placeholders(schema), ensure_ascii=False)
        grammar = xgrammar.Grammar.from_json_schema(text, any_whitespace=False, separators=_SEPARATORS)
        return with_strings(with_names(str(grammar)))
    except (RuntimeError, ValueError) as error:  # xgrammar's own, and those of its native part
        raise InvalidField("json_schema", "", reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """What xgrammar says, without the time and the place in xgrammar's source that it begins with."""
    lines = str(error).strip().splitlines()
    return (lines[0].split(": ", 1)[-1] if lines else type(error).__name__).strip()[:300]
