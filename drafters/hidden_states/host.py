"""Colocated drafters: made in the target's process, reading its hidden states."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cluster.config import DSparkOptions
from cluster.errors import ModelUnavailable
from cluster.types import ModelInfo
from drafters.hidden_states.adapter import find_adapter
from drafters.hidden_states.checkpoint import TargetRows
from drafters.hidden_states.config import DSparkConfig, load_dspark_config
from drafters.hidden_states.drafter import DSparkDrafter, load_dspark
from drafters.hidden_states.features import HostFeatures
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
    """The target in whose process a drafter is made."""

    engine: FeatureSource
    folder: Path  # of the target's model

    @cached_property
    def config(self) -> DecoderConfig:
        return load_config(self.folder)


def make_dspark(options: DSparkOptions, target: ModelInfo, host: Host) -> DSparkDrafter:
    """Raises as ``drafters.registry.make_drafter``; InvalidField also if the target does not keep its hidden states."""
    folder = find_drafter(options.path)
    config = load_dspark_config(folder)
    device = host.engine.embedding.device
    dtype = choose_dtype(options.dtype, device.type, allows_int8=True)
    _check_fits(folder, config, target, host)
    return load_dspark(
        folder,
        _rows(host) if config.shares_embedding else None,
        dtype,
        target,
        device,
        HostFeatures(host.engine, config.features),
        adapter=None if options.adapter is None else find_adapter(folder, options.adapter),
        num_blocks=num_blocks_for(config.shape, int(options.kv_cache_gb * 2**30), DTYPES[dtype]),
        calibration=load_calibration(folder / FILE) if (folder / FILE).is_file() else None,
        min_survival=options.min_survival,
    )


def _check_fits(folder: Path, config: DSparkConfig, target: ModelInfo, host: Host) -> None:
    served = host.config
    own = (config.num_target_layers, config.shape.hidden_size, config.shape.vocab_size)
    if own != (served.num_layers, served.hidden_size, served.vocab_size):
        raise ModelUnavailable(
            f"{folder} is made for a target of {own[0]} layers, hidden size {own[1]} and {own[2]} tokens; {target.name} has "
            f"{served.num_layers}, {served.hidden_size} and {served.vocab_size}: train one for it with `outrider train`"
        )
    check_trained_for(f"the drafter in {folder}", config.tokenizer_fingerprint, target.tokenizer_fingerprint, target.name)


def _rows(host: Host) -> TargetRows:
    """The target's embedding in memory, and its head: the same, or read again, since the loaded one is packed."""
    embedding = host.engine.embedding
    if host.config.tied_embeddings:
        return TargetRows(embedding, embedding)
    with open_weights(host.folder, host.config, embedding.dtype) as weights:
        return TargetRows(embedding, weights.head().to(embedding.device, copy=True))
