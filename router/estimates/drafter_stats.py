"""A target's estimates of its drafters for the planner: reply time, acceptance and calibration."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.counts import DraftingCounts, DraftingTally
from cluster.types import record
from router.estimates.decayed import RECENT, UNUSUAL, USUAL, DecayedMean
from router.estimates.draft_times import DraftTimes
from router.estimates.survival import OnlineSurvival
from router.plan import UNKNOWN_DRAFTER, DrafterView

_TRANSIT_WEIGHT = 0.001  # of a reply that took longer than the quickest
MIN_RECORDS = 64  # verified drafts before calibrated confidences are used


@record
class Judgement:
    """The verdict on a proposal: the first ``num_right`` of ``num_judged`` draft tokens are what was committed. Unverified
    tokens count too: the bonus token tells whether the draft token in its place was right."""

    drafter: str
    confidences: tuple[float, ...]  # of the tokens that were judged
    num_right: int
    unfinished: bool = False  # as of Proposal
    num_overtaken: int = 0  # right draft tokens before these, committed before the proposal came

    @property
    def num_judged(self) -> int:
        return len(self.confidences)

    def failed(self, num_committed: int, draft_len: int, ended: bool) -> bool:
        """Whether the position behind the right tokens counts as reached: the draft was wrong there, or its drafter stopped
        although more was wanted. At the end of a request and behind ``draft_len`` tokens nothing more is wanted."""
        silent = not ended and not self.unfinished and self.num_right < min(num_committed, draft_len)
        return self.num_right < self.num_judged or silent


@dataclass(slots=True)
class DictatedDrafts:
    """Drafts of one drafter for requests with a grammar of one kind. Masks decide many of their tokens, so they say nothing
    of other requests (`cluster.types.Request.teaches`), and others little of them."""

    calibration: OnlineSurvival = field(default_factory=OnlineSurvival)
    _lens: DecayedMean = field(default_factory=DecayedMean)

    @property
    def expected_len(self) -> float:
        """Right tokens of the next proposal; 0 until a few are known."""
        return self._lens.value if self._lens.is_known else 0.0

    def proposed(self, num_right: float) -> None:
        """So many tokens of a proposal should be right, or were, of one that came too late."""
        self._lens.add(num_right)

    def judged(self, judgement: Judgement) -> None:
        """Learns from a verdict, whether the proposal was verified or passed over."""
        self.calibration.record(judgement.confidences, judgement.num_right)


def _mean(memory: float, assumed: float | None = None) -> DecayedMean:
    """What is assumed of a drafter counts for a whole memory."""
    return DecayedMean(memory) if assumed is None else DecayedMean(memory, assumed, memory)


@dataclass(slots=True)
class DrafterStats:
    """Totals and moving averages of one drafter."""

    num_proposed: int = 0
    num_accepted: int = 0
    num_stale: int = 0
    num_late: int = 0  # holds that expired
    num_resyncs: int = 0
    num_unsound: int = 0  # messages with unusable parts
    reply_s: DecayedMean = field(default_factory=partial(_mean, RECENT))
    accepted_per_round: DecayedMean = field(default_factory=partial(_mean, RECENT, UNKNOWN_DRAFTER.accepted_per_round))
    acceptance: DecayedMean = field(default_factory=partial(_mean, USUAL, UNKNOWN_DRAFTER.acceptance))  # of a draft token
    exposure: DecayedMean = field(default_factory=partial(_mean, RECENT, UNKNOWN_DRAFTER.exposure))
    draft_len: DecayedMean = field(default_factory=partial(_mean, RECENT))  # of a proposal that is not empty
    timed_len: DecayedMean = field(default_factory=DecayedMean)  # the same, remembered for as many drafts as ``times``
    transit_s: float | None = None  # of a reply beside its draft: nearly the least, for others wait for drafts before theirs
    latest_draft_s: float | None = None
    times: DraftTimes = field(default_factory=DraftTimes)  # as its process measures them
    calibration: OnlineSurvival = field(default_factory=OnlineSurvival)
    tally: DraftingTally = field(default_factory=DraftingTally)
    num_judged: int = 0
    dictated: dict[str, DictatedDrafts] = field(default_factory=dict)  # by kind of grammar

    def counts(self) -> DraftingCounts:
        """For metrics; from any thread."""
        acceptance = self.acceptance.value if self.num_judged else None
        return self.tally.counts(self.num_stale, self.num_late, self.num_resyncs, acceptance)

    @property
    def view(self) -> DrafterView:
        times = self.times
        known = self.reply_s.value, self.accepted_per_round.value, self.acceptance.value, self.exposure.value
        if not times.num:
            return DrafterView(*known)
        batch = times.batch
        request_s = times.at(batch + 1) - (draft_s := times.at(batch))
        token_s = draft_s / self.timed_len.value if self.timed_len.num else 0.0
        draft_len, transit_s = self.draft_len.value, self.transit_s
        return DrafterView(*known, draft_s, batch, request_s, draft_len, token_s=token_s, transit_s=transit_s)

    def drafted(self, num_requests: int, draft_s: float, lens: Sequence[int]) -> None:
        """A batch of drafts for so many requests took ``draft_s``. ``lens``: of the proposals to this target."""
        self.times.add(num_requests, draft_s)
        self.latest_draft_s = draft_s
        self.tally.batch_s.note(draft_s)
        if lens:
            mean_len = sum(lens) / len(lens)
            self.draft_len.add(mean_len)
            self.timed_len.add(mean_len)

    @property
    def known_calibration(self) -> OnlineSurvival | None:
        """None until MIN_RECORDS drafts are known."""
        return None if self.calibration.num_records < MIN_RECORDS else self.calibration

    def under(self, grammar_kind: str) -> DictatedDrafts:
        """What is known of its drafts under grammars of a kind."""
        found = self.dictated.get(grammar_kind)
        if found is None:
            found = self.dictated[grammar_kind] = DictatedDrafts()
        return found

    def survival_under(self, grammar_kind: str | None, confidences: Sequence[float]) -> tuple[float, ...]:
        """Survival of a draft under such a grammar, or under none; until MIN_RECORDS of them are known as of other requests,
        if those are known, else by its confidences as far as nothing corrects them."""
        usual = self.calibration
        own = usual if grammar_kind is None else self.under(grammar_kind).calibration
        return (usual if own.num_records < MIN_RECORDS <= usual.num_records else own).survival([confidences])[0]

    def expected_len_under(self, grammar_kind: str | None) -> float:
        """Right tokens of the next proposal under such a grammar, or under none; 0 until a few are known."""
        if grammar_kind is not None:
            return self.under(grammar_kind).expected_len
        return self.accepted_per_round.value if self.num_judged >= MIN_RECORDS else 0.0

    def replied(self, reply_s: float) -> None:
        """Adds a reply time: from the commit to the arrival of the proposal, which may lie unread for a pass then. One of a
        machine that was suspended for minutes would end holds for a hundred rounds."""
        self.tally.reply_s.note(reply_s)
        if usual_s := max(self.reply_s.value, self.times.at(self.times.batch)):
            reply_s = min(reply_s, UNUSUAL * usual_s)
        self.reply_s.add(reply_s)
        if self.latest_draft_s is not None:
            transit_s = max(0.0, reply_s - self.latest_draft_s)
            known = transit_s if self.transit_s is None else self.transit_s
            self.transit_s = min(transit_s, known + _TRANSIT_WEIGHT * (transit_s - known))

    def awaited(self, was_awaited: bool) -> None:
        """Whether the target had nothing to compute when a proposal came."""
        self.exposure.add(float(was_awaited))

    def restarted(self) -> None:
        """A new process has the name: its reply time is unknown."""
        self.reply_s = _mean(RECENT)
        self.transit_s = self.latest_draft_s = None

    def late(self, waited_s: float) -> None:
        """No reply came within ``waited_s``, a lower bound of the reply time."""
        self.num_late += 1
        if self.reply_s.value < 2 * waited_s:
            self.reply_s.fade(1.0)
            self.reply_s.add(2 * waited_s)

    def decided(self, num_right: int, num_tokens: int) -> None:
        """Of a proposal that came when all its tokens were known to be right or wrong: it counts although it was late."""
        self.acceptance.add_all(num_right, num_right + (num_right < num_tokens))
        self.accepted_per_round.add(num_right)

    def judged(self, judgement: Judgement, num_verified: int) -> None:
        """Learns from a verdict. Unverified tokens count too, or a drafter that is not worth verifying could never
        recover."""
        num_right, num_judged = judgement.num_right, judgement.num_judged
        self.num_judged += 1
        if num_judged:  # one failure unless all were right
            num_known = judgement.num_overtaken + num_right
            self.acceptance.add_all(num_known, num_known + (num_right < num_judged))
        if num_verified or not num_judged:  # else it is unknown how many would be accepted
            self.accepted_per_round.add(judgement.num_overtaken + min(num_right, num_verified))
        self.calibration.record(judgement.confidences, num_right)
