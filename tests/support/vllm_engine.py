"""vLLM's engine over tiny models, in its own environment."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.interpreted_triton import interpret_triton
from cluster.config import TargetConfig
from engine.target import LoadedTarget
from engine.vllm.arguments import engine_arguments
from engine.vllm.environment import RUNNER_V2, prepare_environment

if os.environ.get(RUNNER_V2) == "1" and not torch.cuda.is_available():
    interpret_triton()  # before anything imports vLLM

BLOCK_LEN, NUM_BLOCKS, MAX_MODEL_LEN = 32, 24, 512  # vLLM takes blocks of multiples of 32 on a CPU
EOS = 256


def vllm_arguments(device: str, sizes: Mapping[str, object] = {}, **more: object) -> dict[str, Any]:
    """What vLLM's engine is told of a target on ``device``."""
    usual = {"engine": "vllm", "dtype": "bfloat16", "max_pass_tokens": 512, "kv_cache_gb": 1.0}
    target = TargetConfig.model_validate({**usual, "device": device, **sizes, "vllm": more})
    return engine_arguments(Path("model"), target, 2048)


def make_vllm(
    folder: Path,
    num_blocks: int = NUM_BLOCKS,
    feature_layers: Sequence[int] = (),
    num_ranks: int = 1,
    kv_cache_bytes: int | None = None,
    dtype: str = "float32",
    num_adapters: int = 0,
    proposer: Mapping[str, Any] | None = None,
    **more: Any,
) -> LoadedTarget:
    """A `VllmTarget` on a GPU where there is one, of at most 8 sequences and 256 tokens in a pass, on the model runner that
    ``VLLM_USE_V2_MODEL_RUNNER`` names. Skips without vLLM.

    Args:
        num_blocks: of the KV cache, where the model is one that the native engine reads, too; else ``kv_cache_bytes``.
        proposer: vLLM's speculative configuration of its own drafter.
        more: arguments of vLLM's engine.
    """
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not in this environment: make test-vllm")
    from engine.models.config import load_config

    prepare_environment()
    from engine.vllm.target import VllmTarget

    if kv_cache_bytes is None:
        kv_cache_bytes = (num_blocks + 1) * BLOCK_LEN * load_config(folder).kv_bytes_per_token(4) // num_ranks
    device = "cuda" if torch.cuda.is_available() else "cpu"
    adapters = {"enable_lora": True, "max_loras": num_adapters} if num_adapters else {}
    target = TargetConfig.model_construct(  # unchecked: ``more`` may be what a file may not set
        engine="vllm",
        dtype=dtype,
        device=device,
        max_num_sequences=8,
        max_pass_tokens=256,
        block_len=BLOCK_LEN,
        kv_cache_gb=kv_cache_bytes / 2**30,
        tensor_parallel=num_ranks,
        vllm={**more, **adapters},
    )
    return VllmTarget(folder, target, MAX_MODEL_LEN, (EOS,), feature_layers, proposer or {})


def rank_processes(of: int | None = None, before: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """The processes of vLLM's ranks below this process, or another, by rank; without those of ``before``."""
    found = {}
    for process in psutil.Process(of).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # or a zombie
            title = " ".join(process.cmdline())
            if title.startswith("VLLM::Worker") and process not in before:
                found[title] = process
    return [found[title] for title in sorted(found)]


def has_ended(process: psutil.Process) -> bool:
    """Without waiting for it, which is its parent's affair."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class ConstantProposer:
    """Of vLLM's ``custom_class``: proposes the same token after every other."""

    TOKEN = 77

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[self.TOKEN] for _ in sampled_token_ids]
