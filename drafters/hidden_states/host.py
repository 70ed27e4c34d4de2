"""Colocated drafters: made in the target's process, reading its hidden states."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from cluster.config import HiddenStateOptions
from cluster.errors import ModelUnavailable
from cluster.types import MAX_DRAFT_LEN, ModelInfo
from drafters.hidden_states.config import NetworkConfig
from drafters.hidden_states.drafter import HiddenStateDrafter, load_drafter
from drafters.hidden_states.features import HostFeatures
from drafters.hidden_states.formats import read_config
from drafters.session import request_id_of
from drafters.shipped import check_trained_for, find_drafter
from engine.dtypes import choose_dtype
from engine.factory import DTYPES
from engine.kv_cache import num_blocks_for
from engine.models.config import DecoderConfig, load_config
from engine.models.weights import open_weights
from engine.target import FeatureSource
from profiler.calibration import FILE, load_calibration


@dataclass(frozen=True)
class Host:
    """The target in whose process a drafter is made; ``checkpoint.TargetRows`` of it."""

    engine: FeatureSource
    folder: Path  # of the target's model
    name_of: Callable[[str], str] = request_id_of  # the engine's name of a request, from the drafter's
    warm_ups: list[Callable[[], None]] = field(default_factory=list)  # of what was made for it

    @cached_property
    def config(self) -> DecoderConfig:
        return load_config(self.folder)

    @property
    def embedding(self) -> Tensor:
        return self.engine.embedding

    @cached_property
    def head(self) -> Tensor:
        """The embedding, or read again, since the loaded one is packed."""
        if self.config.tied_embeddings:
            return self.embedding
        with open_weights(self.folder, self.config, self.embedding.dtype) as weights:
            return weights.head().to(self.embedding.device, copy=True)


def make_hidden_state_drafter(
    options: HiddenStateOptions, target: ModelInfo, host: Host, max_draft_len: int = MAX_DRAFT_LEN
) -> HiddenStateDrafter:
    """``max_draft_len`` as of ``load_drafter``. Raises as ``drafters.registry.make_drafter``; InvalidField also if the
    target does not keep its hidden states."""
    folder = find_drafter(options.path)
    config = read_config(folder, host.config.num_layers)
    if config.kind != options.kind:
        raise ModelUnavailable(f"{folder} holds a drafter of kind {config.kind}, not of kind {options.kind}")
    _check_fits(folder, config, target, host)
    device = host.embedding.device
    dtype = choose_dtype(options.dtype, device.type, allows_int8=True)
    drafter = load_drafter(
        folder,
        host,
        dtype,
        target,
        device,
        HostFeatures(host.engine, config.features, host.name_of),
        num_target_layers=host.config.num_layers,
        num_blocks=num_blocks_for(config.shape, int(options.kv_cache_gb * 2**30), DTYPES[dtype]),
        calibration=load_calibration(folder / FILE) if (folder / FILE).is_file() else None,
        min_survival=options.min_survival,
        max_draft_len=max_draft_len,
    )
    host.warm_ups.append(drafter.warm_up)
    return drafter


def _check_fits(folder: Path, config: NetworkConfig, target: ModelInfo, host: Host) -> None:
    served = host.config
    num_layers = served.num_layers if config.num_target_layers is None else config.num_target_layers
    own = (num_layers, config.target_hidden_size, config.shape.vocab_size)
    if own != (served.num_layers, served.hidden_size, served.vocab_size):
        raise ModelUnavailable(
            f"{folder} is made for a target of {own[0]} layers, hidden size {own[1]} and {own[2]} tokens; {target.name} has "
            f"{served.num_layers}, {served.hidden_size} and {served.vocab_size}: train one for it with `outrider train`"
        )
    if max(config.target_layer_ids) >= served.num_layers:
        reads = list(config.target_layer_ids)
        raise ModelUnavailable(f"{folder} reads the layers {reads}; {target.name} has {served.num_layers}")
    check_trained_for(f"the drafter in {folder}", config.tokenizer_fingerprint, target.tokenizer_fingerprint, target.name)
