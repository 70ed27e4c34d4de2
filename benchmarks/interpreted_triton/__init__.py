"""vLLM's model runner V2 without a GPU: Triton interprets its kernels.

vLLM takes Triton on a CPU only if Triton has a backend named ``cpu``. Triton looks for backends in the entry points of what
lies on the path, in the processes of ranks, too; this one names `compiler.py` and `driver.py`, of which nothing is called.
"""

import os
import sys
from pathlib import Path


def interpret_triton() -> None:
    """Before Triton and vLLM are imported. Raises RuntimeError: Triton was."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        if "triton" in sys.modules:
            raise RuntimeError("Triton was imported before it was told to interpret")
        os.environ["TRITON_INTERPRET"] = "1"
    folder = str(Path(__file__).with_name("entry_point"))
    if folder not in sys.path:
        sys.path.append(folder)
