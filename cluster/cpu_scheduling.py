"""Which processes of a machine interrupt others when they wake.

The threads of a matrix product wait for each other, so that each wake-up of another process on one of their cores delays the
whole pass. Ray's processes, the supervisor and the router wake some thousand times a second in all and can wait for a
millisecond: under SCHED_BATCH they get their share of the processor, but wait for the next tick or an idle core. The policy
is inherited, so that a local cluster is started in the background and what serves returns to the foreground. The same for
threads of one interpreter.
"""

import gc
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005  # Python's default is 5 ms
_TASKS = Path("/proc/self/task")


def run_in_background() -> None:
    """The calling thread, and what it starts from now on."""
    _set("SCHED_BATCH", [0])


def run_in_foreground() -> None:
    """All threads of this process, and what they start from now on."""
    _set("SCHED_OTHER", [int(task.name) for task in _TASKS.iterdir()] if _TASKS.exists() else [])


def _set(policy: str, threads: Iterable[int]) -> None:
    if sys.platform != "linux":
        return
    for thread in threads:
        try:
            os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))
        except ProcessLookupError:  # a thread that has ended meanwhile
            continue
        except OSError as error:  # some sandboxes do not allow it; only speed depends on it
            logger.info("this process keeps its scheduling policy: %s", error)
            return


def freeze_startup_objects() -> None:
    """Freezes the present objects, so that gc skips them. A process with torch has 200,000, and a full collection over them
    stops every loop for a tenth of a second. Called once, when everything is loaded."""
    gc.collect()
    gc.freeze()


class _Collection:
    """``num_without``: blocks under way that no collection may disturb."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_without = 0
        self.was_enabled = True


_collection = _Collection()  # gc's switch is the process's


@contextmanager
def without_collection() -> Iterator[None]:
    """While many objects that live on are made, of which collections would find none to free. Blocks of several threads may
    overlap: the last one to end restores what was before the first."""
    with _collection.lock:
        if not _collection.num_without:
            _collection.was_enabled = gc.isenabled()
            gc.disable()
        _collection.num_without += 1
    try:
        yield
    finally:
        with _collection.lock:
            _collection.num_without -= 1
            if not _collection.num_without and _collection.was_enabled:
                gc.enable()


def switch_threads_quickly() -> None:
    """A thread that computes in Python lets others run after SWITCH_S. The threads of gRPC that carry commits and proposals
    wait for it (docs/measurements/README.md)."""
    sys.setswitchinterval(SWITCH_S)
