"""Random drafters that read hidden states for tiny targets, and features without a serving target."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.config import HiddenStateKind
from cluster.sampling_params import SamplingParams
from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.checkpoint import GivenRows, load_network, new_network, save_network, save_speculators
from drafters.hidden_states.config import BlockConfig, EagleConfig, NetworkConfig
from drafters.hidden_states.drafter import HiddenStateDrafter
from drafters.hidden_states.families import Network, make_stage
from drafters.hidden_states.formats import parse_deepspec
from drafters.hidden_states.sequential import SequentialStage
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from engine.factory import load_model
from engine.forward import CausalModel, PackedSpan
from engine.models.config import load_config
from engine.models.weights import open_weights
from engine.sampling import Sampler
from engine.target import FeatureSpan
from profiler.calibration import Calibration, TemperatureScaling

CPU = torch.device("cpu")


def target_rows(folder: Path) -> GivenRows:
    with open_weights(folder, load_config(folder), torch.float32) as weights:
        return GivenRows(weights.embedding().clone(), weights.head().clone())


def write_dspark(folder: Path, target_folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A drafter with random weights for the model in ``target_folder``; ``changes`` go into ``config.json``."""
    target = json.loads((target_folder / "config.json").read_text())
    raw = {
        **target,
        "architectures": ["LlamaDSparkModel"],
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": 2,
        "block_size": 6,
        "mask_token_id": 5,
        "target_layer_ids": [0, target["num_hidden_layers"] - 1],
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "shares_embedding": True,
        "fc_bias": True,
        **changes,
    }
    network = new_network(parse_deepspec(raw), target_rows(target_folder))
    assert isinstance(network, BlockNetwork)
    randomise(network, seed)
    save_network(network, folder, raw, "fp32")
    return folder


@torch.no_grad()
def randomise(network: Network, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and "norm" not in name:
            width = parameter.shape[-1] if parameter.dim() > 1 else 16
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / width**0.5)


def config_of_kind(kind: HiddenStateKind, target_folder: Path, **changes: Any) -> NetworkConfig:
    """A drafter of six tokens for the model in ``target_folder``."""
    target = load_config(target_folder)
    shared = {
        "kind": kind,
        "target_layer_ids": (0, target.num_layers - 2),
        "target_hidden_size": target.hidden_size,
        "shape": replace(target.truncated(2 if kind != "eagle3" else 1), tied_embeddings=False),
        "num_target_layers": target.num_layers,
    }
    if kind in ("eagle3", "peagle"):
        mask = {"mask_token_id": 5} if kind == "peagle" else {}
        return EagleConfig(**{**shared, "draft_len": 6, **mask, **changes})
    sizes = {"block_size": 7, "mask_token_id": 5, "anchor_predicts": False}
    if kind == "dspark":
        sizes |= {"block_size": 6, "anchor_predicts": True, "markov_rank": 8, "has_confidence": True}
    return BlockConfig(**{**shared, **sizes, **changes})


def write_speculators(folder: Path, target_folder: Path, kind: HiddenStateKind, *, seed: int = 0, **changes: Any) -> Network:
    """A random drafter in the speculators format. ``changes``: of its configuration."""
    network = new_network(config_of_kind(kind, target_folder, **changes), target_rows(target_folder))
    randomise(network, seed)
    save_speculators(network, folder, json.loads((target_folder / "config.json").read_text()), "target", "fp32")
    return network.eval()


class PrefixFeatures:
    """A target's features for any tokens, computed at each call."""

    def __init__(self, model: CausalModel, layers: Sequence[int]) -> None:
        self._model, self._layers = model, tuple(layers)
        self._cache = model.new_cache(-(-model.config.max_len // 32))
        self.token_ids: dict[str, list[int]] = {}
        self.num_rows = 0

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], Tensor]:
        held = [span.stop < len(self.token_ids[span.request_id]) for span in spans]
        return held, torch.cat([self._rows(span) for span in compress(spans, held)] or [torch.empty(0)])

    def _rows(self, span: FeatureSpan) -> Tensor:
        token_ids = self.token_ids[span.request_id]
        self.num_rows += span.stop - span.start
        table = np.arange(self._cache.num_blocks, dtype=np.int32)
        packed = [PackedSpan(0, token_ids[: span.stop], table)]
        found = self._model.forward_with_hidden_states(packed, self._cache, self._layers)
        return found.features[span.start : span.stop].clone()


class WithFeatures:
    """A drafter and its ``PrefixFeatures``, which receive the same tokens."""

    capabilities = Capabilities()

    def __init__(self, drafter: Drafter, features: PrefixFeatures) -> None:
        self.drafter, self.features = drafter, features

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.features.token_ids[request_id] = list(token_ids)
        self.drafter.open(request_id, token_ids, prompt_len, sampling, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.features.token_ids[request_id].extend(token_ids)
        self.drafter.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return self.drafter.propose(demands)

    def release(self, request_id: str) -> None:
        self.features.token_ids.pop(request_id, None)
        self.drafter.release(request_id)

    def check_integrity(self) -> None:
        self.drafter.check_integrity()


def make_dspark(
    folder: Path,
    target_folder: Path,
    *,
    num_blocks: int = 64,
    min_survival: float = 0.0,
    temperatures: Sequence[float] = (1.0,),
    eos_token_ids: Sequence[int] = (256,),
    model: CausalModel | None = None,
    int8: bool = False,
    with_margins: Mapping[float, TemperatureScaling] | None = None,
    device: torch.device = CPU,
) -> WithFeatures:
    network = load_network(folder, target_rows(target_folder), num_target_layers=load_config(target_folder).num_layers)
    sampler = Sampler(network.config.shape.vocab_size, eos_token_ids)
    calibration = Calibration({0.0: TemperatureScaling(tuple(temperatures))}, with_margins or {})
    sequential = SequentialStage(network, torch.float32, device, sampler, min_survival, int8=int8)
    stage = make_stage(network, torch.float32, device, int8=int8)
    features = PrefixFeatures(model or load_model(target_folder, "float32", device.type), network.config.target_layer_ids)
    drafter = HiddenStateDrafter(
        stage, sequential, features, calibration, num_blocks=num_blocks, eos_token_ids=eos_token_ids
    )
    return WithFeatures(drafter, features)
