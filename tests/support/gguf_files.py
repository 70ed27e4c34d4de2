"""Writes models to GGUF files as llama.cpp's converter does."""

from collections.abc import Mapping

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

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


def add_tensors(
    writer: GGUFWriter, tensors: Mapping[str, NDArray[np.float32]], heads: Mapping[str, int], *, quantised: bool
) -> None:
    """Tensors by Hugging Face's names, and the end of the file. ``heads``: of projections whose rotary pairs lie side by
    side, as in files of the architecture llama. ``quantised``: matrices, to KINDS."""
    for name, values in tensors.items():
        module, part = name.removesuffix(".weight"), ""
        if name.startswith("model.layers."):
            _, _, index, part = module.split(".", 3)
        own = f"blk.{index}.{_PARTS[part]}.weight" if part else f"{_NAMES.get(module, module)}.weight"
        if num := heads.get(part):
            values = values.reshape(num, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        values = np.ascontiguousarray(values)
        if quantised and values.ndim == 2:
            kind = KINDS.get(part or module, GGMLQuantizationType.Q4_1)
            writer.add_tensor(own, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
