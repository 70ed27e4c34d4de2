"""Whether a drafter that shares the target's time drafts in a round.

The target waits meanwhile, so drafts must save more time than they cost: accepted tokens save plain decoding, draft rows
lengthen the pass (`value.saved_s`), proposals add handling to the round, and after rounds without drafts the drafter catches
up. All this is measured per octave of batch sizes, apart for rounds in which prompts wait: a pass that prompts fill is not
saved, and trials would delay first tokens. While drafts do not pay, trials lose a hundredth of the time
(`router.estimates.trial.Exploration`), catching up included.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

from router.estimates.decayed import RECENT, UNUSUAL, USUAL, DecayedMean
from router.estimates.draft_times import DraftTimes
from router.estimates.trial import EXPLORED, Exploration

_MANY_MISSED = 64  # tokens, whose time can be told from that of drafts
_FEW_MISSED = 8  # tokens of a request, which its draft computes in passing
# A trial has so many rounds with verified drafts: those of _TRIAL_DRAFTS requests, as a draft can take most of a round of a
# busy target. Where none are verified it ends after _MOST_ASKED rounds.
_TRIAL_DRAFTS, _FEWEST_ROUNDS, _MOST_ROUNDS, _MOST_ASKED = 32, 2, 6, 16
# In plain passes: a drafter that stalled, or needs long to catch up, is tried again.
_MOST_OWED, _MOST_NEEDED = 10.0, 20.0
_LEAST_LOSS = 0.25  # of the cost of its drafts, that a trial is expected to lose: otherwise one near its price alternates
_REST_ROUNDS, _FEW_RESTS = 15, 5  # whose median is taken, and from how many on


class _Situation:
    """Measurements of one octave of batch sizes, with or without prompts that wait."""

    def __init__(self, prompts_wait: bool = False) -> None:
        self.draft_s = DraftTimes()
        self.saved_s, self.catch_up_s = DecayedMean(), DecayedMean()  # of a round that it is queried in
        # Rounds without pass and drafting, by whether it was queried in them.
        self.rest_s: dict[bool, deque[float]] = {asked: deque(maxlen=_REST_ROUNDS) for asked in (True, False)}
        self._exploration = Exploration(1, round(_MOST_NEEDED / EXPLORED), growth=1.0, credit=-1.0 if prompts_wait else 1.0)
        # Of the present trial: its rounds (0: there is none), those with verified drafts, and what these saved beyond what
        # they took. In the first one the drafter catches up, which does not count: if its drafts pay it has to do so once.
        self._num_asked = self._num_verified = 0
        self._gain_s = self._taken_s = 0.0
        self._left_s = 0.0  # what the trial may still lose, with the time to catch up

    def decide(self, batch: int, plain_s: float, draft_s: float, catch_up_s: Callable[[], float]) -> bool:
        draft_s += self._handling_s
        num_rounds = min(max(_FEWEST_ROUNDS, -(-_TRIAL_DRAFTS // batch)), _MOST_ROUNDS)
        is_open = 0 < self._num_asked < _MOST_ASKED and self._num_verified < num_rounds
        if not is_open and self.saved_s.value > draft_s + self.catch_up_s.value:
            self._num_asked = 0
            self._exploration.reset()
            return True
        if is_open or (self._num_asked and self._num_verified and max(self._left_s, self._gain_s) > 0.0):
            self._num_asked += 1
            return True
        if self._num_asked:
            self._num_asked = 0
            self._exploration.credit = max(-_MOST_OWED, self._left_s / plain_s)
        loss_s, credit_s = catch_up_s(), self._exploration.credit * plain_s
        if self.draft_s.num:  # of a batch size that has not been tried the drafts may save as much as they take
            loss_s += num_rounds * max(draft_s - self.saved_s.value, _LEAST_LOSS * draft_s)
        if self._exploration.tries(loss_s / plain_s):
            self._num_asked, self._num_verified = 1, 0
            self._gain_s, self._left_s = 0.0, credit_s
        return bool(self._num_asked)

    def add_cost(self, seconds: float, caught_up_s: float) -> None:
        """The target waited for drafts so long, of which the drafter caught up for ``caught_up_s``."""
        self.catch_up_s.add(caught_up_s)
        seconds += self._handling_s
        self._left_s -= seconds
        self._taken_s = seconds - (caught_up_s if self._num_asked == 1 else 0.0)

    def add_saving(self, saved_s: float) -> None:
        self.saved_s.add(saved_s)
        self._num_verified += 1
        self._left_s += saved_s
        self._gain_s += saved_s - self._taken_s

    @property
    def _handling_s(self) -> float:
        """What handling its proposals adds to a round."""
        queried, others = self.rest_s[True], self.rest_s[False]
        if len(queried) < _FEW_RESTS or len(others) < _FEW_RESTS:
            return 0.0
        return max(0.0, median(queried) - median(others))


class ColocatedGate:
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
        self._plain_s = 0.0  # of it
        self._asked = self._situation  # for the last drafts before those of this round
        self._draft_s = DraftTimes()  # of any batch
        self._catch_up_token_s = DecayedMean(USUAL, catch_up_token_s, RECENT if catch_up_token_s else 0.0)
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
        self._begin_round()
        key = batch.bit_length(), prompts_wait
        self._situation = self._situations.get(key) or self._situations.setdefault(key, _Situation(prompts_wait))
        self._plain_s = plain_s

        def catch_up_s() -> float:
            return self._catch_up_token_s.value * num_missed()

        self.is_queried = self._situation.decide(batch, plain_s, self._usual_s(batch), catch_up_s)
        self._is_noted = not self.is_queried
        self._num_missed = num_missed() if self.is_queried else 0
        return self.is_queried

    def skip(self) -> None:
        """Instead of ``decide``: none of the requests has this drafter."""
        self._begin_round()
        self.is_queried, self._is_noted = False, True

    def add_draft_time(self, batch: int, seconds: float) -> None:
        """Adds the time that the target waited for the drafts of the last decision. Called again, it does nothing."""
        if self._is_noted:
            return
        self._is_noted = True
        usual_s, token_s, num_missed = self._usual_s(batch), self._catch_up_token_s, self._num_missed
        has_missed = num_missed >= _MANY_MISSED
        expected_s = usual_s or self._plain_s
        if has_missed:
            expected_s += token_s.value * num_missed if token_s.num else self._plain_s
        seconds = min(seconds, UNUSUAL * expected_s)  # a stall is no cost of drafts
        caught_up_s = 0.0
        if has_missed and usual_s:
            caught_up_s = max(0.0, seconds - usual_s)
            token_s.add(caught_up_s / num_missed)
        elif has_missed:  # nothing is known of its drafts
            caught_up_s = min(seconds, token_s.value * num_missed) if token_s.num else seconds
        if usual_s and (self._was_queried or num_missed <= _FEW_MISSED * batch):
            caught_up_s = 0.0  # new requests, as in other rounds
        if not caught_up_s:
            for times in (self._situation.draft_s, self._draft_s):
                times.add(batch, seconds)
        self._situation.add_cost(seconds, caught_up_s)

    def add_overhead(self, seconds: float) -> None:
        """Adds the time of a round without its pass and drafting."""
        if self._was_queried == self.is_queried:
            self._situation.rest_s[self.is_queried].append(seconds)

    def add_saving(self, saved_s: float) -> None:
        """Its drafts saved so much time in a pass."""
        self._asked.add_saving(saved_s)

    def _usual_s(self, batch: int) -> float:
        """Of drafts, in this situation or else in any; 0 if nothing is known."""
        own = self._situation.draft_s
        return (own if own.num else self._draft_s).at(batch)

    def _begin_round(self) -> None:
        """What is verified from now on was asked for before it."""
        if self.is_queried:
            self._asked = self._situation
        self._was_queried = self.is_queried
