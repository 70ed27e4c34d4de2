"""Layouts of drafters' folders: ``config.json`` and weights.

- vLLM's speculators format: ``speculators_model_type``, and the shape of the layers in ``transformer_layer_config``. An
  auxiliary layer id i means the input of the target's layer i, so the output of layer i - 1.
- The original ones: DeepSpec's DSpark, z-lab's DFlash (``target_layer_ids`` i: the output of layer i), SafeAILab's EAGLE-3
  (``midlayer``; the inputs of layers 2, L / 2 and L - 3 unless it names others).
- Ours: DeepSpec's, with the keys in ``_OURS``, each left out when off; ``draft_token_ids`` may name a JSON file.

``d2t`` holds, for each row of a reduced head, its token id less the row's number.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from cluster.config import HiddenStateKind
from cluster.errors import ModelUnavailable
from drafters.hidden_states.config import MARKOV_KINDS, BlockConfig, EagleConfig, MarkovKind, NetworkConfig
from drafters.hidden_states.tensors import Tensors, open_tensors
from drafters.shipped import kind_of_config
from drafters.speculator_search import shape_of
from engine.models.config import DecoderConfig, parse_config


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelUnavailable(f"{path} is missing: the folder holds no trained drafter, or an incomplete one") from error
    except NotADirectoryError as error:
        raise ModelUnavailable(f"{path.parent} is not a folder: name the folder of a trained drafter") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON ({error}); it may be half-written") from error


def whole_number(raw: Mapping[str, Any], key: str, low: int, high: int = 2**31 - 1) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelUnavailable(f"{key} must be a whole number between {low} and {high}, got {value!r}")
    return value


def markov_kind(value: Any) -> MarkovKind:
    if value not in MARKOV_KINDS:
        raise ModelUnavailable(f"markov_head_type {value!r} is not supported; supported are {', '.join(MARKOV_KINDS)}")
    return cast(MarkovKind, value)


def ascending(raw: Mapping[str, Any], key: str, low: int, high: int) -> tuple[int, ...]:
    ids = raw[key]
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(type(item) is int for item in ids):
        raise ModelUnavailable(f"{key} must be a list of whole numbers")
    if not ids or any(a >= b for a, b in pairwise(ids)) or ids[0] < low or ids[-1] > high:
        raise ModelUnavailable(f"{key} must ascend between {low} and {high}")
    return tuple(ids)


CONFIG = "config.json"
_MAX_BLOCK_SIZE = 64
_DEFAULT_DRAFT_LEN = 8
_OURS = ("shares_embedding", "draft_token_ids", "fc_bias", "anchor_input", "anchor_input_rank", "tokenizer_fingerprint")
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Speculators write only what differs from these, the defaults of transformers.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}
# What would be computed in another way than it was trained.
_UNSUPPORTED = ("attention_sink_bias", "attention_value_scale", "conv_kernel_size", "selector_rank")

_SPECULATOR_NAMES: Mapping[HiddenStateKind, str] = {
    "dspark": "DSparkSpeculator",
    "dflash": "DFlashSpeculator",
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
}

Reader = Callable[[Mapping[str, Any], int | None, Tensor | None], NetworkConfig]


def read_config(folder: Path, num_target_layers: int | None = None) -> NetworkConfig:
    """The shape of the drafter in ``folder``. ``num_target_layers``: needed where it names no layers of its target.
    Raises ModelUnavailable."""
    path = folder / CONFIG
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ModelUnavailable(f"{path} is not a JSON object")
    kind = kind_of_config(raw)
    is_speculators = "speculators_model_type" in raw
    if kind == "mtp":
        raise ModelUnavailable(f"{path}: kind mtp is part of its target and comes with it: use kind vllm on a vLLM target")
    reader = (_SPECULATORS if is_speculators else _ORIGINAL).get(kind or "")
    if kind == "dflash" and "markov_rank" in raw and not is_speculators:
        reader = parse_deepspec
    if reader is None:
        raise ModelUnavailable(f"{path} describes no drafter that reads hidden states; known are {', '.join(_ORIGINAL)}")
    if isinstance(raw.get("draft_token_ids"), str):
        raw["draft_token_ids"] = read_json(folder / raw["draft_token_ids"])
    try:
        return reader(raw, num_target_layers, _offsets(folder, raw))
    except KeyError as missing:
        raise ModelUnavailable(f"{path} has no field {missing}: it is not a drafter of kind {kind}") from missing
    except ModelUnavailable as refused:
        raise ModelUnavailable(f"{path}: {refused}") from refused
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelUnavailable(f"{path} has a value of the wrong kind: {error}") from error


def num_layers_of(model: Path) -> int:
    """Of the target in a folder, whichever engine reads it. Raises ModelUnavailable."""
    num = shape_of(model).get("num_hidden_layers") if isinstance(read_json(model / CONFIG), dict) else None
    if not isinstance(num, int):
        raise ModelUnavailable(f"{model / CONFIG} does not say how many layers the model has")
    return num


def parse_deepspec(raw: Mapping[str, Any], _: int | None = None, __: Tensor | None = None) -> BlockConfig:
    """Of DeepSpec's ``config.json`` or ours, with the list of draft tokens itself. Raises ModelUnavailable, KeyError."""
    shape = parse_config(raw)
    rank, has_confidence = whole_number(raw, "markov_rank", low=0), bool(raw["enable_confidence_head"])
    token_ids, anchor_rank = raw.get("draft_token_ids"), raw.get("anchor_input_rank")
    num_target_layers = whole_number(raw, "num_target_layers", low=1)
    config = BlockConfig(
        kind="dflash" if kind_of_config(raw) == "dflash" else "dspark",
        shape=shape,
        num_target_layers=num_target_layers,
        target_hidden_size=shape.hidden_size,
        block_size=whole_number(raw, "block_size", low=1, high=_MAX_BLOCK_SIZE),
        mask_token_id=whole_number(raw, "mask_token_id", low=0, high=shape.vocab_size - 1),
        target_layer_ids=ascending(raw, "target_layer_ids", -1, num_target_layers - 1),
        markov_rank=rank,
        markov_kind=markov_kind(raw["markov_head_type"]) if rank else "vanilla",
        has_confidence=has_confidence,
        confidence_with_markov=has_confidence and bool(raw["confidence_head_with_markov"]),
        shares_embedding=bool(raw.get("shares_embedding", False)),
        draft_token_ids=None if token_ids is None else ascending(raw, "draft_token_ids", 0, shape.vocab_size - 1),
        fc_bias=bool(raw.get("fc_bias", False)),
        anchor_input=bool(raw.get("anchor_input", False)),
        anchor_input_rank=None if anchor_rank is None else whole_number(raw, "anchor_input_rank", low=1),
        tokenizer_fingerprint=raw.get("tokenizer_fingerprint"),
    )
    if config.anchor_input_rank is not None and not config.anchor_input:
        raise ModelUnavailable("anchor_input_rank is set, but anchor_input is not")
    return _checked(config)


def deepspec_json(config: BlockConfig, shape: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of ``config``. ``shape``: a configuration of transformers with the shape of its layers."""
    return {
        **shape,
        "architectures": [
            f"{config.shape.architecture.capitalize()}{_SPECULATOR_NAMES[config.kind]}".replace("Speculator", "Model")
        ],
        "num_hidden_layers": config.shape.num_layers,
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in ("num_target_layers", "block_size", "mask_token_id", "markov_rank")},
        "target_layer_ids": list(config.target_layer_ids),
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
        **{key: value for key in _OURS if (value := getattr(config, key))},
    }


def speculators_json(config: NetworkConfig, shape: Mapping[str, Any], verifier: str) -> dict[str, Any]:
    """The same in the speculators format. ``verifier``: name or folder of the target. Raises ValueError: the format has no
    place for what the drafter computes."""
    lost = [name for name in ("fc_bias", "anchor_input") if getattr(config, name, False)]
    windows = {window for window in config.windows if window is not None}
    causal = {is_causal for window, is_causal in zip(config.windows, getattr(config, "causal", ()), strict=False) if window}
    if lost or len(windows) > 1 or len(causal) > 1:
        raise ValueError(f"the speculators format has no {lost[0] if lost else 'layers of different windows or causality'}")
    layer = {key: value for key, value in shape.items() if key not in ("architectures", "eos_token_id", "layer_types")}
    ids = [layer_id + 1 for layer_id in config.target_layer_ids]
    raw: dict[str, Any] = {
        "speculators_model_type": config.kind,
        "speculators_version": "0.9.0",
        "architectures": [_SPECULATOR_NAMES[config.kind]],
        "draft_vocab_size": config.num_outputs,
        "tokenizer_fingerprint": config.tokenizer_fingerprint,
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "transformer_layer_config": {
            **layer,
            "model_type": config.shape.architecture,
            "layer_types": [_SLIDING if window else _FULL for window in config.windows] or None,
            "sliding_window": min(windows, default=None),
            "num_hidden_layers": config.shape.num_layers,
            "head_dim": config.shape.head_dim,
            "tie_word_embeddings": False,
        },
    }
    if isinstance(config, EagleConfig):
        length = config.draft_len
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        raw |= {"eagle_aux_hidden_state_layer_ids": ids, "mask_token_id": config.mask_token_id}
        raw |= {name: getattr(config, name) for name in flags}
    elif isinstance(config, BlockConfig):
        length = config.draft_len
        raw |= {"aux_hidden_state_layer_ids": ids, "sample_from_anchor": config.anchor_predicts}
        raw |= {name: getattr(config, name) for name in ("block_size", "mask_token_id", "markov_rank")}
        raw |= {"enable_confidence_head": config.has_confidence, "markov_head_type": config.markov_kind}
        raw |= {"confidence_head_with_markov": config.confidence_with_markov}
        raw["sliding_window_non_causal"] = causal != {True}  # vLLM takes False for all layers
    return raw | {
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": length}],
            "verifier": {"name_or_path": verifier, "architectures": shape.get("architectures") or []},
        }
    }


def stored_name(name: str, tensors: Tensors) -> str:
    """How the files name a parameter."""
    old = name.replace("layers.0.", "midlayer.", 1)
    return old if name not in tensors and old in tensors else name


def _speculators_block(raw: Mapping[str, Any], num_target_layers: int | None, d2t: Tensor | None) -> BlockConfig:
    shape, inner = _layer_shape(raw)
    kind = cast(HiddenStateKind, raw["speculators_model_type"])
    is_dspark = kind == "dspark"
    windows = _windows(inner)
    is_causal = not raw.get("sliding_window_non_causal", True)
    rank = raw.get("markov_rank", 256) if is_dspark else 0
    has_confidence = is_dspark and bool(raw.get("enable_confidence_head", True))
    return _checked(
        BlockConfig(
            kind=kind,
            **_shared(raw, shape, d2t),
            target_layer_ids=_inputs_of(
                raw["aux_hidden_state_layer_ids"], raw.get("num_target_layers") or num_target_layers
            ),
            windows=windows,
            causal=tuple(is_causal and window is not None for window in windows),
            block_size=whole_number(raw, "block_size", low=1, high=_MAX_BLOCK_SIZE),
            mask_token_id=whole_number(raw, "mask_token_id", low=0, high=shape.vocab_size - 1),
            anchor_predicts=bool(raw.get("sample_from_anchor", is_dspark)),
            markov_rank=rank,
            markov_kind=markov_kind(raw.get("markov_head_type", "vanilla")) if rank else "vanilla",
            reads_whole_vocabulary=True,
            has_confidence=has_confidence,
            confidence_with_markov=has_confidence and bool(raw.get("confidence_head_with_markov", True)),
        )
    )


def _speculators_eagle(raw: Mapping[str, Any], num_target_layers: int | None, d2t: Tensor | None) -> EagleConfig:
    shape, inner = _layer_shape(raw)
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return _eagle(
        cast(HiddenStateKind, raw["speculators_model_type"]),
        raw,
        _shared(raw, shape, d2t),
        raw.get("num_target_layers") or num_target_layers,
        windows=_windows(inner),
        draft_len=methods[0].get("speculative_tokens") or _DEFAULT_DRAFT_LEN,
    )


def _safeai_eagle(raw: Mapping[str, Any], num_target_layers: int | None, d2t: Tensor | None) -> EagleConfig:
    nested = raw.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        raise ModelUnavailable("a head over the last hidden state alone is not supported")
    raw = {**raw, **nested}
    shared = _shared(raw, parse_config(raw), d2t)
    return _eagle("eagle3", raw, shared, num_target_layers, windows=(), draft_len=_DEFAULT_DRAFT_LEN)


def _eagle(
    kind: HiddenStateKind,
    raw: Mapping[str, Any],
    shared: Mapping[str, Any],
    num_target_layers: int | None,
    *,
    windows: tuple[int | None, ...],
    draft_len: int,
) -> EagleConfig:
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        if num_target_layers is None:
            raise ModelUnavailable("it names no layers of its target: load it beside the target")
        ids = (2, num_target_layers // 2, num_target_layers - 3)
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        raise ModelUnavailable("norm_before_fc and fc_norm exclude each other")
    return EagleConfig(
        kind=kind,
        **shared,
        target_layer_ids=_inputs_of(ids, num_target_layers),
        windows=windows,
        draft_len=draft_len,
        mask_token_id=whole_number(raw, "mask_token_id", low=0) if kind == "peagle" else None,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


def _zlab_dflash(raw: Mapping[str, Any], _: int | None, d2t: Tensor | None) -> BlockConfig:
    nested = raw.get("dflash_config") or {}
    unsupported = [name for name in _UNSUPPORTED if nested.get(name)]
    if unsupported:
        raise ModelUnavailable(f"dflash_config.{unsupported[0]} is not supported")
    inner = {**raw}
    if nested.get("use_swa") and _SLIDING not in (raw.get("layer_types") or ()):
        inner["layer_types"] = [_SLIDING] * raw["num_hidden_layers"]
        inner["sliding_window"] = nested.get("swa_window_size", raw.get("sliding_window"))
    shape, windows = parse_config(_full(inner)), _windows(inner)
    causal = raw.get("is_causal", nested.get("causal"))
    fields = {"block_size": raw.get("block_size") or nested["block_size"], "mask_token_id": nested["mask_token_id"]}
    return _checked(
        BlockConfig(
            kind="dflash",
            **_shared(raw, shape, d2t),
            target_layer_ids=tuple(nested["target_layer_ids"]),
            windows=windows,
            causal=tuple(window is not None for window in windows) if causal is None else (bool(causal),) * shape.num_layers,
            block_size=whole_number(fields, "block_size", low=2, high=_MAX_BLOCK_SIZE),
            mask_token_id=whole_number(fields, "mask_token_id", low=0, high=shape.vocab_size - 1),
            anchor_predicts=bool(nested.get("sample_from_anchor", False)),
        )
    )


_SPECULATORS: Mapping[str, Reader] = {
    "dspark": _speculators_block,
    "dflash": _speculators_block,
    "eagle3": _speculators_eagle,
    "peagle": _speculators_eagle,
}
_ORIGINAL: Mapping[str, Reader] = {"dspark": parse_deepspec, "dflash": _zlab_dflash, "eagle3": _safeai_eagle}


def _layer_shape(raw: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
    """The shape of the layers, and what it was read from."""
    inner = dict(raw["transformer_layer_config"])
    inner = {**_LEFT_OUT.get(inner.get("model_type", ""), {}), **inner}
    return parse_config(_full(inner)), inner


def _full(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Without sliding windows, which would bound the length: they are applied by layer."""
    return {**inner, "layer_types": None, "sliding_window": None}


def _windows(inner: Mapping[str, Any]) -> tuple[int | None, ...]:
    types, window = inner.get("layer_types") or (), inner.get("sliding_window")
    if _SLIDING not in types:
        return ()
    if not window:
        raise ModelUnavailable("layers with sliding attention need sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in types[: inner["num_hidden_layers"]])


def _shared(raw: Mapping[str, Any], shape: DecoderConfig, d2t: Tensor | None) -> dict[str, Any]:
    """Fields that all kinds have."""
    token_ids = None
    if (raw.get("draft_vocab_size") or shape.vocab_size) != shape.vocab_size:
        if d2t is None or len(d2t) != raw["draft_vocab_size"]:
            raise ModelUnavailable(f"d2t must map {raw['draft_vocab_size']} draft tokens to the target's")
        token_ids = tuple(sorted((d2t + torch.arange(len(d2t))).tolist()))
        if token_ids[0] < 0 or token_ids[-1] >= shape.vocab_size or any(a == b for a, b in pairwise(token_ids)):
            raise ModelUnavailable(f"d2t must map to distinct tokens between 0 and {shape.vocab_size - 1}")
    return {
        "shape": shape,
        "target_hidden_size": raw.get("target_hidden_size") or shape.hidden_size,
        "draft_token_ids": token_ids,
        "tokenizer_fingerprint": raw.get("tokenizer_fingerprint"),
        "num_target_layers": raw.get("num_target_layers"),
    }


def _inputs_of(ids: Sequence[int], num_target_layers: int | None) -> tuple[int, ...]:
    """Layers whose outputs are the inputs of layers ``ids``."""
    if min(ids) < 0 or len(set(ids)) < len(ids):
        raise ModelUnavailable(f"auxiliary layer ids {list(ids)} must be different and at least 0")
    if num_target_layers is not None and max(ids) >= num_target_layers:
        raise ModelUnavailable(
            f"auxiliary layer id {max(ids)} is the target's last state before its final norm, which is not kept"
        )
    return tuple(layer_id - 1 for layer_id in ids)


def _offsets(folder: Path, raw: Mapping[str, Any]) -> Tensor | None:
    if raw.get("draft_vocab_size") is None:
        return None
    with open_tensors(folder) as tensors:
        offsets = tensors.integers("d2t") if "d2t" in tensors else None
    if offsets is not None and (offsets.dim() != 1 or offsets.is_floating_point() or offsets.dtype == torch.bool):
        raise ModelUnavailable(f"d2t must be a list of integers, got {offsets.dtype} {tuple(offsets.shape)}")
    return offsets


def _checked(config: BlockConfig) -> BlockConfig:
    if config.confidence_with_markov and not config.markov_rank:
        raise ModelUnavailable("confidence_head_with_markov needs a Markov head, but markov_rank is 0")
    return config
