"""A configuration with further fields over those of its file."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster import strict_yaml
from cluster.config.file import Config
from cluster.errors import InvalidField

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def with_fields(
    base: Config, fields: Mapping[str, Any], settings: Sequence[tuple[str, Any]] = (), source: str = "the command line"
) -> Config:
    """``fields``, nested, replace those of ``base``, and ``settings``, by paths such as ``drafters[0].capacity``, both.

    Raises ``cluster.strict_yaml.ConfigError``, as for a file; InvalidField: a path through what is no section or list.
    """
    data = _merged(given(base), fields)
    for path, value in settings:
        _set(data, path, value)
    return strict_yaml.check(data, Config, source)


def given(config: Config) -> dict[str, Any]:
    """What a file would hold: fields that were set, nested."""
    return config.model_dump(mode="json", exclude_unset=True)


def differing(config: Config) -> dict[str, Any]:
    """What a file must hold: fields that differ from the defaults, nested."""
    return _difference(given(config), Config().model_dump(mode="json"))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: value for name, value in over.items() if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
    }
    return {**base, **over, **{name: _merged(base[name], value) for name, value in both.items()}}


def _difference(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in data.items():
        usual = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(usual, Mapping) and value.get("kind") == usual.get("kind"):
            if inner := _difference(value, usual):
                found[name] = {"kind": value["kind"], **inner} if "kind" in value else inner
        elif value != usual:
            found[name] = value
    return found


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    steps: list[str | int] = [int(index) if index else name for name, index in _STEP.findall(path)]
    at: Any = data
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step, int):
            if not isinstance(at, list) or step >= len(at):
                raise InvalidField("--set", path, f"[{step}] is in no list of the file or the flags: name the whole list")
        elif not isinstance(at, dict):
            raise InvalidField("--set", path, f"{step} is behind a value that is no section")
        elif following is not None and not isinstance(at.get(step), dict | list):
            at[step] = {}
        if following is None:
            at[step] = value
        else:
            at = at[step]
