"""Makes a Hugging Face folder of a GGUF file: ``python -m engine.models.gguf SOURCE FOLDER [weights]``. A process of its
own, for what it imports. Writes progress to standard output, as lines ``FRACTION WHAT``.

Configuration, tokenizer and chat template come from the file's metadata, whose keys are llama.cpp's."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from cluster.errors import ModelUnavailable
from engine.models.config import Llama3Scaling, RopeConfig, frequencies_of, parse_config
from engine.models.gguf_file import ROPE_FACTORS, GgufFile, GgufTensors
from engine.models.manifest import TENSORS
from engine.models.quantised import shipped_bytes
from engine.models.weights import INDEX, SINGLE

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# As llama.cpp names them; Mistral and SmolLM are llama, too.
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LARGEST_PART = 2**31  # bytes of a file of weights, which are held until it is written
_ENDS = ("eos", "eot", "eom")
# As in llama.cpp, begin with BOS unless the file says otherwise, and take a word that is a token whole.
_LLAMA3_SPLITS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
_GPT2_SPLITS = ("default", "gpt-2", "gpt2", "smollm")  # beside those that transformers knows by name
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as ``engine.models.weights`` joins them


def convert(source: Path, folder: Path, *, with_weights: bool) -> None:
    """Writes configuration, tokenizer, chat template and the list of tensors, and ``with_weights`` bf16 safetensors for
    vLLM. Raises ModelUnavailable: which value of the file cannot be served."""
    file = GgufFile(source)
    config = config_of(file)
    parse_config(config)
    _say(0.0, "reading the tokenizer")
    tokenizer_of(source, config["max_position_embeddings"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    (folder / TENSORS).write_text(json.dumps(dict(_tensors(file))))
    if with_weights:
        _write_weights(file, folder)


def _tensors(file: GgufFile) -> Iterator[tuple[str, tuple[tuple[int, ...], float]]]:
    """Shape of each tensor, and bytes of each of its weights in memory, as shipped."""
    for name, info in file.tensors.items():
        module, _, suffix = name.rpartition(".")
        parent, _, own = module.rpartition(".")
        group = next((group for group in _JOINED if own in group), (own,))
        found = [file.tensors.get(f"{parent}.{one}.{suffix}") for one in group]
        yield name, (info.shape, shipped_bytes({one.kind for one in found if one is not None}))


def _write_weights(file: GgufFile, folder: Path) -> None:
    source, num_bytes = GgufTensors(file, torch.bfloat16), 0
    parts: list[list[str]] = [[]]
    shapes = {name: info.shape for name, info in file.tensors.items() if name != ROPE_FACTORS}
    for name, shape in shapes.items():
        if num_bytes > LARGEST_PART:
            parts, num_bytes = [*parts, []], 0
        parts[-1].append(name)
        num_bytes += 2 * prod(shape)
    names = (
        [SINGLE] if len(parts) == 1 else [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    )
    for i, (path, part) in enumerate(zip(names, parts, strict=True)):
        _say(0.1 + 0.9 * i / len(parts), "writing the weights")
        tensors: dict[str, torch.Tensor] = {}
        for name in part:
            tensor = source.read(name, shapes[name])
            assert isinstance(tensor, torch.Tensor)
            tensors[name] = tensor.to(torch.bfloat16).contiguous()
        save_file(tensors, folder / path, metadata={"format": "pt"})
    if len(parts) > 1:
        of = {name: path for path, part in zip(names, parts, strict=True) for name in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": of}))


def config_of(file: GgufFile) -> dict[str, Any]:
    """The ``config.json`` of a file. Raises ModelUnavailable: an architecture or scaling that the native engine does not
    compute, or a missing value."""
    metadata, tensors = file.metadata, file.tensors
    factors = tuple(file.floats(ROPE_FACTORS).tolist()) if ROPE_FACTORS in tensors else ()
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
            "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
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
            "attention_bias": family == "qwen2" or "model.layers.0.self_attn.q_proj.bias" in tensors,
            "tie_word_embeddings": "lm_head.weight" not in tensors,
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
        raise ModelUnavailable(f"{ROPE_FACTORS} scales the frequencies otherwise than Llama 3, which is not supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_len,
    }


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
    begins = kind == "gpt2" and split in _LLAMA3_SPLITS
    if begins:
        tokenizer.model.ignore_merges = True
    if kind == "llama":
        _spell_spaces(tokenizer, prefix=content.get("add_prefix_space", True))
    begins = begins and "bos_token" in settings
    first = [settings["bos_token"]] if settings.pop("add_bos_token", begins) else []
    last = [settings["eos_token"]] if settings.pop("add_eos_token", False) else []
    if first or last:
        single = f"{' '.join([*first, '$A', *last])}"
        ids = [(token, tokenizer.token_to_id(token)) for token in (*first, *last)]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_len, **settings)


def _spell_spaces(tokenizer: "Tokenizer", *, prefix: bool) -> None:
    """As sentencepiece does, and llama.cpp: a text, also one behind a control token, begins with a space more."""
    from tokenizers import decoders, normalizers

    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    tokenizer.pre_tokenizer = None
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])


def _say(fraction: float, what: str) -> None:
    print(fraction, what, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    try:
        with redirect_stdout(sys.stderr):  # standard output is for progress only
            convert(Path(sys.argv[1]), Path(sys.argv[2]), with_weights="weights" in sys.argv[3:])
    except ModelUnavailable as refused:
        sys.exit(str(refused))
