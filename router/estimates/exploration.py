"""When a drafter that does not pay is tried again: the rule of draft lengths, cascades and quarantine."""

from dataclasses import dataclass

FIRST_PAUSE = 64  # rounds
LONGEST_PAUSE = 512


@dataclass(slots=True)
class Pause:
    """Counts rounds (or slots) without a drafter until the next trial; the pause doubles with each trial that fails. Without
    trials an estimate of zero could never recover."""

    first: int = FIRST_PAUSE
    longest: int = LONGEST_PAUSE
    _num_doubled: int = 0
    _num_passed: int = 0

    def reset(self) -> None:
        """The drafter pays."""
        self._num_doubled = self._num_passed = 0

    def count_round(self) -> bool:
        """Counts a round. Returns whether it is a trial."""
        self._num_passed += 1
        if self._num_passed < min(self.first << self._num_doubled, self.longest):
            return False
        self._num_passed = 0
        if self.first << self._num_doubled < self.longest:
            self._num_doubled += 1
        return True
