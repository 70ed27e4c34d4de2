"""Import this before anything that imports Triton, to have its kernels interpreted on the CPU. Skips the importing test
module where that cannot be."""

import os
import sys

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on the device itself", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        pytest.skip("Triton was imported before it was told to interpret: set TRITON_INTERPRET=1", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which without a GPU nothing else needs
pytest.importorskip("triton")
