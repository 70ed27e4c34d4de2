import gc
import os
import subprocess
import sys
import threading

import pytest

from cluster.cpu_scheduling import run_in_background, without_collection

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has these scheduling policies")

FOREGROUND = """
import os, threading
from pathlib import Path
from cluster.cpu_scheduling import run_in_foreground

end = threading.Event()
other = threading.Thread(target=end.wait)
other.start()
before = [os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()]
run_in_foreground()
after = [os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()]
end.set()
print(before == 2 * [os.SCHED_BATCH], after == 2 * [os.SCHED_OTHER])
"""


def test_what_a_background_thread_starts_is_in_the_background_until_it_returns() -> None:
    """The policy of this process's other threads stays as it is."""
    found: list[str] = []

    def start() -> None:
        run_in_background()
        command = [sys.executable, "-c", FOREGROUND]
        found.append(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip())

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert found == ["True True"]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_the_last_of_overlapping_blocks_restores_what_was_before_the_first() -> None:
    assert gc.isenabled()
    first, second = without_collection(), without_collection()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
