"""Times of a target's steps on vLLM, over the shape of ``MODEL`` with random weights."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tests.gpu.floors import MODEL, TINY, Timings, steps, weight_bytes
from tests.support.vllm_engine import make_vllm


def vllm_timings(device: str, found: list[dict[str, Any]], folder: Path) -> None:
    c = MODEL if device == "cuda" else TINY
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    timings = Timings(torch.device(device), found)
    dtype = "bfloat16" if device == "cuda" else "float32"
    with closing(make_vllm(folder, kv_cache_bytes=2**27, dtype=dtype, load_format="dummy")) as target:
        steps(timings, target, (1, 8, 32, 64) if device == "cuda" else (1, 8), weight_bytes(c, 2 if device == "cuda" else 4))
