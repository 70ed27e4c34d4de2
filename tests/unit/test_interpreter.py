"""What processes that serve change of Python's defaults."""

import gc
import sys

from cluster.cpu_scheduling import SWITCH_S, freeze_startup_objects, switch_threads_quickly


def test_what_is_there_is_left_out_and_what_comes_later_is_collected() -> None:
    many = [[i] for i in range(10_000)]
    gc.collect()
    num_before = len(gc.get_objects())
    freeze_startup_objects()
    assert len(gc.get_objects()) < num_before / 10
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1
    assert len(many) == 10_000, "what is frozen lives on"


def test_a_thread_that_computes_lets_others_run() -> None:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        switch_threads_quickly()
        assert sys.getswitchinterval() == SWITCH_S < 0.005
    finally:
        sys.setswitchinterval(before_s)
