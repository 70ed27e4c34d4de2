"""The features of drafters that read hidden states: which of the target's layers, and where their rows come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cluster.errors import InvalidField
from drafters.session import request_id_of
from engine.target import FeatureSource, FeatureSpan


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """A row of features: the hidden states after ``layers`` (ascending; as of ``FeatureSource.feature_layers``) of one
    position, one behind the other."""

    layers: tuple[int, ...]
    hidden_size: int

    @property
    def width(self) -> int:
        return len(self.layers) * self.hidden_size

    def columns_in(self, kept: Sequence[int]) -> Tensor | None:
        """Its columns, int64, in rows that hold the layers ``kept``; None: all of them. Raises InvalidField: some are
        missing."""
        missing = sorted(set(self.layers) - set(kept))
        if missing:
            raise InvalidField("feature_layers", list(kept), f"must hold {missing}, which the drafter reads")
        if tuple(kept) == self.layers:
            return None
        starts = torch.tensor([list(kept).index(layer) * self.hidden_size for layer in self.layers])
        return (starts[:, None] + torch.arange(self.hidden_size)).flatten()


class Features(Protocol):
    """Rows of features of committed positions, from the target in this process or over a link."""

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], Tensor]:
        """As of ``FeatureSource``, with the names that the drafter has for requests, and rows of its ``FeatureShape``. It
        may wait for the device, not for another process: what has not come yet cannot be read."""


class HostFeatures:
    """``Features`` of ``engine``. ``name_of``: its name of a request, from the drafter's. Raises InvalidField: it does not
    keep the states of the shape's layers."""

    def __init__(self, engine: FeatureSource, shape: FeatureShape, name_of: Callable[[str], str] = request_id_of) -> None:
        self._engine, self._name_of = engine, name_of
        columns = shape.columns_in(engine.feature_layers)
        self._columns = None if columns is None else columns.to(engine.embedding.device)

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], Tensor]:
        named = [FeatureSpan(self._name_of(span.request_id), span.start, span.stop) for span in spans]
        held, rows = self._engine.read_hidden_states(named)
        return held, rows if self._columns is None else rows[:, self._columns]
