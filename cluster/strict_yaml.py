"""Reads a YAML file into a pydantic model and reports all problems at once.

Each problem names the line, the path of the key and the value; an unknown key or name comes with the nearest known one.
"""

import difflib
import json
import re
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from cluster.errors import OutriderError

Loc = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a file. ``path`` is like ``drafters[0].capacity``, or empty for the whole file."""

    line: int | None
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (f"line {self.line}" if self.line else "", self.path, self.message) if part)


class ConfigError(OutriderError, ValueError):
    """A configuration cannot be used; ``problems`` holds all reasons."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join([f"{source} cannot be used:", *(f"  {problem}" for problem in problems)]))
        self.problems = problems


class KeyProblem(PydanticCustomError):
    """What the validator of a section has to say about a key of it that is no field."""

    def __new__(cls, key: str, message: str) -> Self:
        return super().__new__(cls, "key_problem", "{message}", {"key": key, "message": message})


def read(path: Path, model: type[M]) -> M:
    """Raises ConfigError if the file cannot be read, is not YAML, or does not fit the model."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(str(path), (Problem(None, "", f"cannot be read: {reason}"),)) from error
    return parse(text, model, source=str(path))


def parse(text: str, model: type[M], source: str) -> M:
    """As ``read``; ``source`` names the text in errors. Empty text gives the defaults."""
    document = _Document()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = {} if root is None else document.convert(root, ())
    except RecursionError as error:
        raise ConfigError(source, (Problem(None, "", "is nested too deeply"),)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        message = f"is not YAML: {getattr(error, 'problem', error)}"
        raise ConfigError(source, (Problem(mark.line + 1 if mark else None, "", message),)) from error
    if document.problems:
        raise ConfigError(source, tuple(document.problems))
    return check(data, model, source, document.lines)


def check(data: Any, model: type[M], source: str, lines: Mapping[Loc, int] = MappingProxyType({})) -> M:
    """``data`` as a file would give it, with the line of each key. Raises ConfigError."""
    try:
        # As JSON: only there strict pydantic accepts a list for a tuple and a string for a path.
        return model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [_explain(detail, model, lines) for detail in details if not _is_consequence(detail, details)]
        raise ConfigError(source, tuple(sorted(_merged(problems), key=lambda problem: problem.line or 0))) from error


class _Document:
    """Converts YAML nodes into plain data and records the line of each key."""

    def __init__(self) -> None:
        self.lines: dict[Loc, int] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()  # nodes being converted, to detect recursive aliases
        self._scalars = yaml.SafeLoader("")

    def convert(self, node: yaml.Node, loc: Loc) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(loc, line)
        if id(node) in self._open:
            self.problems.append(Problem(line, _dotted(loc), "is an alias of a section that contains it"))
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, loc)
            if isinstance(node, yaml.SequenceNode):
                return [self.convert(item, (*loc, i)) for i, item in enumerate(node.value)]
            return self._scalar(node, loc)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.Node, loc: Loc) -> Any:
        try:
            value = self._scalars.construct_object(node)
        except (ValueError, KeyError, AttributeError):  # of the constructors: a month 13, say, or thousands of digits
            shown = f"{node.value[:40]!r} is no {node.tag.rpartition(':')[2]}"
            self.problems.append(Problem(node.start_mark.line + 1, _dotted(loc), f"{shown}: text needs quotes"))
            return None
        is_plain = value is None or isinstance(value, str | bool | int | float)
        return value if is_plain else node.value  # a date or bytes: its text

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            key_loc = (*loc, key)
            line = key_node.start_mark.line + 1
            if key in data:
                message = f"is a duplicate key, first on line {self.lines[key_loc]}"
                self.problems.append(Problem(line, _dotted(key_loc), message))
                continue
            self.lines[key_loc] = line
            data[key] = self.convert(value_node, key_loc)
        return data


def _is_consequence(detail: Any, details: Sequence[Any]) -> bool:
    """Whether a list is too short only because elements are invalid: pydantic counts the valid ones."""
    if detail["type"] != "too_short":
        return False
    loc = detail["loc"]
    return any(len(other["loc"]) > len(loc) and other["loc"][: len(loc)] == loc for other in details)


def _merged(problems: Sequence[Problem]) -> list[Problem]:
    """One problem for a value that is of none of several types: "must be a valid integer or 'auto', got 'many'"."""
    found: list[Problem] = []
    for problem in problems:
        rule, got, value = problem.message.partition(", got ")
        last = found[-1] if found else None
        ending = got + value
        if got and last and last.path == problem.path and last.message.endswith(ending):
            message = f"{last.message.removesuffix(ending)} or {rule.removeprefix('must be ')}{ending}"
            found[-1] = replace(last, message=message)
        else:
            found.append(problem)
    return found


def _explain(detail: Any, model: type[BaseModel], lines: Mapping[Loc, int]) -> Problem:
    loc, owner = _locate(tuple(detail["loc"]), model)
    kind, shown, context = detail["type"], repr(detail["input"]), detail.get("ctx", {})
    got = f", got {shown if len(shown) <= 80 else shown[:77] + '...'}"
    if kind == "extra_forbidden":
        known, removed = (owner.model_fields, getattr(owner, "removed", {})) if owner else ((), {})
        message = unknown_key(str(loc[-1]), known, removed)
    elif kind == "missing":
        message = "is missing"
    elif kind == "union_tag_not_found":
        message = "needs the key 'kind'"
    elif kind == "union_tag_invalid":
        loc, message = (*loc, "kind"), f"must be one of {context['expected_tags']}, got {context['tag']!r}"
    elif kind == "key_problem":
        loc, message = (*loc, context["key"]), context["message"]
    elif kind == "value_error":
        message = str(context["error"])  # from our validators, which name the value
    elif kind == "literal_error":
        choices = str(context["expected"])
        nearest = _nearest(str(detail["input"]), re.findall("'([^']+)'", choices), 0.6)
        message = f"must be {choices}{nearest and f' ({nearest})'}{got}"
    else:
        text = detail["msg"].removesuffix(" (strict)").replace("Input should be", "must be")
        message = text.replace("a valid dictionary or object to extract fields from", "a section of keys") + got
    return Problem(_line(loc, lines), _dotted(loc), message)


def _line(loc: Loc, lines: Mapping[Loc, int]) -> int | None:
    """Line of the key, or of the nearest enclosing section."""
    while loc not in lines and loc:
        loc = loc[:-1]
    return lines.get(loc)


def unknown_key(key: str, known: Collection[str], removed: Mapping[str, str] = MappingProxyType({})) -> str:
    """What to tell about it. ``removed``: keys of older versions, and what became of each."""
    hint = _nearest(key, list(known)) or (f"known here: {', '.join(known)}" if known else "none is known here")
    return f"no setting any more: {removed[key]}; {hint}" if key in removed else f"unknown key; {hint}"


def _nearest(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """A question for the known name that is close, if there is one."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean '{nearest[0]}'?" if nearest else ""


def _dotted(loc: Loc) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return path.removeprefix(".")


def _locate(loc: Loc, model: type[BaseModel]) -> tuple[Loc, type[BaseModel] | None]:
    """The path in the file for pydantic's, which contains tags of unions, and the model that owns its last key."""
    found: list[str | int] = []
    annotation: Any = model
    owner: type[BaseModel] | None = None
    for part in loc:
        annotation = _bare(annotation)
        if (tagged := _variants(annotation)) and part in tagged:
            annotation = tagged[str(part)]
            continue
        if _is_choice_of_values(annotation):  # the part names one of the types
            continue
        found.append(part)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            owner = annotation
            known = annotation.model_fields.get(str(part))
            annotation = known.annotation if known else None
        else:
            parts = get_args(annotation)
            value = 1 if get_origin(annotation) is Mapping else 0  # of a mapping; else the element of a tuple
            annotation = parts[value] if len(parts) > value else None
    return tuple(found), owner


def _bare(annotation: Any) -> Any:
    """Strips Annotated, and None beside one other type."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        others = [arg for arg in get_args(annotation) if arg is not type(None)]
        if len(others) == 1:
            return _bare(others[0])
    return annotation


def _is_choice_of_values(annotation: Any) -> bool:
    """Whether it is a union of a number and "auto", or the like: no part of one is in the file."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return False
    return all(get_origin(arg) is Literal or _bare(arg) in (int, float, str) for arg in get_args(annotation))


def _variants(annotation: Any) -> dict[str, type[BaseModel]]:
    """Models of a discriminated union by tag; empty for any other type."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return {}
    models = [arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel)]
    found: dict[str, type[BaseModel]] = {}
    for model in models:
        kind: Any = model.model_fields["kind"].annotation if "kind" in model.model_fields else None
        found |= dict.fromkeys(get_args(kind), model)
    return found
