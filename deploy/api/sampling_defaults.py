"""What calls get that leave sampling parameters out: the model's ``generation_config.json``, as with vLLM's
``--generation-config auto``."""

import json
from collections.abc import Mapping
from pathlib import Path

from cluster.config.file import ModelConfig
from cluster.errors import InvalidField, ModelUnavailable
from cluster.sampling_params import SamplingParams

# By the file's names, the fields of SamplingParams.
_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
    **{name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(model: ModelConfig, folder: Path) -> Mapping[str, float | int]:
    """Fields of SamplingParams by name, of the model in ``folder``; empty without the file, or if it is to be ignored.

    Raises ModelUnavailable: the file cannot be read, or has a value that no request may have.
    """
    path = folder / "generation_config.json"
    if model.generation_config == "none" or not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from error
    found = {field: raw[name] for name, field in _FIELDS.items() if raw.get(name) is not None}
    if found.get("top_k") == 0:  # off, as in Hugging Face's transformers
        del found["top_k"]
    try:
        SamplingParams(**{"max_tokens": 1, **found})
    except (InvalidField, TypeError) as error:
        raise ModelUnavailable(f"{path}: {error}; model.generation_config: none ignores the file's values") from error
    return found
