"""Whether a drafter that shares the target's time drafts in a round.

The target waits meanwhile, so drafts must save more time than they cost: accepted tokens save plain decoding, draft rows
lengthen the pass, proposals add handling to the round. All three are measured per octave of batch sizes, apart for rounds
in which prompts wait: a pass that prompts fill is not saved, and trials would delay first tokens.

While drafts do not pay, a round without them gives a hundredth of its pass as credit. A trial begins when the credit covers
what it will lose at least, with the time in which the drafter catches up; what it loses is debited. So trials take a
hundredth of the time, whatever a drafter costs.
"""

from collections.abc import Callable

from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean
from router.estimates.draft_times import DraftTimes

_MEMORY = 64.0  # rounds
_CATCH_UP_MEMORY = 8.0  # times
_MANY_MISSED = 64  # tokens, whose time can be told from that of drafts
_CREDIT = 0.01  # of a plain pass, for each round without drafts
_FIRST_CREDIT = 2.0  # plain passes; where prompts wait as much is owed
# A trial has at least so many rounds with verified drafts: those of _TRIAL_DRAFTS requests, as a draft can take most of a
# round of a busy target.
_TRIAL_DRAFTS, _FEWEST_ROUNDS, _MOST_ROUNDS = 32, 2, 6
_LEAST_LOSS = 0.25  # of what its drafts cost, that a trial counts on: else one that just pays would come and go
# Plain passes: more is not owed, and no trial needs more credit, so that a stall does not end drafting for good.
_MOST_OWED, _MOST_NEEDED = 10.0, 20.0


class _Situation:
    """Measurements of one octave of batch sizes, with or without prompts that wait."""

    def __init__(self, plain_s: float = 0.0, prompts_wait: bool = False) -> None:
        self.draft_s = DraftTimes()
        self.rest_s = {True: DecayedMean(), False: DecayedMean()}  # of rounds that it is queried in, and of others
        self._saved_s = DecayedMean()
        self._credit_s = (-_FIRST_CREDIT if prompts_wait else _FIRST_CREDIT) * plain_s
        self._on_trial = False
        self._num_verified = 0  # rounds of this trial

    def decide(self, batch: int, plain_s: float, catch_up_s: Callable[[], float]) -> bool:
        cost_s = self.draft_s.at(batch) + self._handling_s
        num_rounds = min(max(_FEWEST_ROUNDS, -(-_TRIAL_DRAFTS // batch)), _MOST_ROUNDS)
        if self._on_trial and (self._num_verified < num_rounds or not self.draft_s.num):
            return True
        if self._saved_s.value > cost_s:
            self._on_trial, self._credit_s = False, 0.0
            return True
        if self._on_trial:  # it goes on for as long as it costs nothing
            self._on_trial = self._credit_s > 0.0
            self._credit_s = max(self._credit_s, -_MOST_OWED * plain_s)
            return self._on_trial
        trial_s = num_rounds * max(cost_s - self._saved_s.value, _LEAST_LOSS * cost_s)
        most_s = _MOST_NEEDED * plain_s
        if self._credit_s >= min(trial_s, most_s) and self._credit_s >= min(trial_s + catch_up_s(), most_s):
            self._on_trial, self._num_verified = True, 0
        return self._on_trial

    def note_plain(self, plain_s: float) -> None:
        self._credit_s += _CREDIT * plain_s

    def note_taken(self, seconds: float) -> None:
        """The target waited so long for drafts, or for the drafter to catch up."""
        if self._on_trial:
            self._credit_s -= seconds + self._handling_s

    def note_saved(self, saved_s: float) -> None:
        self._saved_s.add(saved_s, _MEMORY)
        if self._on_trial:
            self._num_verified += 1
            self._credit_s += saved_s

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
        self._situation = self._before = _Situation()  # of the last decision, and of that before
        self._catch_up_token_s = DecayedMean()
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
        key = batch.bit_length(), prompts_wait
        self._before = self._situation
        if not self.is_queried:
            self._before.note_plain(plain_s)
        self._situation = self._situations.get(key) or self._situations.setdefault(key, _Situation(plain_s, prompts_wait))

        def catch_up_s() -> float:
            return self._catch_up_token_s.value * num_missed()

        self._was_queried, self.is_queried = self.is_queried, self._situation.decide(batch, plain_s, catch_up_s)
        self._num_missed = num_missed() if self.is_queried else 0
        return self.is_queried

    def skip(self) -> None:
        """Instead of ``decide``: none of the requests has this drafter."""
        self._before, self._situation = self._situation, _Situation()
        self._was_queried, self.is_queried = self.is_queried, False

    def note_draft(self, batch: int, seconds: float) -> None:
        """Adds the time that the target waited for its drafts. After a pause it has caught up in that time."""
        if not self.is_queried:
            return
        self._situation.note_taken(seconds)
        draft_s = self._situation.draft_s
        if self._num_missed >= _MANY_MISSED:
            token_s = max(0.0, seconds - draft_s.at(batch)) / self._num_missed
            self._catch_up_token_s.add(self._catch_up_token_s.clipped(token_s), _CATCH_UP_MEMORY)
        if self._was_queried:
            draft_s.add(batch, seconds)

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
