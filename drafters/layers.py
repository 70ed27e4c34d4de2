"""Drafters made of a few layers of their target.

A folder holds ``config.json`` (the target's, with fewer layers and the fingerprint of its tokenizer) and
``model.safetensors``: layers and final norm under their Hugging Face names, and ``draft_token_ids``, the ascending int64
token ids of a reduced head (the whole head without it). Embedding and head are the target's.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ModelUnavailable
from drafters.shipped import check_trained_for
from engine.factory import DTYPES, build_model
from engine.forward import CausalModel
from engine.models.config import load_config
from engine.models.int8 import WeightsKind, stored
from engine.models.prepare import weights_file
from engine.models.quantised import QuantisedMatrix
from engine.models.tokenizer import fingerprint
from engine.models.weights import SINGLE, DenseWeights, SafetensorsFolder, open_weights, shipped_weights, write_atomically

ARCHITECTURE = "OutriderLayersDrafter"
TOKEN_IDS = "draft_token_ids"
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")


def load_layers(folder: Path, target_folder: Path, dtype: str, device: str) -> tuple[CausalModel, Tensor | None]:
    """The drafter's model, and the token ids of its logits; None: all. Raises ModelUnavailable, and IncompatibleTokenizer if
    it was trained for another target."""
    config, target = load_config(folder), load_config(target_folder)
    if (config.vocab_size, config.hidden_size) != (target.vocab_size, target.hidden_size):
        raise ModelUnavailable(
            f"{folder}: {config.vocab_size} tokens of width {config.hidden_size}, but the target in {target_folder} has "
            f"{target.vocab_size} of width {target.hidden_size}: a drafter of layers serves only its own target"
        )
    trained_for = json.loads((folder / "config.json").read_text()).get("tokenizer_fingerprint")
    check_trained_for(f"the drafter in {folder}", trained_for, fingerprint(target_folder), target_folder.name)
    with ExitStack() as stack:
        kind, own = DTYPES[dtype], SafetensorsFolder(folder, stack)
        token_ids = _token_ids(own, folder, config.vocab_size)
        rows = stack.enter_context(open_weights(target_folder, target, kind))
        weights = _SharedRows(DenseWeights(config, own, kind), rows, token_ids)
        if device == "cpu" and kind == torch.bfloat16 and (file := weights_file(target_folder)) is not None:
            weights.embedding = shipped_weights(file, target).embedding  # mapped, where the target reads it, too
        return build_model(config, weights, dtype, device), token_ids


def save_layers(
    folder: Path, target_folder: Path, tensors: Mapping[str, Tensor], token_ids: Tensor | None, weights: WeightsKind = "bf16"
) -> None:
    """Writes a folder for ``load_layers``. Each file is replaced atomically.

    Args:
        tensors: by Hugging Face name, layers counted from 0; rows of embedding and head are omitted.
        token_ids: of the reduced head, ascending; None: the whole head.
        weights: of matrices (``engine.models.int8``); the rest is bfloat16.
    """
    own = {name: tensor for name, tensor in tensors.items() if name not in _SHARED}
    kept = stored(own, weights, lambda name: False)
    num_layers = 1 + max(int(name.split(".")[2]) for name in kept if name.startswith("model.layers."))
    if token_ids is not None:
        kept[TOKEN_IDS] = token_ids.to(torch.int64).cpu().contiguous()
    raw = json.loads((target_folder / "config.json").read_text())
    raw |= {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": num_layers,
        "tokenizer_fingerprint": fingerprint(target_folder),
    }
    raw.pop("layer_types", None)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / SINGLE, lambda path: save_file(kept, path, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", lambda path: path.write_text(json.dumps(raw, indent=2) + "\n"))


class _SharedRows:
    """``engine.models.weights.Weights``: layers and norm of the drafter, rows of the target."""

    def __init__(self, own: DenseWeights, target: DenseWeights, token_ids: Tensor | None) -> None:
        self._target, self._token_ids = target, token_ids
        self.layers, self.final_norm = own.layers, own.final_norm
        self.embedding: Callable[[], Tensor | QuantisedMatrix] = target.embedding

    def head(self) -> Tensor:
        head = self._target.head()
        return head if self._token_ids is None else head[self._token_ids]


def _token_ids(own: SafetensorsFolder, folder: Path, vocab_size: int) -> Tensor | None:
    if TOKEN_IDS not in own:
        return None
    token_ids = own.integers(TOKEN_IDS)
    is_list = token_ids.dim() == 1 and len(token_ids) > 0 and not token_ids.is_floating_point()
    ascend = is_list and bool((token_ids.diff() > 0).all())
    if not ascend or token_ids[0] < 0 or token_ids[-1] >= vocab_size:
        raise ModelUnavailable(f"{folder / SINGLE}: {TOKEN_IDS} must be ascending ids below {vocab_size}; train it again")
    return token_ids.to(torch.int64)
