"""Whether a drafter that shares the target's time drafts in a round.

The target waits meanwhile, so drafts must save more time than they cost: accepted tokens save plain decoding, draft rows
lengthen the pass, proposals add handling to the round. All three are measured per octave of batch sizes, apart for rounds
in which prompts wait: passes that prompts fill are not saved, and who waits for a first token waits for drafts, too.
"""

from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean
from router.estimates.draft_times import DraftTimes
from router.estimates.exploration import Pause

_MEMORY = 64.0  # rounds
_FIRST_ROUNDS = 16  # of a batch size, at any price
_TRIAL_ROUNDS = 6  # at most; the first catches up. All rounds before weigh as much
# Verified rounds and drafts after which a trial ends that is hopeless: on a busy target a draft can take most of a round.
_LEAST_ROUNDS, _LEAST_DRAFTS = 2, 32
_HOPELESS = 0.5  # of what its drafts cost, that they must have saved by then
_MOST_POSTPONED = 256  # rounds in which prompts wait, by which a trial is postponed


class _Situation:
    """Measurements of one octave of batch sizes, with or without prompts that wait."""

    def __init__(self) -> None:
        self.saved_s = DecayedMean()
        self.draft_s = DraftTimes()
        self.rest_s = {True: DecayedMean(), False: DecayedMean()}  # of rounds that it is queried in, and of others
        self.pause = Pause()
        self.num_trials_left = _FIRST_ROUNDS
        self.num_before = 0.0  # rounds that counted in ``saved_s`` when this trial began
        self.num_postponed = 0  # rounds of this trial

    def decide(self, batch: int, prompts_wait: bool) -> bool:
        cost_s = self.draft_s.at(batch) + self._handling_s
        if self.num_trials_left and not self._is_hopeless(batch, cost_s):
            if prompts_wait and self.num_postponed < _MOST_POSTPONED:
                self.num_postponed += 1
                return False
            self.num_trials_left -= 1
            return True
        if self.num_trials_left:
            self.pause.lengthen()
        self.num_trials_left = 0
        if self.saved_s.value > cost_s:
            self.pause.reset()
            return True
        if not self.pause.count_round():
            return False
        self.num_trials_left = _TRIAL_ROUNDS - 1
        self.saved_s.fade(_TRIAL_ROUNDS)
        self.num_before = self.saved_s.num
        self.num_postponed = 0
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
        self._situations: dict[tuple[int, bool], _Situation] = {}
        self._prompts_wait = False
        self._was_queried = False
        self.is_queried = True  # in this round

    def decide(self, batch: int, prompts_wait: bool = False) -> bool:
        """Whether to query it for the drafts of the next round of ``batch`` requests. Once a round.

        Args:
            prompts_wait: the next pass has rows of prompts, as the last one had.
        """
        self._prompts_wait = prompts_wait
        self._was_queried, self.is_queried = self.is_queried, self._of(batch).decide(batch, prompts_wait)
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

    def _of(self, batch: int) -> _Situation:
        return self._situations.setdefault((batch.bit_length(), self._prompts_wait), _Situation())


def saved_s(
    num_sequences: int,
    num_verified: int,
    num_accepted: int,
    num_context: int,
    cost: CostModel,
    num_prompt_rows: int = 0,
) -> float:
    """Time that drafts saved in a pass over so many sequences: what their accepted tokens would have added to plain passes,
    less what verifying them added to this one.

    Args:
        num_prompt_rows: that this pass had and later ones will have. Where prompts fill passes anyway, fewer rounds save the
            rows of decoding alone.
    """

    def pass_s(num_rows: int) -> float:
        seconds = cost.step_s(num_rows, num_context)
        if num_prompt_rows:
            seconds += cost.prefill_s(num_rows + num_prompt_rows, 0) - cost.prefill_s(num_rows, 0)
        return seconds

    plain_s = pass_s(num_sequences)
    without_s = cost.prefill_s(num_prompt_rows, 0) if num_prompt_rows else 0.0
    token_s = max(0.0, plain_s - without_s) / num_sequences
    return num_accepted * token_s - (pass_s(num_sequences + num_verified) - plain_s)
