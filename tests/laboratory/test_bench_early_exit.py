"""What the benchmark of early exits compares."""

from pathlib import Path

import pytest
import torch

from benchmarks.early_exit import untied
from engine.models.config import load_config
from engine.models.weights import open_weights


@pytest.mark.model
def test_the_untied_copy_has_its_own_head_whatever_the_model_was_shipped_as(model_folder: Path, tmp_path: Path) -> None:
    config = load_config(model_folder)
    assert config.tied_embeddings
    head = torch.randn(config.vocab_size, config.hidden_size).bfloat16()
    own = untied(head, model_folder, tmp_path / "copy")
    with (
        open_weights(own, load_config(own), torch.float32) as weights,
        open_weights(model_folder, config, torch.float32) as of,
    ):
        assert torch.equal(weights.head(), head.float())
        assert torch.allclose(weights.embedding(), of.embedding(), atol=0.01)
