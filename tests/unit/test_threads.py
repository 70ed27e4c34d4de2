"""Teams of threads end with what was computed on a thread of its own."""

import os
import subprocess
import sys

import pytest

from engine.threads import in_own_thread

CODE = """
import os, torch
from engine.threads import in_own_thread
from tests.support.waiting import eventually
torch.set_num_threads(3)
num = lambda: len(os.listdir("/proc/self/task"))
def compute():
    torch.ones(4_000_000).exp()
    return num()
in_own_thread(num)  # what a first thread brings for good
before = num()
inside = in_own_thread(compute)
eventually(lambda: num() <= before)  # they end by themselves, soon after
print(before, inside, num())
compute()
print(num())
"""


def test_no_team_is_left_behind() -> None:
    environment = {**os.environ, "PYTHONPATH": "."}
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr
    first, last = ran.stdout.splitlines()
    before, inside, after = map(int, first.split())
    assert inside > before + 1, "there was no team to be left"
    assert after <= before
    assert int(last) > before, "on the main thread it stays"


def test_errors_come_through() -> None:
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0)
