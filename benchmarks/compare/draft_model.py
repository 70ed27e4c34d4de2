"""A draft model for the peers that take one: the target's own first layers under its own head, since no smaller model with
its vocabulary exists."""

from pathlib import Path
from typing import Any

NUM_LAYERS = 6  # of 30


def write_draft_model(folder: Path, destination: Path) -> None:
    """As a Hugging Face folder with the tokenizer of ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:NUM_LAYERS]
    model.save_pretrained(destination)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(destination)
