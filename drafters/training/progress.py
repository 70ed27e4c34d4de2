"""What is done of a list, where several things are under way at once and a run may end in between."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class OrderedProgress(Generic[Name]):
    """Things to be done in an order, each of some size: what is done up to the first that is missing.

    What is done behind that does not count, for it depends on what was under way when a run ended.
    """

    def __init__(self, names: Sequence[Name], sizes: Mapping[Name, int]) -> None:
        self._names = names
        self._sizes = dict(sizes)
        self._num_done = 0
        self._total = sum(sizes.get(name, 0) for name in names)
        self._num_finished = sum(name in sizes for name in names)
        self._begun: set[Name] = set()
        self.size = 0
        self._advance()

    def missing(self) -> Iterator[Name]:
        return (name for name in self._names if name not in self._sizes)

    def begin(self, name: Name) -> None:
        self._begun.add(name)

    def has_enough_under_way(self, size: int) -> bool:
        """Whether what has begun will probably do, if it comes out like what is done."""
        mean = self._total / self._num_finished if self._num_finished else 0.0
        return bool(self._begun) and self._total + len(self._begun) * mean >= size

    def done(self, name: Name, size: int) -> None:
        self._sizes[name] = size
        self._total += size
        self._num_finished += 1
        self._begun.discard(name)
        self._advance()

    def first(self, size: int) -> Iterator[Name]:
        """The first that together are of that size, or all that count."""
        total = 0
        for name in self._names[: self._num_done]:
            if total >= size:
                return
            total += self._sizes[name]
            yield name

    def _advance(self) -> None:
        while self._num_done < len(self._names) and self._names[self._num_done] in self._sizes:
            self.size += self._sizes[self._names[self._num_done]]
            self._num_done += 1
