"""Prepares or downloads the models that a configuration names."""

import logging
from dataclasses import replace
from pathlib import Path

from cluster.config import (
    CascadeOptions,
    Config,
    DrafterOptions,
    HiddenStateOptions,
    LayersOptions,
    ModelOptions,
    TableOptions,
    VllmOptions,
)
from cluster.model_name import GGUF, HubName, public_name
from deploy.console import shown_progress
from drafters.speculator_search import speculators_for
from engine.models.hub import commit_of, fetch, local_folder, no_progress
from engine.models.prepare import ensure_model, ensure_tokenizer
from engine.vllm.environment import chosen_engine

logger = logging.getLogger(__name__)


def with_files(config: Config) -> Config:
    """Chooses the engine, and downloads what the configuration names of a hub. The result names each by its commit, so that
    all processes, also on other machines and after a restart, load the same files. Speculators at hand are logged where no
    drafters are named. Raises ModelUnavailable."""
    config = chosen_engine(config)
    model = _pinned(config.model.name)
    drafters = tuple(d.changed(options=drafter_files(d.options)) for d in config.drafters)
    modules = tuple(one.changed(path=Path(_pinned(str(one.path)))) for one in config.target.lora_modules)
    with shown_progress(model) as progress:
        folder = ensure_model(model, progress, config.target.engine)
    if "drafters" not in config.model_fields_set:
        for speculator in speculators_for(public_name(model), folder):
            logger.info("%s", speculator)
    return config.changed(model={"name": model}, target={"lora_modules": modules}, drafters=drafters)


def tokenizer_folder(config: Config, folder: str) -> str:
    """``folder`` of another machine, or, where that is not shared, the files of the hub's model without its weights. Raises
    ModelUnavailable."""
    name = HubName.parse(config.model.name)
    if Path(folder).exists() or (name is None and not config.model.name.endswith(GGUF)):
        return folder
    if name is None:
        return str(ensure_model(config.model.name))
    return str(fetch(name, no_progress, with_weights=False) if name.gguf is None else ensure_tokenizer(name))


def drafter_files(options: DrafterOptions) -> DrafterOptions:
    """As ``with_files``, of one drafter."""
    match options:
        case CascadeOptions():
            return options.model_copy(update={"members": tuple(drafter_files(member) for member in options.members)})
        case ModelOptions():
            return options.model_copy(update={"model": _pinned(options.model)})
        case LayersOptions() | HiddenStateOptions() | TableOptions():
            return options.model_copy(update={"path": options.path and _pinned(options.path)})
        case VllmOptions(speculative={"model": str(model)}):
            return options.model_copy(update={"speculative": {**options.speculative, "model": _pinned(model)}})
        case _:
            return options


def _pinned(name_or_path: str) -> str:
    name = HubName.parse(name_or_path)
    if (found := local_folder(name_or_path)) is not None or name is None:
        return str(found) if found is not None and found.suffix == GGUF else name_or_path
    with shown_progress(str(name)) as progress:
        snapshot = fetch(name, progress)
    logger.info("%s is in %s", name, snapshot)
    return str(replace(name, revision=commit_of(snapshot)))
