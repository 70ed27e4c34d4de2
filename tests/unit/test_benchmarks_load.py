"""Each benchmark can be loaded, and each shipped scenario can be read. `tests/laboratory` tests their figures, nightly."""

import inspect

import pytest

from benchmarks import BENCHES
from benchmarks.simulate import FOLDER
from simulator.scenario import read_scenario


@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_takes_options(name: str) -> None:
    assert [parameter.name for parameter in inspect.signature(BENCHES[name].load()).parameters.values()] == ["options"]


def test_shipped_scenarios_can_be_read() -> None:
    scenarios = [read_scenario(path) for path in FOLDER.glob("*.yaml")]
    assert {scenario.study for scenario in scenarios} == {"spin", "specrouter", "serving"}
