"""Hugging Face folders of random models small enough to load in a test."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.models.int8 import WeightsKind

END = "<|end|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_tiny_model(folder: Path, *, seed: int = 0, num_layers: int = 2, **overrides: Any) -> Path:
    """A Llama with random weights and a byte-level tokenizer of 257 tokens, the last of which ends a sequence.

    Weights are drawn large enough that greedy answers differ between prompts. ``overrides`` go into ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 1,
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab_size - 1}))
    save_file(_random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tiny_layers(
    folder: Path, target_folder: Path, token_ids: Iterable[int], *, num_layers: int = 2, weights: WeightsKind = "fp32"
) -> Path:
    """A drafter of the first layers of a tiny model, with a head over ``token_ids``."""
    from drafters.layers import save_layers

    tensors = load_file(target_folder / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    save_layers(folder, target_folder, kept, torch.tensor(list(token_ids)), weights)
    return folder


def write_tokenizer(folder: Path) -> int:
    """Returns the number of tokens, the last of which ends a sequence."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer.get_vocab_size()


def write_renamed(folder: Path, model: Path, pieces: Mapping[str, str], ids: Sequence[int] | None = None) -> Path:
    """A copy of a tiny model whose tokenizer spells some tokens otherwise. ``ids``: the new id of each token, also in its
    weights: the copy computes the same of the same text."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    new = list(range(len(vocab) + len(added))) if ids is None else list(ids)
    tokenizer["model"]["vocab"] = {pieces.get(piece, piece): new[i] for piece, i in vocab.items()}
    for token in added:
        token |= {"id": new[token["id"]], "content": pieces.get(token["content"], token["content"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config |= {key: new[config[key]] for key in ("bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.empty_like(embedding).index_copy_(0, torch.tensor(new), embedding)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ship(monkeypatch: Any, folder: Path, target: Path | str) -> None:
    """The drafters below ``folder`` are those that are shipped, for ``target``."""
    monkeypatch.setattr("drafters.shipped.FOLDER", folder)
    monkeypatch.setattr("drafters.shipped.MODEL", str(target))


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv_size = config["num_key_value_heads"] * head_dim

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 2.0 / shape[-1] ** 0.5

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": draw(hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": draw(kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": draw(kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": draw(hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": draw(inner, hidden),
            f"{prefix}mlp.up_proj.weight": draw(inner, hidden),
            f"{prefix}mlp.down_proj.weight": draw(hidden, inner),
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
        }
    return weights
