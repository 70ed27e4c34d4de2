"""Whether a drafter that shares the target's time drafts in a round.

The target waits meanwhile, so drafts must save more time than they cost: accepted tokens save plain decoding, draft rows
lengthen the pass, proposals add handling to the round. All three are measured per octave of batch sizes, apart for rounds
in which prompts wait: a pass that prompts fill is not saved, and trials would delay first tokens.
"""

from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean
from router.estimates.draft_times import DraftTimes
from router.estimates.exploration import Pause

_MEMORY = 64.0  # rounds
_FIRST_ROUNDS = 16  # of a batch size, at any price
_TRIAL_ROUNDS = 6  # at most; the first catches up. All rounds before weigh as much
_FIRST_PAUSE_OF_PROMPTS = 256  # rounds in which prompts wait, before the first trial among them
# Verified rounds and drafts after which a trial ends that is hopeless: on a busy target a draft can take most of a round.
_LEAST_ROUNDS, _LEAST_DRAFTS = 2, 32
_HOPELESS = 0.5  # of what its drafts cost, that those of the trial must have saved by then


class _Situation:
    """Measurements of one octave of batch sizes, with or without prompts that wait."""

    def __init__(self, prompts_wait: bool) -> None:
        self._saved_s = DecayedMean()
        self.draft_s = DraftTimes()
        self.rest_s = {True: DecayedMean(), False: DecayedMean()}  # of rounds that it is queried in, and of others
        self._pause = Pause(_FIRST_PAUSE_OF_PROMPTS) if prompts_wait else Pause()
        self._num_trials_left = 0 if prompts_wait else _FIRST_ROUNDS
        self._trial_saved_s = DecayedMean()  # of this trial alone

    def decide(self, batch: int) -> bool:
        cost_s = self.draft_s.at(batch) + self._handling_s
        if self._num_trials_left:
            if not self._is_hopeless(batch, cost_s):
                self._num_trials_left -= 1
                return True
            self._num_trials_left = 0
            self._pause.lengthen()
        if self._saved_s.value > cost_s:
            self._pause.reset()
            return True
        if not self._pause.count_round():
            return False
        self._num_trials_left = _TRIAL_ROUNDS - 1
        self._trial_saved_s = DecayedMean()
        self._saved_s.fade(_TRIAL_ROUNDS)
        self.draft_s.fade(_TRIAL_ROUNDS)
        return True

    def note_saved(self, saved_s: float) -> None:
        self._saved_s.add(saved_s, _MEMORY)
        self._trial_saved_s.add(saved_s, _MEMORY)

    def _is_hopeless(self, batch: int, cost_s: float) -> bool:
        saved = self._trial_saved_s
        is_told = saved.num >= _LEAST_ROUNDS and saved.num * batch >= _LEAST_DRAFTS
        return is_told and saved.value < _HOPELESS * cost_s

    @property
    def _handling_s(self) -> float:
        """What handling its proposals adds to a round."""
        queried, others = self.rest_s[True], self.rest_s[False]
        return max(0.0, queried.value - others.value) if queried.is_known and others.is_known else 0.0


class BreakEvenGate:
    """The gate of one drafter.

    A round decides (``decide``), then notes what the drafts that were asked for by the decision before saved, then what it
    waits for the drafts of its own decision.
    """

    def __init__(self) -> None:
        self._situations: dict[tuple[int, bool], _Situation] = {}
        self._was_queried = False
        self.is_queried = True  # in this round
        self._situation = self._before = _Situation(prompts_wait=False)  # of the last decision, and of that before

    def decide(self, batch: int, prompts_wait: bool = False) -> bool:
        """Whether to query it for the drafts of the next round of ``batch`` requests. Once a round.

        Args:
            prompts_wait: prompts fill the next pass as they filled the last one.
        """
        key = batch.bit_length(), prompts_wait
        self._before = self._situation
        self._situation = self._situations.setdefault(key, _Situation(prompts_wait))
        self._was_queried, self.is_queried = self.is_queried, self._situation.decide(batch)
        return self.is_queried

    def skip(self) -> None:
        """Instead of ``decide``: none of the requests has this drafter. No round of a pause or trial passes."""
        self._was_queried, self.is_queried = self.is_queried, False

    def note_draft(self, batch: int, seconds: float) -> None:
        """Adds the time that the target waited for its drafts; not after a pause, when the drafter catches up."""
        if self._was_queried and self.is_queried:
            self._situation.draft_s.add(batch, seconds)

    def note_rest(self, seconds: float) -> None:
        """Adds the time of a round without its pass and drafting."""
        if self._was_queried == self.is_queried:
            mean = self._situation.rest_s[self.is_queried]
            mean.add(mean.clipped(seconds), _MEMORY)

    def note_saved(self, saved_s: float) -> None:
        """Its drafts saved so much time in a pass."""
        self._before.note_saved(saved_s)


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
