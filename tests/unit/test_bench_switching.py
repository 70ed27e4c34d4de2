"""What `outrider bench routing --live` says of switches, and that it really makes them."""

from pathlib import Path

import pytest

from benchmarks import switching
from benchmarks.switching import Switch, measure, result, waiting_cluster
from cluster.inventory import Inventory, Node
from cluster.resolve import resolve

pytestmark = pytest.mark.slow


def test_what_is_saved_is_of_the_stall_beyond_a_usual_round() -> None:
    found = result({True: [Switch(0.07, 0.05)] * 3, False: [Switch(0.25, 0.05)] * 3}, 512)
    assert found.figures["switch_stall_saved"] == pytest.approx(0.9)
    assert found.figures["switch_stall_ms.in_step"] == pytest.approx(20.0)
    assert Switch(0.04, 0.05).stall_s == 0.0


def test_requests_are_handed_over_both_ways(tmp_path: Path) -> None:
    from tests.support.tiny_model import write_tiny_model

    folder = str(write_tiny_model(tmp_path, num_layers=4))
    config = resolve(switching.config(folder, 64), Inventory((Node("here", 2.0),)))
    with waiting_cluster(config) as cluster:
        switches = measure(cluster, 64, 3)
    assert switches[True]
    assert switches[False]
