"""Converts a GGUF file to a Hugging Face folder: ``python -m engine.models.gguf SOURCE FOLDER``. A process of its own, as it
takes three times the memory of the result. Writes progress to standard output, as lines ``FRACTION WHAT``."""

import sys
from contextlib import redirect_stdout
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    """Writes bf16 safetensors, configuration, tokenizer and chat template. transformers undoes the quantization and
    llama.cpp's order of the rotary dimensions."""
    _say(0.0, "importing transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    parent, file = str(source.parent), source.name
    _say(0.1, "reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(parent, gguf_file=file, local_files_only=True)
    _say(0.35, "restoring the weights")
    model = AutoModelForCausalLM.from_pretrained(
        parent, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16, local_files_only=True
    )
    _say(0.95, "writing the weights")
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _say(fraction: float, what: str) -> None:
    print(fraction, what, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # standard output is for progress only
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
