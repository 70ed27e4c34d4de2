"""The command line of `outrider serve`, which is that of ``vllm serve``, as fields of the configuration file."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import InvalidField
from cluster.model_name import GGUF, HubName
from deploy.speculative_config import drafter_of
from deploy.vllm_flags import FLAGS, NEEDLESS, NUM_VALUES, REFUSED, SHORT, SPECULATIVE, engine_argument, scalar


@dataclass(slots=True)
class CommandLine:
    """What a command line asks for. ``fields``: of the file, nested; ``settings``: of ``--set``, in order, which win."""

    file: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    settings: list[tuple[str, Any]] = field(default_factory=list)
    api_keys: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # a line for each flag that changes nothing

    def put(self, path: str, value: Any) -> None:
        """Sets a field by its dotted path."""
        *sections, last = path.split(".")
        section = self.fields
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value


def parse(words: Sequence[str]) -> CommandLine:
    """Of the words behind ``vllm serve`` or ``outrider serve``.

    Raises InvalidField: an unknown flag, with the nearest flag or field; a flag without its value, or that is refused.
    """
    line, queue = CommandLine(), list(words)
    speculative: list[dict[str, Any]] = []
    together: dict[str, Any] = {}  # of the flags SPECULATIVE
    revision: str | None = None
    while queue:
        word = queue.pop(0)
        if not word.startswith("-"):
            _take_positional(line, word)
            continue
        name, key, values = _read_flag(word, queue)
        if name in FLAGS:
            flag = FLAGS[name]
            converted = [flag.convert(value) for value in values]
            line.put(flag.field, converted if flag.num_values is None else converted[0])
        elif name in NEEDLESS:
            line.notes.append(f"{name}: {NEEDLESS[name][1]}")
        elif name == "--config":
            _take_file(line, values[0])
        elif name == "--set":
            line.settings.append(_setting(values[0]))
        elif name == "--revision":
            revision = values[0]
        elif name == "--api-key":
            line.api_keys += values
        elif name == "--speculative-config" and key:
            speculative = [_nested(key, scalar(values[0]), speculative.pop() if speculative else {})]
        elif name == "--speculative-config":
            speculative.append(_object(name, values[0]))
        elif name in SPECULATIVE:
            together[SPECULATIVE[name]] = scalar(values[0])
        else:
            _pass_on(line, name, key, values)
    if revision is not None:
        _pin(line, revision)
    if together:
        speculative.append(together)
    if speculative:
        _add_drafters(line, speculative)
    return line


def as_file(command: str) -> str:
    """The configuration file that corresponds to a command line of ``vllm serve``, checked, without what is the default.

    Raises as ``parse``, and ConfigError: a value that its field does not take.
    """
    import yaml

    from cluster.config import Config, differing, with_fields

    line = parse(_words_of(command))
    if line.file is not None:
        raise InvalidField("--config", line.file, "is a file already; write its settings as flags")
    needed = differing(with_fields(Config(), line.fields, line.settings))
    comments = [
        *line.notes,
        *(["--api-key: write the keys into a file, one a line, as api.api_keys_file"] if line.api_keys else []),
    ]
    written = yaml.safe_dump(needed, sort_keys=False, allow_unicode=True) if needed else ""
    return "".join(f"# {comment}\n" for comment in comments) + written


def _words_of(command: str) -> list[str]:
    """Without the program, and settings of the environment before it. Raises InvalidField."""
    words = shlex.split(command.replace("\\\n", " "))
    for ending in (["vllm", "serve"], ["outrider", "serve"], ["-m", "vllm.entrypoints.openai.api_server"]):
        for start in range(len(words) - len(ending) + 1):
            if words[start : start + len(ending)] == ending:
                return words[start + len(ending) :]
    raise InvalidField("--from", command, "must be a command line of `vllm serve`")


def _read_flag(word: str, queue: list[str]) -> tuple[str, str, list[str]]:
    """(name, key behind a dot, values), whose words are taken from ``queue``. Raises InvalidField."""
    flag, has_value, value = word.partition("=")
    if level := re.fullmatch(r"-O(\d)", word):
        return "--optimization-level", "", [level[1]]
    flag, _, key = flag.partition(".")
    name = SHORT.get(flag, flag.replace("_", "-"))
    if name in REFUSED:
        raise InvalidField(name, value or (queue[0] if queue else None), REFUSED[name])
    if name in NUM_VALUES:
        num = NUM_VALUES[name]
    else:
        num = 0 if has_value or engine_argument(name, value or (queue[0] if queue else None)).is_switch else 1
    if has_value:
        return name, key, [value]
    if num is None:
        values = []
        while queue and not queue[0].startswith("-"):
            values.append(queue.pop(0))
    else:
        values, queue[:num] = queue[:num], []
    if len(values) < (1 if num is None else num):
        raise InvalidField(name, None, "needs a value")
    return name, key, values


def _take_positional(line: CommandLine, word: str) -> None:
    if word.endswith((".yaml", ".yml")) or (Path(word).is_file() and not word.endswith(GGUF)):
        _take_file(line, word)
    elif "name" in line.fields.get("model", {}):
        raise InvalidField("MODEL", word, "is a second model, or the value of a flag that takes none")
    else:
        line.put("model.name", word)


def _take_file(line: CommandLine, path: str) -> None:
    if line.file is not None:
        raise InvalidField("--config", path, f"is a second file beside {line.file}")
    line.file = path


def _setting(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise InvalidField("--set", text, "must be FIELD=VALUE, such as target.tensor_parallel=2")
    return path, scalar(value)


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidField(name, text, f"must be a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise InvalidField(name, text, "must be a JSON object")
    return value


def _nested(key: str, value: Any, into: dict[str, Any]) -> dict[str, Any]:
    """``into`` with the value at a dotted key."""
    first, _, rest = key.partition(".")
    return {**into, first: _nested(rest, value, into.get(first, {})) if rest else value}


def _pin(line: CommandLine, revision: str) -> None:
    name = line.fields.get("model", {}).get("name")
    if name is not None and HubName.parse(name) is None:
        line.notes.append("--revision: a folder has none")
        return
    if name is None:
        raise InvalidField(
            "--revision", revision, "needs ORG/MODEL on the command line; in a file it is model.name: ORG/MODEL@REVISION"
        )
    line.put("model.name", f"{name.partition('@')[0]}@{revision}")


def _add_drafters(line: CommandLine, configs: Sequence[Mapping[str, Any]]) -> None:
    drafters: list[dict[str, Any]] = []
    for config in configs:
        drafter, notes = drafter_of(config)
        used = sum(one["options"]["kind"] == drafter["options"]["kind"] for one in drafters)
        drafters.append({"name": drafter["options"]["kind"] + (f"-{used + 1}" if used else ""), **drafter})
        line.notes += [f"--speculative-config: {note}" for note in notes]
    line.fields["drafters"] = drafters


def _pass_on(line: CommandLine, name: str, key: str, values: Sequence[str]) -> None:
    """Passes a flag of vLLM's engine on to it."""
    value: Any = scalar(values[0]) if values else None
    argument = engine_argument(name, value)
    if value is None:
        value = not argument.is_negated
    before = line.fields.get("target", {}).get("vllm", {}).get(argument.name, {})
    line.put(f"target.vllm.{argument.name}", _nested(key, value, before) if key else value)
    line.put("target.engine", "vllm")
