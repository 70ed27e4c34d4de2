"""Loss of the host on which `outrider serve` runs. After the other tests, since the API may have no replica there later."""

import pytest

from benchmarks.host_rows import LAUNCHER_LOST
from tests.hosts.conftest import Served

pytestmark = [pytest.mark.ray, pytest.mark.model]


def test_the_next_launcher_takes_over_what_runs(served_hosts: Served) -> None:
    server = served_hosts.server
    targets = server.workers("TargetActor")
    served_hosts.measured(LAUNCHER_LOST)
    assert server.workers("TargetActor") == targets
    assert server.words_with("is taken over", 0)
