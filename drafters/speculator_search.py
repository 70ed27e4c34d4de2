"""Speculators that were made for a model: heads in its own folder, and drafters in the hub's cache. No torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import HIDDEN_STATE_FORMS
from drafters.shipped import kind_of
from engine.models.hub import cache_folder

_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")  # of config.json, by family


@dataclass(frozen=True, slots=True)
class Speculator:
    """``config``: the value of ``--speculative-config`` that adds it to the pool."""

    what: str
    config: Mapping[str, str]
    engine: str = ""  # that it needs

    def __str__(self) -> str:
        needs = f" --set target.engine={self.engine}" if self.engine else ""
        return f"{self.what}: add it by --speculative-config '{json.dumps(self.config)}'{needs}"


def speculators_for(model: str, folder: Path) -> list[Speculator]:
    """Of the model that clients call ``model``, in ``folder``."""
    shape = shape_of(folder)
    found = []
    if any(shape.get(name) for name in _MTP_FIELDS):
        found.append(Speculator("the model has multi-token prediction heads", {"method": "mtp"}, "vllm"))
    return found + list(_in_cache(model, shape))


def shape_of(folder: Path) -> Mapping[str, Any]:
    """The configuration of the model in ``folder``, or of its part that reads text. Empty without a readable one."""
    config = _config(folder)
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def _in_cache(model: str, target: Mapping[str, Any]) -> Iterator[Speculator]:
    for repo in sorted(cache_folder().glob("models--*--*")):
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted(repo.glob("snapshots/*")):
            config = _config(snapshot)
            described = config.get("speculators_config")
            verifier = described.get("verifier") if isinstance(described, dict) else None
            if isinstance(verifier, dict) and verifier.get("name_or_path") == model:
                method = str(config.get("speculators_model_type"))
                what = f"{name} in the hub's cache is a speculator ({method}) for {model}"
                yield Speculator(what, {"method": method, "model": name}, "vllm")
                break
            kind = kind_of(snapshot)
            if kind in HIDDEN_STATE_FORMS and _fits(config, target):
                what = f"{name} in the hub's cache is a {kind} drafter of {model}'s shape"
                yield Speculator(what, {"method": kind, "model": name})
                break


def _fits(drafter: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Whether a drafter reads hidden states like the target's."""
    pairs = (("num_target_layers", "num_hidden_layers"), ("hidden_size", "hidden_size"), ("vocab_size", "vocab_size"))
    return all(drafter.get(own) == target.get(of_target) for own, of_target in pairs)


def _config(folder: Path) -> Mapping[str, Any]:
    """Empty for a folder without a readable one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
