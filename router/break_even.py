"""Whether a drafter that shares the target's time drafts in a round.

The target waits meanwhile, so drafts must save more time than they cost: accepted tokens save plain decoding, draft rows
lengthen the pass, proposals add handling to the round. All three are measured per octave of batch sizes.
"""

from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean
from router.estimates.draft_times import DraftTimes
from router.estimates.exploration import Pause

_MEMORY = 64.0  # rounds
_FIRST_ROUNDS = 16  # of a batch size, at any price
_TRIAL_ROUNDS = 6  # at most; the first catches up. All rounds before weigh as much
# Verified rounds and drafts after which a trial ends that is hopeless: on a busy target a draft can take most of a round.
_LEAST_ROUNDS, _LEAST_DRAFTS = 3, 32
_HOPELESS = 0.5  # of what its drafts cost, that they must have saved by then


class _BatchRange:
    """Measurements of one octave of batch sizes."""

    def __init__(self) -> None:
        self.saved_s = DecayedMean()
        self.draft_s = DraftTimes()
        self.rest_s = {True: DecayedMean(), False: DecayedMean()}  # of rounds that it is queried in, and of others
        self.pause = Pause()
        self.num_trials_left = _FIRST_ROUNDS
        self.num_before = 0.0  # rounds that counted in ``saved_s`` when this trial began

    def decide(self, batch: int) -> bool:
        cost_s = self.draft_s.at(batch) + self._handling_s
        if self.num_trials_left and not self._is_hopeless(batch, cost_s):
            self.num_trials_left -= 1
            return True
        self.num_trials_left = 0
        if self.saved_s.value > cost_s:
            self.pause.reset()
            return True
        if not self.pause.count_round():
            return False
        self.num_trials_left = _TRIAL_ROUNDS - 1
        self.saved_s.fade(_TRIAL_ROUNDS)
        self.num_before = self.saved_s.num
        self.draft_s.fade(_TRIAL_ROUNDS)
        return True

    def _is_hopeless(self, batch: int, cost_s: float) -> bool:
        num_verified = self.saved_s.num - self.num_before
        is_told = num_verified >= _LEAST_ROUNDS and num_verified * batch >= _LEAST_DRAFTS
        return is_told and self.saved_s.value < _HOPELESS * cost_s

    @property
    def _handling_s(self) -> float:
        """What handling its proposals adds to a round."""
        queried, others = self.rest_s[True], self.rest_s[False]
        return max(0.0, queried.value - others.value) if queried.is_known and others.is_known else 0.0


class BreakEvenGate:
    """The gate of one drafter."""

    def __init__(self) -> None:
        self._ranges: dict[int, _BatchRange] = {}
        self._was_queried = False
        self.is_queried = True  # in this round

    def decide(self, batch: int) -> bool:
        """Whether to query it for the drafts of the next round of ``batch`` requests. Once a round."""
        self._was_queried, self.is_queried = self.is_queried, self._of(batch).decide(batch)
        return self.is_queried

    def skip(self) -> None:
        """Instead of ``decide``: none of the requests has this drafter. No round of a pause or trial passes."""
        self._was_queried, self.is_queried = self.is_queried, False

    def note_draft(self, batch: int, seconds: float) -> None:
        """Adds the time that the target waited for its drafts; not after a pause, when the drafter catches up."""
        if self._was_queried:
            self._of(batch).draft_s.add(batch, seconds)

    def note_rest(self, batch: int, seconds: float) -> None:
        """Adds the time of a round without its pass and drafting."""
        if self._was_queried == self.is_queried:
            mean = self._of(batch).rest_s[self.is_queried]
            mean.add(mean.clipped(seconds), _MEMORY)

    def note_saved(self, batch: int, saved_s: float) -> None:
        """Its drafts saved so much time in a pass."""
        self._of(batch).saved_s.add(saved_s, _MEMORY)

    def _of(self, batch: int) -> _BatchRange:
        return self._ranges.setdefault(batch.bit_length(), _BatchRange())


def saved_s(num_sequences: int, num_verified: int, num_accepted: int, num_context: int, cost: CostModel) -> float:
    """Time that drafts saved in a pass over so many sequences: the plain passes that their accepted tokens would have taken,
    less what verifying them added to this one."""
    plain_s = cost.step_s(num_sequences, num_context)
    return num_accepted * plain_s / num_sequences - (cost.step_s(num_sequences + num_verified, num_context) - plain_s)
