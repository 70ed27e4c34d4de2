"""Number of OpenMP threads for a model, and computing on a temporary thread before serving."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.models.config import DecoderConfig

Result = TypeVar("Result")

# Weights per thread of a product. Kernels use two threads from twice as many weights on (threads_for in cpu/vectors.h);
# below that, synchronisation costs what the second thread saves.
WEIGHTS_PER_THREAD = 2**16


def useful_threads(config: DecoderConfig) -> int:
    """Threads that shorten a decode pass of one row, by the mean size of its products."""
    c = config
    sizes = [
        (c.q_size + 2 * c.kv_size) * c.hidden_size,
        c.hidden_size * c.q_size,
        2 * c.intermediate_size * c.hidden_size,
        c.hidden_size * c.intermediate_size,
    ]
    return max(1, sum(sizes) // len(sizes) // WEIGHTS_PER_THREAD)


def in_own_thread(call: Callable[[], Result]) -> Result:
    """Runs ``call`` on a thread that ends with it; returns or raises what it does.

    OpenMP gives every computing thread a team that lives as long. With more members than processors, each product must wake
    idle ones: a pass of SmolLM2-135M with four rows on two cores takes 16 ms instead of 9.4. So loading and measuring on a
    CPU are done here.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="own") as executor:
        return executor.submit(call).result()
