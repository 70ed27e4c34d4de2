"""Writes models to GGUF files as llama.cpp's converter does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.support.tiny_model import CHAT_TEMPLATE, END, write_tiny_model

Quantised = tuple[GGMLQuantizationType, NDArray[np.uint8]]  # the bytes of each row

_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
KINDS = {"model.embed_tokens": GGMLQuantizationType.Q8_0, "self_attn.o_proj": GGMLQuantizationType.Q5_0}  # others: Q4_1
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Of the types that the ``gguf`` package does not quantise to: where a block has its factors, and how large they are.
K_FACTORS = {
    GGMLQuantizationType.Q4_K: ((0, 1.0), (2, 7.5)),
    GGMLQuantizationType.Q5_K: ((0, 0.5), (2, 7.75)),
    GGMLQuantizationType.Q6_K: ((208, 0.2),),
}


def k_matrix(kind: GGMLQuantizationType, num_out: int, num_in: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random blocks, [outputs, bytes of a row], whose weights have a mean of about 0 and a deviation of about 0.08."""
    rng = np.random.default_rng([int(kind), seed])
    block_len, num_bytes = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (num_out, num_in // block_len, num_bytes), dtype=np.uint8)
    for at, size in K_FACTORS[kind]:
        factors = size * rng.uniform(2e-4, 4e-4, (*raw.shape[:2], 1))
        raw[..., at : at + 2] = factors.astype(np.float16).view(np.uint8)
    return raw.reshape(num_out, -1)


def write_merging_model(folder: Path, **sizes: int) -> Path:
    """A tiny model with a merge in its tokenizer, as every file has."""
    write_tiny_model(folder, vocab_size=258, eos_token_id=257, **sizes)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["Ġt"], content["added_tokens"][0]["id"] = 256, 257
    content["model"]["merges"] = [["Ġ", "t"]]
    path.write_text(json.dumps(content))
    return folder


def write_gguf(
    path: Path,
    folder: Path,
    family: str = "llama",
    split: str = "gpt-2",
    blocks: Mapping[str, Quantised] = {},
    **values: Any,
) -> Path:
    """The model of a tiny folder, in fp32 but for ``blocks``. ``values``: of its metadata, beside usual ones or instead."""
    config = json.loads((folder / "config.json").read_text())
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    writer = GGUFWriter(path, family)
    plain = {
        "block_count": config["num_hidden_layers"],
        "context_length": 512,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    } | {name.replace("__", "."): value for name, value in values.items() if isinstance(value, int)}
    for name, number in plain.items():
        writer.add_uint32(f"{family}.{name}", number)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-5)
    for name, value in values.items():
        if isinstance(value, float):
            writer.add_float32(f"{family}.{name.replace('__', '.')}", value)
        if isinstance(value, str):
            writer.add_string(name.replace("__", "."), value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token == END else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(vocab[END])
    writer.add_bos_token_id(vocab[END])
    writer.add_chat_template(CHAT_TEMPLATE)
    tensors = load_file(folder / "model.safetensors") | {name: values[name] for name in ("rope_freqs",) if name in values}
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2} if family == "llama" else {}
    add_tensors(writer, tensors, heads, quantised=False, blocks=blocks)
    return path


def add_tensors(
    writer: GGUFWriter,
    tensors: Mapping[str, NDArray[np.float32]],
    heads: Mapping[str, int],
    *,
    quantised: bool,
    blocks: Mapping[str, Quantised] = {},
) -> None:
    """Tensors by Hugging Face's names, and the end of the file. ``heads``: of projections whose rotary pairs lie side by
    side, as in files of the architecture llama. ``quantised``: matrices, to KINDS. ``blocks``: instead of tensors."""
    for name, values in tensors.items():
        module, part = name.removesuffix(".weight"), ""
        if name.startswith("model.layers."):
            _, _, index, part = module.split(".", 3)
        own = f"blk.{index}.{_PARTS[part]}.weight" if part else f"{_NAMES.get(module, module)}.weight"
        kind, rows = blocks.get(name, (None, values))
        if quantised and values.ndim == 2:
            kind = KINDS.get(part or module, GGMLQuantizationType.Q4_1)
            rows = quantize(values, kind)
        if num := heads.get(part):
            rows = rows.reshape(num, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        writer.add_tensor(own, np.ascontiguousarray(rows), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
