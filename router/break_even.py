"""Whether a drafter that shares the target's time drafts in a round.

The target waits meanwhile, so drafts must save more time than they cost: accepted tokens save plain decoding, draft rows
lengthen the pass, proposals add handling to the round. All three are measured per octave of batch sizes, apart for rounds
in which prompts wait: a pass that prompts fill is not saved, and trials would delay first tokens.

While drafts do not pay, a round without them gives a hundredth of its pass as credit. A trial begins when the credit covers
what it will lose at least, with the time in which the drafter catches up; what it loses is debited. So trials take a
hundredth of the time, whatever drafts cost. Not so where catching up takes more than _MOST_NEEDED passes: what exceeds
_MOST_OWED is forgiven, or the drafter would not be tried again.
"""

from collections.abc import Callable

from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean
from router.estimates.draft_times import DraftTimes

_MEMORY = 64.0  # rounds
_CATCH_UP_MEMORY = 4096  # tokens
_PRIOR_TOKENS = 1024.0  # that a profiled time counts for
_MANY_MISSED = 64  # tokens, whose time can be told from that of drafts
_FEW_MISSED = 8  # tokens of a request, which its draft computes in passing
_CREDIT = 0.01  # of a plain pass, for each round without drafts
_FIRST_CREDIT = 2.0  # plain passes; where prompts wait as much is owed
# A trial has at least so many rounds with verified drafts: those of _TRIAL_DRAFTS requests, as a draft can take most of a
# round of a busy target. Where none are verified it ends after _MOST_ASKED rounds.
_TRIAL_DRAFTS, _FEWEST_ROUNDS, _MOST_ROUNDS, _MOST_ASKED = 32, 2, 6, 16
_LEAST_LOSS = 0.25  # of what its drafts cost, that a trial counts on: else one near its price would alternate
_MOST_OWED, _MOST_NEEDED = 10.0, 20.0  # plain passes


class _Situation:
    """Measurements of one octave of batch sizes, with or without prompts that wait."""

    def __init__(self, plain_s: float = 0.0, prompts_wait: bool = False) -> None:
        self.draft_s = DraftTimes()
        self.rest_s = {True: DecayedMean(), False: DecayedMean()}  # of rounds that it is queried in, and of others
        self.on_trial = False
        self._saved_s = DecayedMean()
        self._credit_s = (-_FIRST_CREDIT if prompts_wait else _FIRST_CREDIT) * plain_s
        # Of this trial: rounds, those with verified drafts, and what the drafts saved less what all but the first took.
        self._num_asked = self._num_verified = 0
        self._trial_s = 0.0

    def decide(self, batch: int, plain_s: float, catch_up_s: Callable[[], float]) -> bool:
        cost_s = self.draft_s.at(batch) + self._handling_s
        num_rounds = min(max(_FEWEST_ROUNDS, -(-_TRIAL_DRAFTS // batch)), _MOST_ROUNDS)
        if self.on_trial and not self._is_told(num_rounds):
            self._num_asked += 1
            return True
        if self._saved_s.value > cost_s:
            self.on_trial, self._credit_s = False, 0.0
            return True
        if self.on_trial:  # it goes on for as long as it costs nothing
            if self._num_verified and max(self._credit_s, self._trial_s - cost_s) > 0.0:
                return True
            self.on_trial = False
            self._credit_s = max(self._credit_s, -_MOST_OWED * plain_s)
        elif self._covers(num_rounds * max(cost_s - self._saved_s.value, _LEAST_LOSS * cost_s), plain_s, catch_up_s):
            self.on_trial = True
            self._num_asked, self._num_verified, self._trial_s = 1, 0, 0.0
            return True
        self._credit_s += _CREDIT * plain_s
        return False

    def note_taken(self, seconds: float, catches_up: bool) -> None:
        """The target waited so long for drafts of a trial."""
        seconds += self._handling_s
        self._credit_s -= seconds
        if not catches_up:
            self._trial_s -= seconds

    def note_saved(self, saved_s: float, of_trial: bool) -> None:
        self._saved_s.add(saved_s, _MEMORY)
        if of_trial:
            self._num_verified += 1
            self._credit_s += saved_s
            self._trial_s += saved_s

    def _is_told(self, num_rounds: int) -> bool:
        return self._num_verified >= num_rounds or self._num_asked >= _MOST_ASKED

    def _covers(self, trial_s: float, plain_s: float, catch_up_s: Callable[[], float]) -> bool:
        most_s = _MOST_NEEDED * plain_s
        return self._credit_s >= min(trial_s, most_s) and self._credit_s >= min(trial_s + catch_up_s(), most_s)

    @property
    def _handling_s(self) -> float:
        """What handling its proposals adds to a round."""
        queried, others = self.rest_s[True], self.rest_s[False]
        return max(0.0, queried.value - others.value) if queried.is_known and others.is_known else 0.0


class BreakEvenGate:
    """The gate of one drafter. ``catch_up_token_s``: as profiled; 0 if it is not known.

    A round decides (``decide`` or ``skip``), then notes what drafts that were asked for before saved, then what it waits for
    the drafts of its own decision.
    """

    def __init__(self, catch_up_token_s: float = 0.0) -> None:
        self._situations: dict[tuple[int, bool], _Situation] = {}
        self._was_queried = False
        self.is_queried = True  # in this round
        self._is_noted = True  # what the drafts of this round took
        self._situation = _Situation()  # of the last decision
        self._asked, self._of_trial = self._situation, False  # for the last drafts before those of this round
        self._draft_s = DraftTimes()  # of any batch
        self._catch_up_token_s = DecayedMean(catch_up_token_s, _PRIOR_TOKENS if catch_up_token_s else 0.0)
        self._num_missed = 0  # tokens, at the last decision

    def decide(
        self, batch: int, plain_s: float, prompts_wait: bool = False, num_missed: Callable[[], int] = lambda: 0
    ) -> bool:
        """Whether to query it for the drafts of the next round of ``batch`` requests. Once a round.

        Args:
            plain_s: of a pass that decodes them plainly.
            prompts_wait: prompts fill the next pass as they filled the last one.
            num_missed: tokens that it has not been sent.
        """
        self._follow()
        key = batch.bit_length(), prompts_wait
        self._situation = self._situations.get(key) or self._situations.setdefault(key, _Situation(plain_s, prompts_wait))

        def catch_up_s() -> float:
            return self._catch_up_token_s.value * num_missed()

        self.is_queried = self._situation.decide(batch, plain_s, catch_up_s)
        self._is_noted = not self.is_queried
        self._num_missed = num_missed() if self.is_queried else 0
        return self.is_queried

    def skip(self) -> None:
        """Instead of ``decide``: none of the requests has this drafter."""
        self._follow()
        self.is_queried, self._is_noted = False, True

    def note_draft(self, batch: int, seconds: float) -> None:
        """Adds the time that the target waited for its drafts. After a pause it has caught up in that time. What other
        passes wait before the next decision is not noted."""
        if self._is_noted:
            return
        self._is_noted = True
        situation, draft_s = self._situation, self._situation.draft_s
        catches_up = not self._was_queried and self._num_missed > _FEW_MISSED * batch
        if situation.on_trial:
            situation.note_taken(seconds, catches_up)
        if self._num_missed >= _MANY_MISSED and self._draft_s.num:
            more_s = max(0.0, seconds - self._draft_s.at(batch))
            self._catch_up_token_s.add_all(more_s, self._num_missed, _CATCH_UP_MEMORY)
        if not catches_up:
            draft_s.add(batch, seconds)
            self._draft_s.add(batch, seconds)

    def note_rest(self, seconds: float) -> None:
        """Adds the time of a round without its pass and drafting."""
        if self._was_queried == self.is_queried:
            mean = self._situation.rest_s[self.is_queried]
            mean.add(mean.clipped(seconds), _MEMORY)

    def note_saved(self, saved_s: float) -> None:
        """Its drafts saved so much time in a pass."""
        self._asked.note_saved(saved_s, self._of_trial)

    def _follow(self) -> None:
        """Another round: what is verified from now on was asked for before it."""
        if self.is_queried:
            self._asked, self._of_trial = self._situation, self._situation.on_trial
        self._was_queried = self.is_queried


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
