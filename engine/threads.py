"""Where products of many threads may be made before a loop makes them on a thread of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_own_thread(call: Callable[[], Result]) -> Result:
    """What ``call`` returns or raises, called on a thread that ends with it.

    OpenMP gives every thread that computes a team of its own, which lasts as long as the thread. Once there are more members
    of teams than processors, all of them sleep where they would have waited, and every product has to wake them: a pass of
    SmolLM2-135M with four rows on two cores then takes 16 ms instead of 9.4. So what is loaded, measured or tried on a CPU
    before a loop runs there is done on a thread that takes its team with it.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="own") as executor:
        return executor.submit(call).result()
