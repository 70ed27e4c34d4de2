"""Variables that vLLM and OpenMP read when they are imported."""

import os
import sys
import warnings

from engine.vllm.version import require_vllm

RUNNER_V2 = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's: 1 and 0 choose the model runner, without it vLLM does
_REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine core runs in this process
_DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",  # idle threads that spin take the processor from those of other operators
    # Threads that share the context of a decoding request wait for each other in a loop: where other processes keep one
    # thread from running, a pass of one row takes twice as long as without sharing.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def prepare_environment() -> None:
    """Before vLLM is imported. What the user has set is kept, except where this engine depends on it. A second call does
    nothing.

    Raises:
        InvalidField: vLLM is missing or of another version.
        RuntimeError: it was imported before the first call.
    """
    require_vllm()
    if "vllm" in sys.modules and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError("vLLM was imported before its environment was set")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # vLLM's own, at its import
    os.environ.update(_REQUIRED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
