"""Tests of benchmarks, studies and the simulator run nightly; `tests/unit/test_benchmarks_load.py` runs on each commit."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.nightly)
