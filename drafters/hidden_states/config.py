"""The configuration of a DSpark drafter: ``config.json``, as DeepSpec releases it and as `outrider train` writes it.

Released drafters have the target's configuration with their own number of layers and these keys:

    num_target_layers, block_size, mask_token_id, target_layer_ids, markov_rank, markov_head_type,
    enable_confidence_head, confidence_head_with_markov

Ours add those in ``_OURS``, each left out when off; ``draft_token_ids`` may be the name of a JSON file in the folder.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from cluster.errors import ModelUnavailable
from drafters.hidden_states.features import FeatureShape
from engine.models.config import DecoderConfig, parse_config

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")
CONFIG = "config.json"
_MAX_BLOCK_SIZE = 64
_OURS = ("shares_embedding", "draft_token_ids", "fc_bias", "anchor_input", "anchor_input_rank", "tokenizer_fingerprint")


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """Sizes of the drafter; its hidden size is the target's.

    ``target_layer_ids`` select the target's hidden states that are its features: -1 is the embedding, i is transformers'
    ``hidden_states[i + 1]``, so the last layer's is taken after the final norm.
    """

    shape: DecoderConfig
    num_target_layers: int
    block_size: int  # gamma: the anchor and block_size - 1 masks draft as many tokens
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int  # r; 0: no sequential head
    markov_kind: MarkovKind = "vanilla"
    has_confidence: bool = False
    confidence_with_markov: bool = False
    shares_embedding: bool = False  # embedding and head are the target's rows, and are not stored
    draft_token_ids: tuple[int, ...] | None = None  # ascending; None: the whole vocabulary
    fc_bias: bool = False  # of the features' projection; it absorbs their standardisation
    anchor_input: bool = False  # ``network.AnchorInput``
    anchor_input_rank: int | None = None  # None: full rank
    tokenizer_fingerprint: str | None = None  # None: unknown

    @property
    def features(self) -> FeatureShape:
        return FeatureShape(self.target_layer_ids, self.shape.hidden_size)

    @property
    def feature_size(self) -> int:
        return self.features.width

    @property
    def num_outputs(self) -> int:
        """Rows of the head: tokens that can be drafted."""
        return self.shape.vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)

    @property
    def num_markov_rows(self) -> int:
        """Rows of W_1. With a reduced vocabulary the last one is for all tokens outside it, which may be anchors."""
        return self.num_outputs + (self.draft_token_ids is not None)


def load_dspark_config(folder: Path) -> DSparkConfig:
    """Raises ModelUnavailable."""
    path = folder / CONFIG
    raw = _read_json(path)
    if not isinstance(raw, dict):
        raise ModelUnavailable(f"{path} is not a JSON object")
    token_ids = raw.get("draft_token_ids")
    if isinstance(token_ids, str):
        raw["draft_token_ids"] = _read_json(folder / token_ids)
    try:
        return parse_dspark_config(raw)
    except KeyError as missing:
        raise ModelUnavailable(f"{path} has no field {missing}: it is not a DSpark drafter") from missing
    except ModelUnavailable as refused:
        raise ModelUnavailable(f"{path}: {refused}") from refused


def parse_dspark_config(raw: Mapping[str, Any]) -> DSparkConfig:
    """Of a parsed ``config.json``, with the list of draft tokens itself. Raises ModelUnavailable if it is not supported or
    contradictory, and KeyError if a required field is missing."""
    architecture = (raw["architectures"] or [""])[0]
    if not str(architecture).endswith("DSparkModel"):
        raise ModelUnavailable(f"architecture {architecture!r} is not a DSpark drafter, whose name ends in 'DSparkModel'")
    shape = parse_config(raw)
    rank = _int(raw, "markov_rank", low=0)
    has_confidence = bool(raw["enable_confidence_head"])
    token_ids, anchor_rank = raw.get("draft_token_ids"), raw.get("anchor_input_rank")
    config = DSparkConfig(
        shape=shape,
        num_target_layers=_int(raw, "num_target_layers", low=1),
        block_size=_int(raw, "block_size", low=1, high=_MAX_BLOCK_SIZE),
        mask_token_id=_int(raw, "mask_token_id", low=0, high=shape.vocab_size - 1),
        target_layer_ids=_ascending(raw, "target_layer_ids", -1, _int(raw, "num_target_layers", low=1) - 1),
        markov_rank=rank,
        markov_kind=_markov_kind(raw["markov_head_type"]) if rank else "vanilla",
        has_confidence=has_confidence,
        confidence_with_markov=has_confidence and bool(raw["confidence_head_with_markov"]),
        shares_embedding=bool(raw.get("shares_embedding", False)),
        draft_token_ids=None if token_ids is None else _ascending(raw, "draft_token_ids", 0, shape.vocab_size - 1),
        fc_bias=bool(raw.get("fc_bias", False)),
        anchor_input=bool(raw.get("anchor_input", False)),
        anchor_input_rank=None if anchor_rank is None else _int(raw, "anchor_input_rank", low=1),
        tokenizer_fingerprint=raw.get("tokenizer_fingerprint"),
    )
    if config.confidence_with_markov and not rank:
        raise ModelUnavailable("confidence_head_with_markov needs a Markov head, but markov_rank is 0")
    if config.anchor_input_rank is not None and not config.anchor_input:
        raise ModelUnavailable("anchor_input_rank is set, but anchor_input is not")
    return config


def dspark_json(config: DSparkConfig, shape: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of ``config``. ``shape``: a configuration of transformers with the shape of its layers."""
    return {
        **shape,
        "architectures": [f"{config.shape.architecture.capitalize()}DSparkModel"],
        "num_hidden_layers": config.shape.num_layers,
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
        **{key: value for key in _OURS if (value := getattr(config, key))},
    }


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelUnavailable(f"{path} is missing: the folder holds no trained drafter, or an incomplete one") from error
    except NotADirectoryError as error:
        raise ModelUnavailable(f"{path.parent} is not a folder: name the folder of a trained drafter") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON ({error}); it may be half-written") from error


def _int(raw: Mapping[str, Any], key: str, low: int, high: int = 2**31 - 1) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelUnavailable(f"{key} must be a whole number between {low} and {high}, got {value!r}")
    return value


def _markov_kind(value: Any) -> MarkovKind:
    if value not in MARKOV_KINDS:
        raise ModelUnavailable(f"markov_head_type {value!r} is not supported; supported are {', '.join(MARKOV_KINDS)}")
    return cast(MarkovKind, value)


def _ascending(raw: Mapping[str, Any], key: str, low: int, high: int) -> tuple[int, ...]:
    ids = raw[key]
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(type(item) is int for item in ids):
        raise ModelUnavailable(f"{key} must be a list of whole numbers")
    if not ids or any(a >= b for a, b in pairwise(ids)) or ids[0] < low or ids[-1] > high:
        raise ModelUnavailable(f"{key} must ascend between {low} and {high}")
    return tuple(ids)
