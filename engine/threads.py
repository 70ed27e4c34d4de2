"""How many threads a model can use, and on which thread it may compute before a loop runs it on its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.models.config import ModelConfig

Result = TypeVar("Result")

# Weights of a product for each thread. Kernels share a product among two threads from twice as many on (threads_for in
# cpu/vectors.h): with fewer, waiting for each other takes what the further thread saves.
WEIGHTS_PER_THREAD = 2**16


def useful_threads(config: ModelConfig) -> int:
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
    """What ``call`` returns or raises, called on a thread that ends with it.

    OpenMP gives every thread that computes a team of its own, which lasts as long as the thread. Once there are more members
    of teams than processors, all of them sleep where they would have waited, and every product has to wake them: a pass of
    SmolLM2-135M with four rows on two cores then takes 16 ms instead of 9.4. So what is loaded, measured or tried on a CPU
    before a loop runs there is done on a thread that takes its team with it.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="own") as executor:
        return executor.submit(call).result()
