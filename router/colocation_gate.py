"""Whether a drafter that shares the target's time drafts in a round.

The target waits while such a drafter drafts, so its drafts must save more time than they cost. Accepted tokens save plain
decoding; draft rows lengthen the pass; proposals add handling to the round. All three are measured per octave of batch
sizes.
"""

from router.cost_model import CostModel
from router.estimates.decayed_mean import RunningMean

_MEMORY = 64.0  # rounds
_FIRST_ROUNDS = 16  # of a size of batch, at any price
_TRIAL_ROUNDS = 6  # the first of them is spent on catching up, too; they count as much as all before
_PAUSE = 64  # rounds without it, before it is tried again
_LONGEST_PAUSE = 512  # twice as long whenever it was tried in vain


class _Known:
    """Measurements of one octave of batch sizes."""

    def __init__(self) -> None:
        self.saved_s, self.cost_s = RunningMean(), RunningMean()
        self.rest_s = {True: RunningMean(), False: RunningMean()}  # of rounds that it is asked in, and of others
        self.pause = _PAUSE
        self.num_paused = 0
        self.num_trials_left = _FIRST_ROUNDS

    def asks(self) -> bool:
        if self.num_trials_left:
            self.num_trials_left -= 1
            return True
        if self.saved_s.value > self.cost_s.value + self._handling_s:
            self.pause, self.num_paused = _PAUSE, 0
            return True
        self.num_paused += 1
        if self.num_paused < self.pause:
            return False
        self.num_paused, self.num_trials_left = 0, _TRIAL_ROUNDS - 1
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        for mean in (self.saved_s, self.cost_s):
            mean.fade(_TRIAL_ROUNDS)
        return True

    @property
    def _handling_s(self) -> float:
        """What its drafts take of a round beside the drafting: to be told, heard, planned and judged."""
        asked, unasked = self.rest_s[True], self.rest_s[False]
        return max(0.0, asked.value - unasked.value) if asked.is_known and unasked.is_known else 0.0


class ColocationGate:
    """The gate of one drafter."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._was_asked = False
        self.is_asked = True  # in this round

    def decide(self, batch: int) -> bool:
        """Whether to ask it for the drafts of the next round of ``batch`` requests. Once a round."""
        self._was_asked, self.is_asked = self.is_asked, self._of(batch).asks()
        return self.is_asked

    def drafted(self, batch: int, seconds: float) -> None:
        """It was asked, and the target waited so long. After a pause this is not what it usually takes: it caught up."""
        if self._was_asked:
            mean = self._of(batch).cost_s
            mean.add(mean.usual(seconds), _MEMORY)

    def handled(self, batch: int, seconds: float) -> None:
        """A round took so long beside the pass and the drafting."""
        if self._was_asked == self.is_asked:
            mean = self._of(batch).rest_s[self.is_asked]
            mean.add(mean.usual(seconds), _MEMORY)

    def came_true(self, batch: int, saved_s: float) -> None:
        """What it drafted for a round has saved so much."""
        self._of(batch).saved_s.add(saved_s, _MEMORY)

    def _of(self, batch: int) -> _Known:
        return self._known.setdefault(batch.bit_length(), _Known())


def saved_s(num_sequences: int, num_verified: int, num_accepted: int, num_context: int, cost: CostModel) -> float:
    """What drafts have saved in a pass over so many sequences: their accepted tokens, decoded plainly, would have taken
    their share of passes; verifying them made this one longer."""
    plain_s = cost.step_s(num_sequences, num_context)
    return num_accepted * plain_s / num_sequences - (cost.step_s(num_sequences + num_verified, num_context) - plain_s)
