"""Graphs without a device: a replay computes again what was recorded."""

from collections.abc import Callable

import torch

from engine.cuda import graphs
from engine.forward import PassStates

PADDED_ROWS = (1, 2, 4, 8)  # the interpreter is slow


class Recorded:
    """A graph that computes again what was recorded, into the same tensors."""

    def __init__(self, compute: Callable[[], PassStates], outputs: PassStates) -> None:
        self._compute, self._outputs = compute, outputs

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def replay(self) -> None:
        for old, new in zip(self._outputs, self._compute(), strict=True):
            old.copy_(new)


def use_recorded_graphs(setattr: Callable[[object, str, object], None]) -> list[int]:
    """Replaces captures by ``setattr``; the rows of each that was recorded come into the list."""
    rows = []

    def record(compute: Callable[[], PassStates], device: torch.device, pool: object) -> tuple[Recorded, PassStates]:
        outputs = compute()
        rows.append(len(outputs[0]))
        return Recorded(compute, outputs), outputs

    setattr(graphs, "record", record)
    setattr(graphs, "PADDED_ROWS", PADDED_ROWS)
    return rows
