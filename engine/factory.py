"""The one place that knows which operators run on which device. A vendor's package is imported here and nowhere else."""

from pathlib import Path

import torch

from engine.forward import CausalModel
from engine.models.config import ModelConfig, load_config
from engine.models.weights import open_weights
from engine.ops import Ops, TorchOps

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Ops:
    """The fastest operators that work here."""
    return TorchOps(config, dtype)


def load_model(folder: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> CausalModel:
    """The model of a Hugging Face folder, ready to run.

    Raises:
        ModelUnavailable: missing, half-written or unsupported; one line that says which.
    """
    config = load_config(folder)
    at = torch.device(device)
    with open_weights(folder, config, dtype) as weights:
        return CausalModel(config, weights, make_ops(config, dtype, at), dtype, at)
