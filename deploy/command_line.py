"""The command line of `outrider serve`, which is that of ``vllm serve``, as fields of the configuration file. vLLM's
speculative configurations become drafters."""

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.config import HIDDEN_STATE_FORMS
from cluster.errors import InvalidField
from cluster.model_name import GGUF, HubName, public_name
from deploy.vllm_flags import FLAGS, NEEDLESS, NUM_VALUES, REFUSED, SHORT, SPECULATIVE, engine_argument, scalar

FLAG = "--speculative-config"
_COMMON = ("method", "model", "num_speculative_tokens", "revision")
# By method: the drafter's kind, and the options that vLLM's keys become.
METHODS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ngram": ("ngram", {"prompt_lookup_max": "max_match_len", "prompt_lookup_min": "min_match_len"}),
    "suffix": ("suffix", {}),
    "draft_model": ("model", {"model": "model"}),
    **{kind: (kind, {"model": "path"}) for kind, form in HIDDEN_STATE_FORMS.items() if not form.is_proposed},
}
PROPOSED = [kind for kind, form in HIDDEN_STATE_FORMS.items() if form.is_proposed]
PROPOSERS = ("eagle", "mtp", *PROPOSED)  # that stay vLLM's own; and those of one model's MTP heads, as mimo_mtp
# Of vLLM's proposers and rejection sampler, without a counterpart: a draft token is accepted if the target samples it.
_WITHOUT = {
    *("rejection_sample_method", "draft_sample_method", "enforce_eager", "disable_padded_drafter_batch", "moe_backend"),
    *("attention_backend", "max_model_len", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    "suffix_decoding_max_tree_depth",
    *("suffix_decoding_min_token_prob", "enable_adaptive_verification", "use_local_argmax_reduction"),
    *("num_speculative_tokens_per_batch_size", "code_revision", "kv_cache_dtype", "draft_load_config"),
}


def drafter_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A drafter of the file without its name, and a line for each key that changes nothing. Raises InvalidField: a method
    that is not supported, or a key that is unknown or missing."""
    for key in ("method", "model", "revision"):
        if not isinstance(config.get(key, ""), str):
            raise InvalidField(f"{FLAG}.{key}", config[key], "must be a string")
    method = config.get("method") or ("draft_model" if "model" in config else None)
    if method is None:
        raise InvalidField(FLAG, dict(config), 'needs "method", or "model" for a draft model')
    length = config.get("num_speculative_tokens")
    common = {} if length is None else {"max_draft_len": length}
    if method in PROPOSERS or method.endswith("_mtp"):
        own = {key: value for key, value in config.items() if key != "num_speculative_tokens"}
        return {**common, "options": {"kind": "vllm", "speculative": own}}, []
    if method not in METHODS:
        supported = ", ".join([*METHODS, *PROPOSERS])
        raise InvalidField(FLAG, method, f"this method is not supported yet; supported are {supported}")
    kind, renamed = METHODS[method]
    options: dict[str, Any] = {"kind": kind}
    notes = []
    for key, value in config.items():
        if key in renamed:
            options[renamed[key]] = value
        elif key in ("draft_tensor_parallel_size", "quantization"):
            if value not in (None, 1):
                raise InvalidField(f"{FLAG}.{key}", value, "is not supported: drafters run unquantised in one process")
        elif key in _WITHOUT:
            notes.append(f"{key} has no counterpart")
        elif key not in _COMMON:
            known = [*_COMMON, *renamed]
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known with {method} are {', '.join(known)}"
            raise InvalidField(f"{FLAG}.{key}", value, f"is unknown; {hint}")
    if "model" in renamed:
        if "model" not in config:
            raise InvalidField(FLAG, dict(config), f'method {method} needs "model"')
        if config.get("revision") is not None:
            options[renamed["model"]] += f"@{config['revision']}"
    return {**common, "options": options}, notes


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
        self.fields = _nested(path, value, self.fields)


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
            if (flag.field, *converted) == ("target.dtype", "float16"):
                line.put("target.engine", "vllm")  # the native engine has no such weights
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
    _check_base_models(line)
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
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise InvalidField("--from", command, f"is no command line: {error}") from error
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


def _nested(key: str, value: Any, into: Any) -> dict[str, Any]:
    """``into`` with the value at a dotted key, instead of what is there and no object."""
    first, _, rest = key.partition(".")
    known = into if isinstance(into, dict) else {}
    return {**known, first: _nested(rest, value, known.get(first)) if rest else value}


def _check_base_models(line: CommandLine) -> None:
    """Takes ``base_model_name`` out of adapters. Raises InvalidField: it is none of the served model's names."""
    model = line.fields.get("model", {})
    names = [model["name"], public_name(model["name"])] if "name" in model else []
    names += model.get("served_names", ())
    for module in line.fields.get("target", {}).get("lora_modules", ()):
        base = module.pop("base_model_name", None) if isinstance(module, dict) else None
        if base is not None and base not in names:
            hint = f"must be {' or '.join(dict.fromkeys(names))}, as adapters are of" if names else "is not known to be"
            raise InvalidField("--lora-modules", base, f"base_model_name {hint} the served model; leave it out")


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
    before = line.fields.get("target", {}).get("vllm", {}).get(argument.name)
    line.put(f"target.vllm.{argument.name}", _nested(key, value, before) if key else value)
    line.put("target.engine", "vllm")
