"""Tiny random models of families that only vLLM computes, written by transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_model import write_tokenizer

WINDOW = 64
_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,  # so large that answers differ between prompts
}
_SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# name: prefix of transformers' classes, and what differs from _SHAPE; None: a field that the family does not have
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-2": ("Gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 32}),
    "gemma-3": ("Gemma3Text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, "layer_types": _SLIDING}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    "phi-3": ("Phi3", {"head_dim": None}),
    "gpt-oss": ("GptOss", {**_EXPERTS, "sliding_window": WINDOW, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", _EXPERTS),
    "glm-4": ("Glm4", {}),
    "olmo-2": ("Olmo2", {"head_dim": None}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": _YARN}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
}


_EYES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
# As MODELS, of models that also see: the encoder's fields beside those of the text model.
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma-3-vision": ("Gemma3", {**MODELS["gemma-3"][1]}, {**_EYES, "num_hidden_layers": 2}),
    "qwen-2.5-vl": (
        "Qwen2_5_VL",
        {"head_dim": None, "rope_parameters": _MROPE},
        {"hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "depth": 2, "out_hidden_size": 128},
    ),
    "mistral-3": ("Mistral3", {"head_dim": 32}, {**_EYES, "num_hidden_layers": 2}),
    "llama-4": (
        "Llama4",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
        },
        {**_EYES, "num_hidden_layers": 2, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    ),
}


def write_model(folder: Path, name: str, seed: int = 0) -> Path:
    """One of MODELS or MULTIMODAL in fp32, with the tokenizer of `tests.support.tiny_model`, whose last token ends a
    sequence."""
    import transformers

    prefix, changes, *vision = MODELS[name] if name in MODELS else MULTIMODAL[name]
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    end = {"bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1, "pad_token_id": vocab_size - 1}
    fields = {**_SHAPE, "vocab_size": vocab_size, **end, **changes}
    text = {k: v for k, v in fields.items() if v is not None}
    given = {"text_config": text, "vision_config": vision[0], "tie_word_embeddings": True} if vision else text
    config = getattr(transformers, f"{prefix}Config")(**given)
    kind = "ConditionalGeneration" if vision else "CausalLM"
    model_class = getattr(transformers, f"{prefix.removesuffix('Text')}For{kind}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.25)  # else a tied head repeats the last token for ever
        model.save_pretrained(folder)
    return folder


def quantise(folder: Path) -> Path:
    """Rewrites a model in fp32 as compressed-tensors: int8 weights with a scale per row, activations with one per token."""
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim != 2 or "embed" in name or "lm_head" in name:
            tensors[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4, inputs: int | None = None) -> Path:
    """A LoRA adapter in PEFT's format of the attention of one of MODELS, so strong that it changes answers.

    Args:
        inputs: of its layers, where they shall not fit.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds, tensors = ("q_proj", "k_proj", "v_proj", "o_proj"), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(tuple(f"{kind}.weight" for kind in kinds)):
            part = f"base_model.model.{name.removesuffix('.weight')}"
            num_outputs, num_inputs = weight.shape
            tensors[f"{part}.lora_A.weight"] = torch.randn(rank, inputs or num_inputs, generator=generator) * 0.1
            tensors[f"{part}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(kinds)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_eagle3(folder: Path, target: Path, seed: int = 0) -> Path:
    """A random EAGLE-3 head, in the layout that vLLM loads, for a Llama of `write_model`."""
    config = json.loads((target / "config.json").read_text())
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    wide, narrow = heads * head_dim, config["num_key_value_heads"] * head_dim
    inner = config["intermediate_size"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (wide, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (narrow, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (narrow, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, wide),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (vocab_size, hidden),
    }
    draws = torch.Generator().manual_seed(seed)
    tensors = {name: 0.1 * torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    kept = {key: value for key, value in config.items() if key != "layer_types"}
    (folder / "config.json").write_text(json.dumps({**kept, **own, "model_type": "llama"}))
    return folder
