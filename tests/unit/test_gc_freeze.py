"""What is loaded is not looked at by every collection."""

import gc

from engine.gc_freeze import freeze_startup_objects


def test_what_is_there_is_left_out_and_what_comes_later_is_collected() -> None:
    gc.collect()
    num_before = len(gc.get_objects())
    try:
        freeze_startup_objects()
        assert len(gc.get_objects()) < num_before / 10
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
