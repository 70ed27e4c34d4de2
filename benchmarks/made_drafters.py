"""Drafters made of the target itself, which need no download and no training."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import DRAFT_LEN
from cluster.config import HiddenStateKind
from cluster.types import ModelInfo
from drafters.hidden_states.checkpoint import GivenRows, new_network, save_speculators
from drafters.hidden_states.config import BlockConfig, EagleConfig, NetworkConfig
from drafters.model import ModelDrafter
from drafters.other_vocabulary import OtherVocabulary
from drafters.small_model import SmallModel
from engine.factory import build_model
from engine.models.config import load_config
from engine.models.tokenizer import read_token_bytes, read_vocabulary
from engine.models.weights import DenseWeights, open_weights

NUM_BLOCKS = 2048


class Renumbered:
    """``engine.models.weights.Weights``: row i of embedding and head is that of token ``ids[i]``."""

    def __init__(self, weights: DenseWeights, ids: Sequence[int]) -> None:
        self.layers, self.final_norm = weights.layers, weights.final_norm
        self._weights, self._ids = weights, torch.tensor(ids)

    def embedding(self) -> torch.Tensor:
        return self._weights.embedding()[self._ids]

    def head(self) -> torch.Tensor:
        return self._weights.head()[self._ids]


def under_another_vocabulary(folder: Path, target: ModelInfo, share: float = 0.5) -> ModelDrafter:
    """The target in ``folder`` under other numbers of its tokens, all single bytes and a ``share`` of the longer ones. It
    reads the others as these."""
    config = load_config(folder)
    spelled, controls = read_token_bytes(folder, config.vocab_size), read_vocabulary(folder).special
    rng, longer = random.Random(5), [i for i, text in enumerate(spelled) if len(text) > 1]
    ids = [i for i, text in enumerate(spelled) if len(text) < 2] + rng.sample(longer, int(share * len(longer)))
    rng.shuffle(ids)
    own_controls = {i: controls[token_id] for i, token_id in enumerate(ids) if token_id in controls}
    own_ends = [i for i, token_id in enumerate(ids) if token_id in config.eos_token_ids]
    own = [spelled[token_id] for token_id in ids]
    vocabulary = OtherVocabulary(own, spelled, own_controls, controls, own_ends, config.eos_token_ids)
    with open_weights(folder, config, torch.float32) as weights:
        model = build_model(replace(config, vocab_size=len(ids)), Renumbered(weights, ids), "float32", "cpu")
    ends = target.eos_token_ids
    return ModelDrafter(
        SmallModel(model, num_blocks=NUM_BLOCKS, vocab_size=target.vocab_size, eos_token_ids=ends, vocabulary=vocabulary)
    )


def write_reader(folder: Path, kind: HiddenStateKind, target: Path) -> Path:
    """An untrained drafter of hidden states in ``folder`` for the model in ``target``, right where chance helps."""
    model = load_config(target)
    last = model.num_layers - 2
    shared: dict[str, Any] = {
        "kind": kind,
        "shape": replace(model.truncated(1), tied_embeddings=False),
        "target_layer_ids": tuple(sorted({0, last // 2, last})),
        "target_hidden_size": model.hidden_size,
        "num_target_layers": model.num_layers,
    }
    config: NetworkConfig
    if kind in ("eagle3", "peagle"):
        config = EagleConfig(**shared, draft_len=DRAFT_LEN, mask_token_id=0 if kind == "peagle" else None)
    else:
        is_dspark = kind == "dspark"
        shared |= {"markov_rank": 8 * is_dspark, "has_confidence": is_dspark, "anchor_predicts": is_dspark}
        config = BlockConfig(**shared, block_size=DRAFT_LEN + (not is_dspark), mask_token_id=0)
    with open_weights(target, model, torch.float32) as weights:
        rows = GivenRows(weights.embedding().clone(), weights.head().clone())
    shape = json.loads((target / "config.json").read_text())
    save_speculators(new_network(config, rows), folder, shape, str(target))
    return folder
