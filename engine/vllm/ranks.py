"""How a model is split over vLLM's ranks, and which cores compute each. No vLLM."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import environ

from cluster.errors import InvalidField
from engine.models.config import DecoderConfig

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
NOT_BOUND = "nobind"


def check_ranks(config: DecoderConfig, num_ranks: int) -> None:
    """Raises InvalidField: vLLM splits heads and columns evenly, and ``config`` does not divide."""
    parts = {
        "key-value heads": config.num_kv_heads,
        "query heads": config.num_heads,
        "columns of the feed-forward": config.intermediate_size,
    }
    for name, num in parts.items():
        if num % num_ranks:
            reason = f"must divide the {num} {name} of the model on the vllm engine; engine native splits unevenly"
            raise InvalidField("target.tensor_parallel", num_ranks, reason)


def shard_of(config: DecoderConfig, num_ranks: int) -> DecoderConfig:
    """The shape of one rank's layers. Raises InvalidField as ``check_ranks``."""
    check_ranks(config, num_ranks)
    return replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=config.num_kv_heads // num_ranks,
        intermediate_size=config.intermediate_size // num_ranks,
    )


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
    if environ.get(BINDING, "auto") == "auto":  # vLLM's own asks for a NUMA node for each rank
        wanted[BINDING] = binding
    before = {name: environ.get(name) for name in wanted}
    environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value
