"""The reference of all settings, `docs/settings.yaml`: a file of the defaults, with the comments that the sections have."""

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, Literal

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from cluster.config.file import Config
from cluster.config.rules import Rule

HEAD = """\
# Every setting with its default. Optional sections and elements of lists are comments. Written from `cluster/config/` by
# `outrider config --reference`.
"""
_MOST_CHOICES = 8  # that are listed


def reference() -> str:
    """The file, which `cluster.config.load` reads as the defaults."""
    return HEAD + re.sub(r"\bNone:", "null:", "\n".join(_section(Config, Config(), {Config}))) + "\n"


def _section(model: type[BaseModel], defaults: BaseModel | None, seen: set[type[BaseModel]]) -> Iterator[str]:
    """Lines of a section. ``defaults`` None: it has none of its own, so that its lines are those of a comment."""
    comments = _comments(model)
    for name, field in model.model_fields.items():
        value = field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
        above, beside = comments.get(name, ([], ""))
        nested = [one for one in _models(field.annotation) if one not in seen]
        seen.update(nested)
        if isinstance(value, BaseModel):
            above = [*above, *_summary(type(value))]
        yield from (f"# {line}" for line in above)
        choices = _choices(field.annotation)
        note = "; ".join(part for part in (beside, choices if choices not in beside else "") if part)
        if isinstance(value, BaseModel) and not isinstance(value, Rule):
            yield f"{name}:"
            yield from textwrap.indent("\n".join(_section(type(value), value, seen)), "  ").splitlines()
            nested = [one for one in nested if one is not type(value)]
        elif value and isinstance(value, tuple):  # of sections: the default pool
            yield f"# {name}:"
        else:
            yield f"{name}: {_written(value)}" + (f"  # {note}" if note else "")
        for one in nested:
            yield from _optional(one, seen)


def _optional(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[str]:
    """A type of optional sections, or of elements, as comments."""
    if issubclass(model, Rule):
        for kind, known in model.table.items():
            yield f"#   {_written({'kind': kind, **{name: one.default for name, one in known.items()}})}"
        return
    yield from (f"#   {line}" for line in _summary(model))
    yield from (f"#     {line}" for line in _section(model, None, seen))


def _summary(model: type[BaseModel]) -> list[str]:
    return [" ".join((model.__doc__ or "").partition("\n\n")[0].split())]


def _written(value: Any) -> str:
    if value is PydanticUndefined:
        return "..."
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple | dict) and not value:
        return "{}" if isinstance(value, dict) else "[]"
    text = yaml.safe_dump(value if isinstance(value, dict | int | float | None) else str(value), default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _choices(annotation: Any) -> str:
    options = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    return " | ".join(map(str, options)) if 1 < len(options) <= _MOST_CHOICES else ""


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Sections that a type names at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _comments(model: type[BaseModel]) -> dict[str, tuple[list[str], str]]:
    """What the source says above and beside each field."""
    lines = textwrap.dedent(inspect.getsource(model)).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    found = {}
    for node in getattr(body, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno - 1
            while lines[first - 1].strip().startswith("#"):
                first -= 1
            above = [line.strip().removeprefix("# ") for line in lines[first : node.lineno - 1]]
            beside = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :].strip()
            found[node.target.id] = (above, beside.removeprefix("#").strip())
    return found
