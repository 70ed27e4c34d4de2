"""Some of many cases for the quick run; the others are of the whole one."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(num: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of which all after ``num`` are marked ``slow``, so that ``make test-fast`` leaves them out."""
    return [value if i < num else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]
