"""What drafting saves and wastes at a target."""

import pytest

from cluster.client import DraftsByLoad
from cluster.types import Commit
from engine.pass_costs import DraftingMonitor
from router.cost_model import TableCost

COST = TableCost((1, 2, 4, 8), (1.0, 1.25, 1.5, 2.0))  # seconds, larger than life


def commit(num_tokens: int, num_proposed: int = 0, request: str = "a") -> Commit:
    return Commit(request, 8, (5,) * num_tokens, num_proposed, num_tokens - 1)


def test_drafts_save_passes_and_rejected_rows_waste_time() -> None:
    monitor = DraftingMonitor(COST)
    monitor.note(10.0, 2.0, [commit(4, num_proposed=7)], num_rows=8, num_context=0)
    assert monitor.effect().decode_s == 0.0, "a round lasts until the next one begins"
    monitor.note(12.5, 1.0, [commit(1)], num_rows=1, num_context=0)
    effect = monitor.effect()
    assert effect.decode_s == pytest.approx(2.5)
    assert effect.plain_s == pytest.approx(4.0), "four passes of one row"
    assert effect.rejected_s == pytest.approx(0.5), "eight rows instead of four"


def test_a_busy_machine_slows_both_sides_alike() -> None:
    monitors = [DraftingMonitor(COST), DraftingMonitor(COST)]
    for monitor, slowness in zip(monitors, (1.0, 3.0), strict=True):
        for i in range(3):
            monitor.note(2.0 * slowness * i, 2.0 * slowness, [commit(4, num_proposed=7)], num_rows=8, num_context=0)
    quiet, busy = (monitor.effect() for monitor in monitors)
    assert busy.plain_s / busy.decode_s == pytest.approx(quiet.plain_s / quiet.decode_s) == pytest.approx(2.0)
    assert busy.rejected_s / busy.decode_s == pytest.approx(quiet.rejected_s / quiet.decode_s) == pytest.approx(0.25)


def test_a_batch_without_drafts_saves_nothing() -> None:
    monitor = DraftingMonitor(COST)
    for i in range(5):
        monitor.note(1.25 * i, 1.25, [commit(1), commit(1, request="b")], num_rows=2, num_context=0)
    effect = monitor.effect()
    assert effect.decode_s == pytest.approx(effect.plain_s) == pytest.approx(5.0)
    assert effect.rejected_s == 0.0


def test_times_without_decoding_do_not_count() -> None:
    monitor = DraftingMonitor(COST)
    monitor.note(0.0, 1.0, [commit(1)], num_rows=1, num_context=0)
    monitor.interrupt()  # idle: nobody knows when the round ended
    monitor.note(100.0, 1.0, [commit(1)], num_rows=1, num_context=0)
    monitor.interrupt(101.0)  # a prompt's pass begins
    monitor.note(200.0, 1.0, [], num_rows=0, num_context=0)
    assert monitor.effect().decode_s == pytest.approx(1.0)


def test_lengths_by_load() -> None:
    monitor = DraftingMonitor(COST)
    monitor.note(0.0, 1.0, [commit(3, num_proposed=4)], num_rows=5, num_context=0)
    for num in (3, 4):
        monitor.note(float(num), 1.0, [commit(1, 1, str(i)) for i in range(num)], num_rows=2 * num, num_context=0)
    assert monitor.effect().by_load == (DraftsByLoad(1, 1, 4, 2), DraftsByLoad(4, 7, 7, 0))
    monitor.note(9.0, 1.0, [commit(1, 0, str(i)) for i in range(200_000)], num_rows=200_000, num_context=0)
    assert monitor.effect().by_load[-1].num_rounds == 200_000
