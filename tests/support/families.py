"""Small random models of every supported family, written by transformers, the reference."""

from pathlib import Path
from typing import Any

import torch

_SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-linear-rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-odd-sizes": ("LlamaConfig", {"hidden_size": 102, "intermediate_size": 150, "head_dim": 16}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 112, "num_key_value_heads": 6}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
}


def write_family(name: str, folder: Path, max_shard_size: str = "5GB") -> torch.nn.Module:
    """Writes the model as fp32 safetensors and returns it, in evaluation mode."""
    import transformers

    kind, fields = FAMILIES[name]
    config = getattr(transformers, kind)(**(_SHAPE | fields))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):  # else ones and zeros, which hide mistakes
                torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.2)
            else:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
