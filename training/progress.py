"""Progress through an ordered list whose items are finished out of order."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class OrderedProgress(Generic[Name]):
    """Items to be done in order, each of some size. ``size`` is that of the done items before the first missing one."""

    def __init__(self, names: Sequence[Name], sizes: Mapping[Name, int]) -> None:
        self._names = names
        self._sizes = dict(sizes)
        finished = [sizes[name] for name in names if name in sizes]
        self._total, self._num_finished = sum(finished), len(finished)
        self._num_in_order = 0
        self._in_flight: set[Name] = set()
        self.size = 0
        self._advance()

    def missing(self) -> Iterator[Name]:
        return (name for name in self._names if name not in self._sizes)

    def begin(self, name: Name) -> None:
        self._in_flight.add(name)

    def has_enough_in_flight(self, size: int) -> bool:
        """Whether finished and started items probably reach ``size``, by the mean size of the finished ones."""
        mean = self._total / self._num_finished if self._num_finished else 0.0
        return bool(self._in_flight) and self._total + len(self._in_flight) * mean >= size

    def done(self, name: Name, size: int) -> None:
        self._sizes[name] = size
        self._total += size
        self._num_finished += 1
        self._in_flight.discard(name)
        self._advance()

    def first(self, size: int) -> Iterator[Name]:
        """The first items that together reach ``size``, or all that are done in order."""
        total = 0
        for name in self._names[: self._num_in_order]:
            if total >= size:
                return
            total += self._sizes[name]
            yield name

    def _advance(self) -> None:
        while self._num_in_order < len(self._names) and self._names[self._num_in_order] in self._sizes:
            self.size += self._sizes[self._names[self._num_in_order]]
            self._num_in_order += 1
