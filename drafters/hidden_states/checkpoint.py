"""Folders of drafters that read hidden states: loads any layout (``formats.py``), writes ours and the speculators format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ModelUnavailable
from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.config import BlockConfig, NetworkConfig
from drafters.hidden_states.families import Network, make_network
from drafters.hidden_states.formats import CONFIG, deepspec_json, read_config, speculators_json, stored_name
from drafters.hidden_states.tensors import Tensors, open_tensors
from engine.models.int8 import WeightsKind, stored
from engine.models.weights import SINGLE, write_atomically

EMBEDDING, HEAD, DRAFT_TO_TARGET = "embed_tokens.weight", "lm_head.weight", "d2t"
DRAFT_TOKENS = "draft_token_ids.json"
_BY_DRAFT_TOKEN = (HEAD, "markov_head.markov_w2.weight")  # a row for each token of the reduced vocabulary


class TargetRows(Protocol):
    """The target's rows that a drafter may share, both [vocab, hidden]."""

    @property
    def embedding(self) -> Tensor: ...

    @property
    def head(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class GivenRows:
    """``TargetRows`` in memory."""

    embedding: Tensor
    head: Tensor


def load_network(
    folder: Path, target: TargetRows | None = None, dtype: torch.dtype = torch.float32, num_target_layers: int | None = None
) -> Network:
    """The network in ``folder``, in evaluation mode; ``target`` has embedding and head if they are not stored.

    Raises ModelUnavailable if it is missing, half-written, unsupported, or not of this target.
    """
    config = read_config(folder, num_target_layers)
    try:
        with torch.device("meta"):
            network = make_network(config)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:  # of a size that is no positive number, say
        raise ModelUnavailable(f"{folder / CONFIG} describes no network that can be made: {error}") from error
    with open_tensors(folder) as source:
        tensors = {
            name: _tensor(source, name, parameter, config, target, str(folder), dtype)
            for name, parameter in network.named_parameters()
        }
        if DRAFT_TO_TARGET in source and config.draft_token_ids is not None:
            offsets = source.integers(DRAFT_TO_TARGET)
            order = (offsets + torch.arange(len(offsets))).argsort()
            tensors |= {n: tensors[n][order] for n in _BY_DRAFT_TOKEN if n in source and n in tensors}
    network.load_state_dict(tensors, assign=True)
    for parameter in (network.embed_tokens.weight, network.lm_head.weight):
        parameter.requires_grad_(False)
    return network.eval()


def new_network(config: NetworkConfig, target: TargetRows) -> Network:
    """An untrained network with the target's embedding and head. Raises ModelUnavailable if their shapes differ."""
    network = make_network(config)
    dtype = network.norm.weight.dtype
    rows = {name: _shared_rows(name, config, target, "this drafter", dtype) for name in (EMBEDDING, HEAD)}
    network.load_state_dict(rows, strict=False)
    return network


def save_network(network: BlockNetwork, folder: Path, shape: Mapping[str, Any], weights: WeightsKind = "bf16") -> None:
    """Writes a folder in our layout. Each file is replaced atomically. ``shape`` as of ``deepspec_json``."""
    config = network.config
    folder.mkdir(parents=True, exist_ok=True)
    raw = deepspec_json(config, shape)
    if config.draft_token_ids is not None:
        token_ids = json.dumps(raw["draft_token_ids"], separators=(",", ":"))
        write_atomically(folder / DRAFT_TOKENS, lambda path: path.write_text(token_ids + "\n"))
        raw["draft_token_ids"] = DRAFT_TOKENS
    omitted = {EMBEDDING, HEAD} if config.shares_embedding else set()
    # Matrices over the raw features, some of which are very large, are quantised differently.
    first = "anchor_input.maps.weight" if config.anchor_input_rank is None else "anchor_input.reduce.weight"
    kept = {name: tensor.detach() for name, tensor in network.state_dict().items() if name not in omitted}
    _write(folder, stored(kept, weights, lambda name: name in ("fc.weight", first)), raw)


def save_speculators(
    network: Network, folder: Path, shape: Mapping[str, Any], verifier: str, weights: WeightsKind = "bf16"
) -> None:
    """Writes a folder in the speculators format, which vLLM loads. ``shape`` as of ``deepspec_json``; ``verifier`` as of
    ``speculators_json``."""
    config = network.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
    if isinstance(network, BlockNetwork) and network.markov_head is not None:
        tensors["markov_head.markov_w1.weight"] = network.previous_embeddings(torch.arange(config.shape.vocab_size)).detach()
    tensors = stored(tensors, weights, lambda _: False)
    if config.draft_token_ids is not None:
        token_ids = torch.tensor(config.draft_token_ids)
        tensors[DRAFT_TO_TARGET] = token_ids - torch.arange(len(token_ids))
        tensors["t2d"] = torch.zeros(config.shape.vocab_size, dtype=torch.bool).index_fill(0, token_ids, value=True)
    _write(folder, tensors, speculators_json(config, shape, verifier))


def _write(folder: Path, tensors: Mapping[str, Tensor], raw: Mapping[str, Any]) -> None:
    write_atomically(folder / SINGLE, lambda path: save_file(dict(tensors), path, {"format": "pt"}))
    write_atomically(folder / CONFIG, lambda path: path.write_text(json.dumps(raw, indent=2) + "\n"))


def _tensor(
    source: Tensors,
    name: str,
    parameter: Tensor,
    config: NetworkConfig,
    target: TargetRows | None,
    where: str,
    dtype: torch.dtype,
) -> Tensor:
    shares = isinstance(config, BlockConfig) and config.shares_embedding
    if name in (EMBEDDING, HEAD) and (shares or name not in source):
        return _shared_rows(name, config, target, where, dtype)
    return source.read(stored_name(name, source), tuple(parameter.shape)).to(dtype)


def _shared_rows(name: str, config: NetworkConfig, target: TargetRows | None, where: str, dtype: torch.dtype) -> Tensor:
    if target is None:
        raise ModelUnavailable(f"{where} does not store {name}: it can only be loaded beside its target")
    rows = target.embedding if name == EMBEDDING else target.head
    wanted = (config.shape.vocab_size, config.shape.hidden_size)
    if rows.shape != wanted:
        raise ModelUnavailable(
            f"{where} is made for a target of {wanted[0]} tokens and hidden size {wanted[1]}, "
            f"this one has {tuple(rows.shape)}"
        )
    if name == EMBEDDING:
        return rows
    if config.draft_token_ids is not None:
        rows = rows[torch.tensor(config.draft_token_ids, device=rows.device)]
    return rows.to(dtype)
