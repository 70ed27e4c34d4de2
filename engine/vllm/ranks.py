"""Which cores compute each of vLLM's ranks. No vLLM."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import environ

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
NOT_BOUND = "nobind"


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
