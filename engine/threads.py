"""What is done before a loop begins, so that nothing else takes its time later: products of many threads, garbage."""

import gc
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


def spare_what_stays() -> None:
    """Garbage collections leave out what is there now. Of a process with torch these are 200,000 objects, all of which a
    collection would look at, a tenth of a second in which no loop runs. For processes that serve until they end."""
    gc.collect()
    gc.freeze()
