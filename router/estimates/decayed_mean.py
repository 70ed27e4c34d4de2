"""Running means that forget."""

from dataclasses import dataclass

_FEW = 5  # samples before it is known what is usual
UNUSUAL = 3.0  # times what is usual


@dataclass(slots=True)
class RunningMean:
    """Of about the last ``memory`` samples."""

    value: float = 0.0
    num: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.num >= _FEW

    def add(self, sample: float, memory: float) -> None:
        self.num = min(self.num + 1.0, memory)
        self.value += (sample - self.value) / self.num

    def fade(self, num: float) -> None:
        """What was found so far counts as ``num`` samples at the most."""
        self.num = min(self.num, num)

    def usual(self, seconds: float) -> float:
        """A time far above what is usual (a prompt in the same pass, another program) counts as a few times as long."""
        return min(seconds, UNUSUAL * self.value) if self.is_known else seconds
