"""The flags of ``vllm serve``, and the fields of the configuration file that they set."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidField
from engine.vllm.arguments import argument_switches

_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def scalar(text: str) -> Any:
    """As YAML reads it."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # the latter of a date that there is not
        return text


def count(text: str) -> Any:
    """Also with a unit: 16k is 16,000 and 16K 16,384."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    return int(float(matched[1]) * _SIZES[matched[2]]) if matched else scalar(text)


def _generation_config(text: str) -> Any:
    return {"auto": "model", "vllm": "none"}.get(text, text)


def _dtype(text: str) -> Any:
    return {"half": "float16", "float": "float32"}.get(text, text)


def _lora_module(text: str) -> Any:
    """``name=path``, or an object."""
    name, equals, path = text.partition("=")
    return scalar(text) if text.startswith("{") or not equals else {"name": name, "path": path}


def _gigabytes(text: str) -> Any:
    num_bytes = count(text)
    return num_bytes / 2**30 if isinstance(num_bytes, int) else num_bytes


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with a field. ``num_values``: tokens that it takes; None: one or more."""

    field: str
    convert: Callable[[str], Any] = str
    num_values: int | None = 1


FLAGS: Mapping[str, Flag] = {
    "--model": Flag("model.name"),
    "--served-model-name": Flag("model.served_names", num_values=None),
    "--max-model-len": Flag("model.max_model_len", count),
    "--generation-config": Flag("model.generation_config", _generation_config),
    "--dtype": Flag("target.dtype", _dtype),
    "--tensor-parallel-size": Flag("target.tensor_parallel", count),
    "--data-parallel-size": Flag("target.replicas", count),
    "--block-size": Flag("target.block_len", count),
    "--kv-cache-memory-bytes": Flag("target.kv_cache_gb", _gigabytes),
    "--gpu-memory-utilization": Flag("target.gpu_memory_utilization", scalar),
    "--max-num-seqs": Flag("target.max_num_sequences", count),
    "--max-num-batched-tokens": Flag("target.max_pass_tokens", count),
    "--host": Flag("api.host"),
    "--port": Flag("api.port", count),
    "--api-server-count": Flag("api.replicas", count),
    "--allowed-origins": Flag("api.cors_origins", scalar),
    "--lora-modules": Flag("target.lora_modules", _lora_module, num_values=None),
    "--tool-call-parser": Flag("api.tool_call_parser"),
    "--reasoning-parser": Flag("api.reasoning_parser"),
}
# Handled by name: --config and --set are Outrider's own.
SPECIAL: Mapping[str, int | None] = {
    "--config": 1,
    "--set": 1,
    "--revision": 1,
    "--api-key": None,
    "--speculative-config": 1,
}
SPECULATIVE: Mapping[str, str] = {  # keys of --speculative-config
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
SHORT: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-asc": "--api-server-count",
    "-q": "--quantization",
    "-O": "--optimization-level",
}
NEEDLESS: Mapping[str, tuple[int, str]] = {  # tokens that it takes, and why it changes nothing
    "--enable-prefix-caching": (0, "the prefix cache is always on"),
    "--no-enable-prefix-caching": (0, "the prefix cache stays on"),
    **dict.fromkeys(
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill"), (0, "prompts are always computed in chunks")
    ),
    "--enable-auto-tool-choice": (0, "calls with tools may always choose"),
    **dict.fromkeys(("--async-scheduling", "--no-async-scheduling"), (0, "the loop schedules by its own rules")),
    "--disable-log-requests": (0, "requests are logged with observability.log_format: json alone"),
    "--no-enable-log-requests": (0, "requests are logged with observability.log_format: json alone"),
    "--disable-log-stats": (0, "statistics are metrics, not log lines"),
    "--disable-uvicorn-access-log": (0, "there is no such log"),
    "--disable-access-log-for-endpoints": (1, "there is no such log"),
    "--uvicorn-log-level": (1, "logs have one level; observability.log_format is their form"),
    "--max-log-len": (1, "prompts are never logged"),
    "--enable-prompt-tokens-details": (0, "usage always has them"),
    "--enable-request-id-headers": (0, "answers always have X-Request-Id"),
    "--chat-template-content-format": (1, "it is recognised from the chat template"),
    "--seed": (1, "a request without a seed draws one; seeds are fields of requests"),
}
_WITHOUT: tuple[str, ...] = ("--middleware", "--response-role", "--return-tokens-as-token-ids", "--tool-parser-plugin")
_WITHOUT += ("--tool-server", "--allowed-methods", "--allowed-headers", "--allow-credentials", "--grpc")
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(_WITHOUT, "has no counterpart here"),
    "--chat-template": "is read from the model's folder: put chat_template.jinja there",
    "--tokenizer": "is always that of the model",
    "--download-dir": "is the hub's cache: set HF_HUB_CACHE",
    "--hf-token": "is read from the environment: set HF_TOKEN",
    "--uds": "is not supported: the API listens at api.host and api.port",
    "--root-path": "is not supported: rewrite paths in the proxy",
    "--ssl-keyfile": "is not supported: put a proxy with TLS in front",
    "--ssl-certfile": "is not supported: put a proxy with TLS in front",
    "--default-chat-template-kwargs": "has no counterpart here: send chat_template_kwargs with the call",
    "--enable-force-include-usage": "has no counterpart here: send stream_options with the call",
    "--headless": "has no counterpart here: join a Ray cluster by cluster.ray_address",
    "--otlp-traces-endpoint": "is gRPC's; name one for HTTP by `--set observability.otlp_endpoint=http://HOST:4318`",
}
NUM_VALUES: Mapping[str, int | None] = {
    **{name: flag.num_values for name, flag in FLAGS.items()},
    **{name: num for name, (num, _) in NEEDLESS.items()},
    **SPECIAL,
    **dict.fromkeys(SPECULATIVE, 1),
}


@dataclass(frozen=True, slots=True)
class EngineArgument:
    name: str
    is_switch: bool
    is_negated: bool = False


def engine_argument(flag: str, value: Any) -> EngineArgument:
    """Of vLLM's engine. Raises InvalidField: it has none of this name, or is not installed."""
    switches = argument_switches()
    name = flag.removeprefix("--").replace("-", "_")
    if name in switches:
        return EngineArgument(name, switches[name])
    positive = name.removeprefix("no_")
    if positive != name and switches.get(positive):
        return EngineArgument(positive, True, is_negated=True)
    raise InvalidField(flag, value, _unknown(flag, [f"--{one.replace('_', '-')}" for one in switches]))


def _unknown(name: str, of_engine: Sequence[str]) -> str:
    known = [*NUM_VALUES, *REFUSED, *of_engine]
    if nearest := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
        return f"is no flag; did you mean {nearest[0]}?"
    paths = {path.rpartition(".")[2].replace("_", "-"): path for path in field_paths()}
    if nearest := difflib.get_close_matches(name.removeprefix("--"), list(paths), n=1, cutoff=0.75):
        return f"is no flag; did you mean `--set {paths[nearest[0]]}=VALUE`?"
    if of_engine:
        return "is no flag of `vllm serve` that has a counterpart here; `--set FIELD=VALUE` sets any field"
    return "is no flag here; those of vLLM's engine need vLLM in this environment (`make setup-vllm`)"


def help_text() -> str:
    """Flags and their fields, for the terminal."""
    own = {
        "--config FILE": "configuration file; flags win over it",
        "--set FIELD=VALUE": "any field of the file, such as drafters[0].capacity=8; wins over all",
        "--revision R": "branch, tag or commit of the model",
        "--api-key KEY ...": "as api.api_keys_file, which the list of processes does not show",
        "--speculative-config JSON": "a drafter of the pool; may be repeated",
    }
    rows = {f"{name} {'N' if flag.convert is count else 'VALUE'}": flag.field for name, flag in FLAGS.items()}
    return "\n".join(f"  {name:32} {meaning}" for name, meaning in (own | rows).items())


def field_paths() -> Iterator[str]:
    """Dotted paths of the fields of all sections, without lists and kinds."""
    from pydantic import BaseModel

    from cluster.config import Config

    def walk(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, one in section.model_fields.items():
            if isinstance(one.annotation, type) and issubclass(one.annotation, BaseModel):
                yield from walk(one.annotation, f"{prefix}{name}.")
            else:
                yield prefix + name

    return walk(Config, "")
