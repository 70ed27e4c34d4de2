"""Drafts for the likeliest outcomes of the verification under way (`router/papers/saguaro.py`), in spare time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from cluster.messages import NO_OUTCOMES, OutcomeReport
from drafters.protocol import Drafter, Forks
from drafters.session import Prepared, Session
from engine.acceptance import common_prefix_len
from router.estimates.decayed import DecayedMean
from router.estimates.draft_times import DraftTimes
from router.estimates.survival import OnlineSurvival
from router.estimates.trial import Trial
from router.papers.saguaro import NUM_RUNNERS_UP, RunnerUpRates, num_prepared, outcomes

SPELL_LEN = 16  # commits: the spells of the trial
MIN_PAUSE, MAX_PAUSE = 32, 1024  # spells without preparing, where it was measured to lose
_LONGEST_ROUNDS = 8.0  # of the mean time of a round: a spell with a longer gap is not measured


class OutcomeDrafts:
    """Of one drafter. Learns how likely outcomes are, how long verification takes, and how long draft steps take. Cores that
    draft ahead may slow those that verify, so spells with it take turns with others, and it stays where these are slower.

    Args:
        max_outcomes: of a request, beside the drafter's own guess.
    """

    def __init__(self, drafter: Drafter, forks: Forks, max_outcomes: int) -> None:
        self.counts = NO_OUTCOMES  # since the start
        self._unreported = NO_OUTCOMES
        self._drafter = drafter
        self._forks = forks
        self._max_outcomes = max_outcomes
        self._survival = OnlineSurvival()
        self._rates = RunnerUpRates()
        self._times = DraftTimes(0.0)  # of steps: of more rows they are thought to take as long until they are measured
        self._verify = DecayedMean()  # seconds from a proposal to its commit
        self._serials = count()
        self._trial = Trial(MIN_PAUSE, MAX_PAUSE)
        self._is_used = self._trial.next()
        self._num_commits = self._num_tokens = 0  # of the present spell
        self._spell_s: float | None = None  # when it began
        self._last_s = 0.0  # time of the last commit

    def note_step(self, num_rows: int, seconds: float) -> None:
        self._times.add(num_rows, seconds)

    def commit(self, session: Session, token_ids: Sequence[int], now_s: float) -> None:
        """Commits to a session whose drafter has the tokens; it goes on from the outcome that came true."""
        if session.answered and session.num_sent:
            self._learn(session, token_ids, now_s)
        had_own = session.ahead[: len(token_ids)] == list(token_ids) and len(session.ahead) > len(token_ids)
        was_judged = session.answered and session.num_sent > 0
        hit = session.commit(token_ids)
        if hit is not None:
            self._forks.adopt(session.key, hit.key)
            session.prepared.remove(hit)
        self.drop(session)
        if not session.ahead:  # the next draft; one that goes on keeps what it has
            session.num_runners_up = self.num_runners_up
        if was_judged:
            self._note_commit(len(token_ids), now_s)
            self._count(OutcomeReport(1, int(had_own), int(hit is not None and bool(session.ahead))))

    @property
    def num_runners_up(self) -> int:
        """Wanted of each draft token that begins a draft now."""
        return NUM_RUNNERS_UP if self._is_used else 0

    def take_report(self) -> tuple[OutcomeReport, ...]:
        """What was counted since the last report, if anything."""
        taken, self._unreported = self._unreported, NO_OUTCOMES
        return (taken,) if taken.num_commits or taken.num_prepared else ()

    def _count(self, more: OutcomeReport) -> None:
        self.counts, self._unreported = self.counts.plus(more), self._unreported.plus(more)

    def drop(self, session: Session) -> None:
        """Ends its branches, before it is closed or another drafts for it."""
        for one in session.prepared:
            self._drafter.release(one.key)
        session.prepared.clear()
        session.num_considered = 0

    def batch(self, sessions: Sequence[Session], now_s: float) -> list[tuple[Session | Prepared, int]]:
        """What to draft one more token of, for sessions whose proposal is being verified. Empty: it does not pay."""
        if not self._is_used or not self._verify.is_known or not sessions:
            return []
        growing: list[Session | Prepared] = [one for one in sessions if _wants_more(one)]
        prepared = [p for one in sessions for p in one.prepared if not p.exhausted and len(p.ahead) < p.draft_len]
        growing += prepared
        own, candidates = self._candidates(sessions)
        missing = [1 + s.num_sent + _draft_len(s) - len(s.ahead) for s in sessions if _wants_more(s)]
        missing += [p.draft_len - len(p.ahead) for p in prepared]
        spare_s = self._verify.value - sum([now_s - one.answered_s for one in sessions]) / len(sessions)
        num = num_prepared(
            own,
            [probability for probability, _, _ in candidates],
            len(growing),
            len(sessions),
            max(missing, default=max(map(_draft_len, sessions))),
            spare_s,
            self._times.at,
        )
        if num is None:
            return []
        for session in sessions:
            session.num_considered = min(len(session.ahead), session.num_sent + 1)
        growing += [one for _, session, assumed in candidates[:num] if (one := self._fork(session, assumed)) is not None]
        return [(one, 1) for one in growing]

    def _candidates(self, sessions: Sequence[Session]) -> tuple[float, list[tuple[float, Session, tuple[int, ...]]]]:
        """The probability of what is prepared, summed over requests, and outcomes that were not considered, likeliest
        first."""
        rates, own = self._rates.rates, 0.0
        found = []
        survivals = self._survival.survival([one.confidences[: one.num_sent + 1] for one in sessions])
        for session, survival in zip(sessions, survivals, strict=True):
            own += survival[-1] if survival else 0.0
            if session.prepared:
                prepared = {one.assumed for one in session.prepared}
                known = outcomes(survival, session.runners_up, rates)
                own += sum([o.probability for o in known if (*session.ahead[: o.num_accepted], o.token_id) in prepared])
            num_free = self._max_outcomes - len(session.prepared)
            new = outcomes(survival, session.runners_up, rates, session.num_considered)
            for one in sorted(new, key=lambda outcome: -outcome.probability)[: max(0, num_free)]:
                found.append((one.probability, session, (*session.ahead[: one.num_accepted], one.token_id)))
        return own, sorted(found, key=lambda candidate: -candidate[0])

    def _fork(self, session: Session, assumed: tuple[int, ...]) -> Prepared | None:
        key = f"{session.key}#{next(self._serials)}"
        num_more = min(_draft_len(session), session.end_len - session.committed_len - len(assumed) - 1)
        if num_more <= 0 or not self._forks.fork(session.key, key, assumed, num_more):
            return None
        terms = replace(session.terms, second_price=0.0)  # nobody waits for it
        prepared = Prepared(key=key, terms=terms, num_runners_up=NUM_RUNNERS_UP, assumed=assumed, draft_len=num_more)
        session.prepared.append(prepared)
        self._count(OutcomeReport(num_prepared=1))
        return prepared

    def _note_commit(self, num_tokens: int, now_s: float) -> None:
        """Ends a spell, or drops it where nothing was drafted for a while."""
        is_gap = now_s - self._last_s > _LONGEST_ROUNDS * self._verify.value
        self._last_s = now_s
        if self._spell_s is None or is_gap:
            self._spell_s, self._num_commits, self._num_tokens = now_s, 0, 0
            return
        self._num_commits += 1
        self._num_tokens += num_tokens
        if self._num_commits < SPELL_LEN:
            return
        if self._is_used is not None and now_s > self._spell_s:
            self._trial.note(self._is_used, (now_s - self._spell_s) / self._num_tokens)
        self._is_used = self._trial.next()
        self._spell_s, self._num_commits, self._num_tokens = now_s, 0, 0

    def _learn(self, session: Session, token_ids: Sequence[int], now_s: float) -> None:
        self._verify.add(self._verify.clipped(now_s - session.answered_s))
        num_right = common_prefix_len(session.ahead, token_ids)
        num_judged = min(len(token_ids), len(session.confidences))
        self._survival.record(session.confidences[:num_judged], min(num_right, num_judged))
        if num_right < num_judged and num_right < len(session.runners_up):
            self._rates.note(session.runners_up[num_right], token_ids[num_right])


def _draft_len(session: Session) -> int:
    """Of the next proposal, if this one is accepted in part."""
    return max(1, session.draft_len)


def _wants_more(session: Session) -> bool:
    """Whether its own guess grows: to the bonus token and a proposal behind it."""
    num_left = session.end_len - session.committed_len - 1
    return not session.exhausted and len(session.ahead) < min(session.num_sent + 1 + _draft_len(session), num_left)
