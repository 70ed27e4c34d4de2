"""Converts a GGUF file to a Hugging Face folder: ``python -m engine.models.gguf SOURCE FOLDER``. A process of its own, as it
takes three times the memory of the result. Writes progress to standard output, as lines ``FRACTION WHAT``.

Configuration, tokenizer and chat template come from the file's metadata, whose keys are llama.cpp's."""

import json
import struct
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import ModelUnavailable
from engine.models.config import Llama3Scaling, RopeConfig, frequencies_of, parse_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# As llama.cpp names them; Mistral and SmolLM are llama, too.
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_AGAIN = "download or copy it again"
_ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1 and later, by which rotary frequencies are divided
_ENDS = ("eos", "eot", "eom")
_LLAMA3_SPLITS = ("llama3", "llama-v3", "llama-bpe")  # begin with BOS unless the file says otherwise, as in llama.cpp
_GPT2_SPLITS = ("default", "gpt-2", "gpt2", "smollm")  # beside those that transformers knows by name


def convert(source: Path, folder: Path) -> None:
    """Writes bf16 safetensors, configuration, tokenizer and chat template. transformers undoes the quantization and
    llama.cpp's order of the rotary dimensions. Raises ModelUnavailable: which value of the file cannot be served."""
    metadata, shapes = read_header(source)
    config = config_of(metadata, shapes, rope_factors(source, shapes))
    parse_config(config)
    _say(0.0, "importing transformers")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    _say(0.1, "reading the tokenizer")
    tokenizer_of(source, config["max_position_embeddings"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _say(0.35, "restoring the weights")
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        config=AutoConfig.from_pretrained(folder),
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    _say(0.95, "writing the weights")
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))


def read_header(source: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata, of whose texts in lists only the number is read, and shapes of tensors, as torch has them. Raises
    ModelUnavailable: the file is none, of another kind, or not whole."""
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    try:
        with source.open("rb") as file:
            magic, version = file.read(4), file.read(4)
        if magic != b"GGUF":
            raise ModelUnavailable(f"{source} is no GGUF file: it begins with {magic!r}")
        if version[:2] == b"\0\0":
            raise ModelUnavailable(f"{source} is big-endian; convert it with `gguf-convert-endian {source} little`")
        metadata, _ = read_gguf_metadata(str(source))
        header = GgufHeader.from_file(str(source))
        end = max((header.data_start + tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelUnavailable(f"{source} is cut off or damaged in its header; {_AGAIN}") from error
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{source} cannot be read: {error}") from error
    if (num_parts := metadata.get("split.count", 1)) > 1:
        raise ModelUnavailable(f"{source} is one of {num_parts} parts; join them with `llama-gguf-split --merge`")
    if end > (size := source.stat().st_size):
        raise ModelUnavailable(f"{source} is cut off: it has {size:,} bytes of {end:,}; {_AGAIN}")
    return metadata, {tensor.name: tensor.shape for tensor in header.tensors}


def config_of(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: tuple[float, ...] = ()
) -> dict[str, Any]:
    """The ``config.json`` of a file. ``factors``: its tensor of frequencies. Raises ModelUnavailable: an architecture or
    scaling that the native engine does not compute, or a missing value."""
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelUnavailable(f"general.architecture {family!r} is not supported; supported are {known}")
    if metadata.get(f"{family}.expert_count", 0):
        raise ModelUnavailable(
            f"{family}.expert_count {metadata[f'{family}.expert_count']} is not supported: only dense models"
        )
    try:
        key = {name: metadata[f"{family}.{name}"] for name in ("block_count", "context_length", "embedding_length")}
        num_heads = metadata[f"{family}.attention.head_count"]
        head_dim = metadata.get(f"{family}.attention.key_length", key["embedding_length"] // num_heads)
        ends = [metadata[name] for end in _ENDS if (name := f"tokenizer.ggml.{end}_token_id") in metadata]
        return {
            "architectures": [FAMILIES[family]],
            "model_type": family,
            "vocab_size": shapes["token_embd.weight"][0],
            "hidden_size": key["embedding_length"],
            "intermediate_size": metadata[f"{family}.feed_forward_length"],
            "num_hidden_layers": key["block_count"],
            "num_attention_heads": num_heads,
            "num_key_value_heads": metadata.get(f"{family}.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": round(metadata[f"{family}.attention.layer_norm_rms_epsilon"], 12),  # was fp32
            "max_position_embeddings": key["context_length"],
            "rope_parameters": _rope(metadata, family, head_dim, factors),
            "attention_bias": family == "qwen2" or "blk.0.attn_q.bias" in shapes,
            "tie_word_embeddings": "output.weight" not in shapes,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(ends)) if len(set(ends)) > 1 else next(iter(ends), None),
            "dtype": "bfloat16",
        }
    except KeyError as missing:
        raise ModelUnavailable(f"the file has no value {missing}; convert the model again with llama.cpp") from missing
    except TypeError as error:
        raise ModelUnavailable(f"the file's layers differ from each other, which is not supported: {error}") from error


def _rope(metadata: Mapping[str, Any], family: str, head_dim: int, factors: tuple[float, ...]) -> dict[str, Any]:
    theta = float(metadata.get(f"{family}.rope.freq_base", 10000.0))
    if (rotated := metadata.get(f"{family}.rope.dimension_count", head_dim)) != head_dim:
        raise ModelUnavailable(f"{family}.rope.dimension_count {rotated} is not supported: heads have {head_dim}")
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": kind, "rope_theta": theta, "factor": float(metadata[f"{family}.rope.scaling.factor"])}
    if kind != "none":
        raise ModelUnavailable(f"{family}.rope.scaling.type {kind!r} is not supported; supported are none and linear")
    if not factors or max(factors) == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    scaling = Llama3Scaling(max(factors), 1.0, 4.0, 8192)  # as all of Llama 3.1 to 3.3; the file has only its result
    plain, stretched = (frequencies_of(head_dim, RopeConfig(theta, llama3=one)) for one in (None, scaling))
    if any(abs(a / b / factor - 1) > 1e-3 for a, b, factor in zip(plain, stretched, factors, strict=True)):
        raise ModelUnavailable(f"{_ROPE_FACTORS} scales the frequencies otherwise than Llama 3, which is not supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_len,
    }


def rope_factors(source: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[float, ...]:
    """Of each rotated pair; (): the file has none."""
    from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict

    if _ROPE_FACTORS not in shapes:
        return ()
    return tuple(load_gguf_state_dict(GgufHeader.from_file(str(source)))[_ROPE_FACTORS][...].float().tolist())


def tokenizer_of(source: Path, max_len: int) -> "PreTrainedTokenizerFast":
    """With its chat template. Raises ModelUnavailable: a tokenizer whose tokens would differ from the model's."""
    from tokenizers import normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as gguf

    try:
        family, content, settings = gguf.get_gguf_tokenizer(str(source))
    except (KeyError, IndexError) as error:
        raise ModelUnavailable(f"{source} has no whole tokenizer: {error!r}") from error
    kind, split = content.get("tokenizer_type"), content.get("pre_tokenizer_type", "default")
    if kind not in ("gpt2", "llama"):
        raise ModelUnavailable(f"tokenizer.ggml.model {kind!r} is not supported; supported are 'gpt2' and 'llama'")
    if kind == "gpt2" and split not in (*gguf.GGUF_PRE_TOKENIZER_SPLITS, *_GPT2_SPLITS):
        raise ModelUnavailable(f"tokenizer.ggml.pre {split!r} is not supported; use the model's folder of the hub instead")
    if missing := [name for name in ("tokens", "merges" if kind == "gpt2" else "scores") if name not in content]:
        raise ModelUnavailable(f"{source} has no tokenizer.ggml.{missing[0]}; convert the model again with llama.cpp")
    tokenizer, _ = gguf.convert_gguf_tokenizer(family, content)
    if split == "smollm":
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    if family.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    begins = kind == "gpt2" and split in _LLAMA3_SPLITS and "bos_token" in settings
    first = [settings["bos_token"]] if settings.pop("add_bos_token", begins) else []
    last = [settings["eos_token"]] if settings.pop("add_eos_token", False) else []
    if first or last:
        single = f"{' '.join([*first, '$A', *last])}"
        ids = [(token, tokenizer.token_to_id(token)) for token in (*first, *last)]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_len, **settings)


def _say(fraction: float, what: str) -> None:
    print(fraction, what, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    try:
        with redirect_stdout(sys.stderr):  # standard output is for progress only
            convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelUnavailable as refused:
        sys.exit(str(refused))
