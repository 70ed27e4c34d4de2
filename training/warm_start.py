"""Training that starts from a trained DSpark drafter and keeps its shape."""

from dataclasses import fields, replace
from typing import Any

from cluster.errors import InvalidField
from drafters.hidden_states.config import BlockConfig
from drafters.hidden_states.formats import read_config
from drafters.shipped import find_drafter, kind_of
from engine.models.config import DecoderConfig
from training.frozen import FrozenTarget
from training.recipe import HEADS, TrainOptions, feature_layers


def warm_start(options: TrainOptions, target: FrozenTarget) -> TrainOptions:
    """The options with the shape of the drafter to begin with. Raises InvalidField if it does not fit; ModelUnavailable."""
    folder = find_drafter(str(options.begin_with))
    if kind_of(folder) != options.drafter:
        raise InvalidField("begin_with", folder.name, f"must be the folder of a drafter of kind {options.drafter}")
    config = read_config(folder)
    assert isinstance(config, BlockConfig)
    reason = _mismatch(config, target)
    if reason is not None:
        raise InvalidField("begin_with", folder.name, reason)
    shape: dict[str, Any] = {
        "num_layers": config.shape.num_layers,
        "block_size": config.block_size,
        "vocabulary": config.num_outputs,
        "head": next(head for head, kind in HEADS.items() if kind == config.markov_kind),
        "markov_rank": config.markov_rank,
        "anchor_rank": config.anchor_input_rank or config.feature_size + config.shape.hidden_size,
    }
    defaults = {field.name: field.default for field in fields(TrainOptions)}
    for name, value in shape.items():
        asked = getattr(options, name)
        if asked != value and (asked != defaults[name] or name in options.asked):
            raise InvalidField(name, asked, f"must be left out, or {value} as the drafter in {folder.name} has it")
    return replace(options, begin_with=folder, **shape)


def _mismatch(config: BlockConfig, target: FrozenTarget) -> str | None:
    own, wanted = target.model.config, feature_layers(target.model.config.num_layers)
    if _layer_shape(config.shape) != _layer_shape(own) or config.num_target_layers != own.num_layers:
        return (
            f"must be a drafter for {target.info.name}, with {own.num_layers} layers of width {own.hidden_size} and "
            f"{own.vocab_size} tokens; it is for {config.num_target_layers} of width {config.shape.hidden_size} and "
            f"{config.shape.vocab_size} tokens"
        )
    if config.tokenizer_fingerprint not in (None, target.info.tokenizer_fingerprint):
        return f"must have been trained with the tokenizer of {target.info.name}"
    if config.target_layer_ids != wanted:
        return f"must read the layers {list(wanted)} of its target, not {list(config.target_layer_ids)}"
    if not (config.shares_embedding and config.fc_bias):
        return "must be a drafter that `outrider train` made, which shares its target's rows"
    return None


def _layer_shape(shape: DecoderConfig) -> DecoderConfig:
    """What all layers of a drafter share with those of its target."""
    return replace(shape, num_layers=1, tied_embeddings=False, eos_token_ids=())
