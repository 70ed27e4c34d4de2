"""Exponentially decayed means."""

from dataclasses import dataclass

_FEW = 5  # samples before it is known what is usual
UNUSUAL = 3.0  # times what is usual


@dataclass(slots=True)
class RunningMean:
    """Mean of about the last ``memory`` samples."""

    value: float = 0.0
    num: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.num >= _FEW

    def add(self, sample: float, memory: float) -> None:
        self.num = min(self.num + 1.0, memory)
        self.value += (sample - self.value) / self.num

    def fade(self, num: float) -> None:
        """Caps the weight of the present mean at ``num`` samples."""
        self.num = min(self.num, num)

    def usual(self, seconds: float) -> float:
        """Clips outliers (a prompt in the same pass, another program) at UNUSUAL times the mean."""
        return min(seconds, UNUSUAL * self.value) if self.is_known else seconds
