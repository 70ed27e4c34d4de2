"""What calls get that leave sampling parameters out: the model's ``generation_config.json``, as with vLLM's
``--generation-config auto``."""

import json
from collections.abc import Mapping
from pathlib import Path

from cluster.config.file import ModelConfig
from cluster.errors import InvalidField, ModelUnavailable
from cluster.sampling_params import SCALARS, SamplingParams


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
    names = {name: name for name in SCALARS} | {"max_new_tokens": "max_tokens"}
    found = {field: raw[name] for name, field in names.items() if raw.get(name) is not None}
    found = {name: value for name, value in found.items() if name not in SCALARS or value not in SCALARS[name][1].off}
    try:
        SamplingParams(**{"max_tokens": 1, **found})
    except (InvalidField, TypeError) as error:
        raise ModelUnavailable(f"{path}: {error}; model.generation_config: none ignores the file's values") from error
    return found
