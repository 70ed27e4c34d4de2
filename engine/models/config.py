"""The part of a Hugging Face ``config.json`` that determines the forward pass. Read as plain JSON, so that a drafter's
process need not import transformers. A setting that changes the computation in an unsupported way is refused."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.errors import ModelUnavailable

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency-dependent stretch of the rotary embedding, as Llama 3.1 does it (Hugging Face rope type ``llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864), rotating the two halves of a head against each other."""

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama family: pre-norm, grouped-query attention, rotary embedding, gated SiLU feed-forward."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_len: int  # positions with full attention, at most a sliding window
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def truncated(self, num_layers: int) -> "DecoderConfig":
        """The same model with only its first ``num_layers`` layers. Raises ModelUnavailable: it does not have so many."""
        if not 1 <= num_layers <= self.num_layers:
            raise ModelUnavailable(f"num_layers must lie between 1 and the model's {self.num_layers}, got {num_layers}")
        return replace(self, num_layers=num_layers)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of one token in the KV cache."""
        return 2 * self.num_layers * self.kv_size * element_bytes


def load_config(folder: Path) -> DecoderConfig:
    """The configuration of the model in ``folder``. Raises ModelUnavailable: no folder, no ``config.json``, or a model that
    is not supported; one line that says which."""
    if not folder.is_dir():
        known = "name the folder of a Hugging Face model, ORG/MODEL of the hub, or one of `outrider models`"
        raise ModelUnavailable(f"no model at {folder}: not a folder; {known}")
    raw = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    try:
        return parse_config(raw, eos=generation.get("eos_token_id"))
    except KeyError as missing:
        raise ModelUnavailable(f"{folder / 'config.json'} has no field {missing}") from missing
    except ModelUnavailable as refused:
        raise ModelUnavailable(f"{folder}: {refused}") from refused


def parse_config(raw: Mapping[str, Any], eos: int | list[int] | None = None) -> DecoderConfig:
    """``raw`` is a parsed ``config.json``; ``eos`` overrides its end-of-sequence tokens, as ``generation_config.json`` may.
    Raises ModelUnavailable: the computation it describes is not supported; KeyError: a necessary field is missing."""
    kind = raw["model_type"]
    if kind not in ARCHITECTURES:
        raise ModelUnavailable(f"model_type {kind!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelUnavailable(f"hidden_act {raw['hidden_act']!r} is not supported; supported is 'silu'")
    if raw.get("quantization_config") is not None:
        raise ModelUnavailable("quantization_config is not supported; use the unquantized model")
    num_heads = raw["num_attention_heads"]
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ModelUnavailable(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    attention_bias = bool(raw.get("attention_bias", False))
    eos = eos if eos is not None else raw.get("eos_token_id")
    return DecoderConfig(
        architecture=kind,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_rope(raw),
        max_len=_max_len(raw),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3") and attention_bias),
        out_bias=kind in ("llama", "qwen3") and attention_bias,
        mlp_bias=kind == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelUnavailable(f"{path} is missing: the folder holds no Hugging Face model, or half of one") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON ({error}); it may be half-written") from error
    if not isinstance(raw, dict):
        raise ModelUnavailable(f"{path} is not a JSON object")
    return raw


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """transformers 5 writes ``rope_parameters``, earlier versions ``rope_theta`` and ``rope_scaling``."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelUnavailable("partial_rotary_factor is not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=float(parameters["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta,
            llama3=Llama3Scaling(
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                int(parameters["original_max_position_embeddings"]),
            ),
        )
    raise ModelUnavailable(f"rope type {kind!r} is not supported; supported are default, linear and llama3")


def _max_len(raw: Mapping[str, Any]) -> int:
    """A model with a sliding window is served up to the window's length, where attention is full."""
    max_len = int(raw["max_position_embeddings"])
    window = raw.get("sliding_window")
    slides = window is not None and (
        raw["model_type"] == "mistral"
        or bool(raw.get("use_sliding_window", False))
        or "sliding_attention" in (raw.get("layer_types") or ())
    )
    return min(max_len, int(window)) if slides and window is not None else max_len


def inverse_frequencies(config: DecoderConfig) -> tuple[float, ...]:
    """Radians per position of each of the head_dim / 2 rotated pairs."""
    return frequencies_of(config.head_dim, config.rope)


def frequencies_of(head_dim: int, rope: RopeConfig) -> tuple[float, ...]:
    frequencies = [rope.theta ** (-2.0 * i / head_dim) / rope.linear_factor for i in range(head_dim // 2)]
    scaling = rope.llama3
    return tuple(frequencies if scaling is None else [_stretch(f, scaling) for f in frequencies])


def _stretch(frequency: float, scaling: Llama3Scaling) -> float:
    """Wavelengths beyond the trained context are stretched by ``factor``, short ones kept, those between blended."""
    turns = scaling.original_max_len * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency
