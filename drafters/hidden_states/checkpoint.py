"""Folders of DSpark drafters: ``config.json`` and ``model.safetensors``, released by DeepSpec or written by us."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ModelUnavailable
from drafters.hidden_states.block_network import DSparkNetwork
from drafters.hidden_states.config import CONFIG, DSparkConfig, dspark_json, load_dspark_config
from engine.models.int8 import WeightsKind, stored
from engine.models.weights import SINGLE, SafetensorsFolder, write_atomically

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
DRAFT_TOKENS = "draft_token_ids.json"


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The target's rows that a drafter may share, both [vocab, hidden]."""

    embedding: Tensor
    head: Tensor


def load_network(folder: Path, target: TargetRows | None = None, dtype: torch.dtype = torch.float32) -> DSparkNetwork:
    """The network in ``folder``, in evaluation mode; ``target`` has embedding and head if they are not stored.

    Raises ModelUnavailable if it is missing, half-written, unsupported, or not of this target.
    """
    config = load_dspark_config(folder)
    with torch.device("meta"):
        network = DSparkNetwork(config)
    shared = _shared_rows(config, target, str(folder), dtype) if config.shares_embedding else {}
    with ExitStack() as stack:
        source = SafetensorsFolder(folder, stack)
        tensors = {
            name: shared[name] if name in shared else source.read(name, tuple(parameter.shape)).to(dtype)
            for name, parameter in network.named_parameters()
        }
    network.load_state_dict(tensors, assign=True)
    for parameter in (network.embed_tokens.weight, network.lm_head.weight):
        parameter.requires_grad_(False)
    return network.eval()


def new_network(config: DSparkConfig, target: TargetRows) -> DSparkNetwork:
    """An untrained network with the target's embedding and head. Raises ModelUnavailable if their shapes differ."""
    network = DSparkNetwork(config)
    network.load_state_dict(_shared_rows(config, target, "this drafter", network.norm.weight.dtype), strict=False)
    return network


def save_network(network: DSparkNetwork, folder: Path, shape: Mapping[str, Any], weights: WeightsKind = "bf16") -> None:
    """Writes a folder for ``load_network``. Each file is replaced atomically. ``shape`` as of ``dspark_json``."""
    config = network.config
    folder.mkdir(parents=True, exist_ok=True)
    raw = dspark_json(config, shape)
    if config.draft_token_ids is not None:
        token_ids = json.dumps(raw["draft_token_ids"], separators=(",", ":"))
        write_atomically(folder / DRAFT_TOKENS, lambda path: path.write_text(token_ids + "\n"))
        raw["draft_token_ids"] = DRAFT_TOKENS
    omitted = {EMBEDDING, HEAD} if config.shares_embedding else set()
    # Matrices over the raw features, some of which are very large, are quantised differently.
    first = "anchor_input.maps.weight" if config.anchor_input_rank is None else "anchor_input.reduce.weight"
    kept = {name: tensor.detach() for name, tensor in network.state_dict().items() if name not in omitted}
    tensors = stored(kept, weights, lambda name: name in ("fc.weight", first))
    write_atomically(folder / SINGLE, lambda path: save_file(tensors, path, {"format": "pt"}))
    write_atomically(folder / CONFIG, lambda path: path.write_text(json.dumps(raw, indent=2) + "\n"))


def _shared_rows(config: DSparkConfig, target: TargetRows | None, where: str, dtype: torch.dtype) -> dict[str, Tensor]:
    if target is None:
        raise ModelUnavailable(f"{where} stores no embedding of its own: it can only be loaded beside its target")
    wanted = (config.shape.vocab_size, config.shape.hidden_size)
    if target.embedding.shape != wanted or target.head.shape != wanted:
        raise ModelUnavailable(
            f"{where} is made for a target of {wanted[0]} tokens and hidden size {wanted[1]}, "
            f"this one has {tuple(target.embedding.shape)}"
        )
    rows = slice(None) if config.draft_token_ids is None else torch.tensor(config.draft_token_ids, device=target.head.device)
    return {EMBEDDING: target.embedding, HEAD: target.head[rows].to(dtype)}
