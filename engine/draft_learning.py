"""What a target learns of its drafters: from their messages, and from the verdicts on their proposals."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from cluster.messages import DraftScore, ProposalRound
from cluster.types import FREE_DRAFTERS, Commit, Proposal
from engine.colocated import ColocatedDrafters
from engine.deferred_work import Later, observed, observed_later
from engine.draft_state import Candidate, DraftState
from engine.feature_feed import FeatureFeed
from engine.sequences import LiveSequence
from engine.telemetry import Telemetry
from router.estimates.drafter_stats import DrafterStats, Judgement
from router.estimates.survival import FEW, SurvivalRows, survivals
from router.plan import DrafterView

Offer = tuple[LiveSequence, Proposal, bool]  # a proposal for a request, and whether it was taken


class DraftLearning:
    """The round owns it. Its methods raise nothing: where one fails, what it would answer is not known. ``later``: for what
    changes no estimate that the present round needs, in the order of the calls."""

    def __init__(self, telemetry: Telemetry, colocated: ColocatedDrafters, later: Later) -> None:
        self.later, self.observing = later, telemetry.observing
        self._telemetry = telemetry
        self._colocated = colocated
        self._unpredicted: defaultdict[str, list[tuple[DraftState, Proposal]]] = defaultdict(list)  # by drafter

    def views(self, names: Iterable[str]) -> dict[str, DrafterView]:
        """What the planner knows of these drafters."""
        views = {}
        with self.observing:
            for name in names:
                view = self._telemetry.drafter(name).view
                views[name] = replace(view, shares_device=True) if self._colocated.shares_device(name) else view
        return views

    @observed
    def restarted(self, drafter: str) -> None:
        self._telemetry.drafter(drafter).restarted()

    @observed_later
    def forget(self, request_id: str) -> None:
        """The request ended, was preempted, or another drafter follows it."""
        self._telemetry.forget(request_id)

    @observed
    def held(self, drafter: str, held_s: float, waited_s: float | None) -> None:
        """A request was held for its proposal. ``waited_s``: without success, since its commit."""
        stats = self._telemetry.drafter(drafter)
        stats.tally.hold_s.note(held_s)
        if waited_s is not None:
            stats.late(waited_s)

    @observed
    def unsound(self, drafter: str, num: int) -> None:
        """So many unsound parts of messages."""
        self._telemetry.drafter(drafter).num_unsound += num

    @observed
    def fed(self, drafter: str, feed: FeatureFeed) -> None:
        """What its feed has sent since the last call."""
        tally = self._telemetry.drafter(drafter).tally
        tally.num_fed, tally.fed_bytes = tally.num_fed + feed.num_sent, tally.fed_bytes + feed.num_bytes
        feed.num_sent = feed.num_bytes = 0

    @observed
    def predict_taken(self, drafter: str, offers: Sequence[Offer]) -> None:
        """Of the proposals that were taken: their survival, at once or by `predict_survival`."""
        unpredicted = self._unpredicted[drafter]
        for sequence, _, is_taken in offers:
            draft, proposal = sequence.draft, sequence.draft.proposal
            if not is_taken or proposal is None or proposal.drafter != drafter:
                continue  # the message had two of one request
            kind = draft.grammar_kind
            if kind is None and not draft.passed_over:
                unpredicted.append((draft, proposal))
                continue
            stats = self._telemetry.drafter(drafter)
            survival = stats.survival_under(kind, proposal.confidences)
            if kind is not None:
                stats.under(kind).proposed(sum(survival))
            draft.set_survival(survival)

    @observed_later
    def received(
        self, drafter: str, message: ProposalRound, offers: Sequence[Offer], arrived_s: float, after_pass: bool
    ) -> None:
        """A message of which all parts are possible, and its proposals. ``after_pass``: it may have waited for the end of a
        pass."""
        stats = self._telemetry.drafter(drafter)
        lens = [num for one in message.proposals if (num := len(one.token_ids))]
        for timing in message.timings:
            stats.drafted(timing.num_requests, timing.seconds, lens)
            if timing.waited_s:
                stats.tally.link_s.note(timing.waited_s)
        was_awaited = not after_pass or self._colocated.shares_device(drafter)
        for sequence, proposal, is_taken in offers:
            # A stale reply tells how long drafting takes, too. An empty one does not: a full drafter sends it at once.
            if proposal.token_ids:
                _note_reply(sequence, proposal, stats, arrived_s, was_awaited)
            if is_taken:
                stats.tally.note_drafted(len(proposal.token_ids))
            else:
                stats.num_stale += 1
        if message.levels:
            self._telemetry.note_levels(message.levels)
        for report in message.outcomes:
            stats.tally.outcomes = stats.tally.outcomes.plus(report)
        if message.scores:
            self._telemetry.note_scores(drafter, message.scores)
        stats.num_resyncs += len(message.resyncs)

    def predict_survival(self) -> None:
        """Of the proposals taken since the last call, until MIN_RECORDS drafts are known of a drafter none."""
        if not self._unpredicted:
            return
        unpredicted, self._unpredicted = self._unpredicted, defaultdict(list)
        with self.observing:
            known = [(c, of) for name, of in unpredicted.items() if (c := self._telemetry.drafter(name).known_calibration)]
            num = sum([len(of) for _, of in known])
            rows = None
            if num > FEW:
                rows = SurvivalRows(survivals([(c, [one.confidences for _, one in of]) for c, of in known]))
            row = 0
            for calibration, of in known:
                for draft, proposal in of:
                    if draft.proposal is not proposal:
                        pass  # a later message has replaced it
                    elif rows is None:
                        draft.set_survival(calibration.of_few(proposal.confidences))
                    else:
                        draft.set_survival_row(rows, row)
                    row += 1

    def candidates(self, draft: DraftState, drafts: Iterable[Proposal]) -> tuple[list[Candidate], float]:
        """Free drafts with their survival, and the tokens that are expected of the drafter's own; 0: not known."""
        kind, drafter = draft.grammar_kind, self._telemetry.drafter
        with self.observing:
            found = [(one, drafter(one.drafter).survival_under(kind, one.confidences)) for one in drafts]
            return found, 0.0 if draft.drafter is None else drafter(draft.drafter).expected_len_under(kind)
        return [], 0.0

    def learn(
        self, commits: Sequence[tuple[LiveSequence, Commit]], linked: Collection[str], has_scorers: bool, now_s: float
    ) -> dict[str, Judgement]:
        """Whose drafts were right, and who had none, of the commits of a pass that ended at ``now_s``. ``linked``: drafters.
        Returns the verdicts on the proposals of those that teach, by request."""
        judgements: dict[str, Judgement] = {}
        with self.observing:
            for sequence, commit in commits:
                draft = sequence.draft
                if commit.error is not None:  # a failed pass says nothing
                    continue
                if (kind := draft.grammar_kind) is not None:
                    for verdict in (draft.judgement, *draft.passed_judgements):
                        if verdict is not None:
                            self._telemetry.drafter(verdict.drafter).under(kind).judged(verdict)
                if sequence.teaches:
                    self._learn_of(draft, commit, linked, has_scorers, now_s, judgements)
                if commit.finish is not None:
                    self._telemetry.forget(commit.request_id)
        return judgements

    def _learn_of(
        self,
        draft: DraftState,
        commit: Commit,
        linked: Collection[str],
        has_scorers: bool,
        now_s: float,
        judgements: dict[str, Judgement],
    ) -> None:
        judgement, telemetry = draft.judgement, self._telemetry
        drafter, terms, expects_draft = draft.asked
        if drafter not in linked:
            drafter = None
        for one in draft.passed_judgements:
            telemetry.drafter(one.drafter).judged(one, 0)
        if judgement is not None and judgement.drafter in FREE_DRAFTERS:
            telemetry.drafter(judgement.drafter).judged(judgement, 0)
            telemetry.forget(commit.request_id)
            for other in draft.passed_judgements if has_scorers else ():
                if other.drafter == drafter:
                    score = DraftScore(commit.request_id, commit.base_len, other.num_right, other.num_judged)
                    telemetry.note_scores(drafter, (score,))
            return
        if judgement is not None:
            judgements[commit.request_id] = judgement
            telemetry.drafter(judgement.drafter).judged(judgement, commit.num_proposed)
        if drafter is not None and (judgement is not None or terms.num_tokens):
            telemetry.count_round(commit, drafter, judgement, terms.num_tokens, expects_draft, now_s)
        elif drafter is not None:
            telemetry.forget(commit.request_id)  # the round says nothing of the drafter


def _note_reply(
    sequence: LiveSequence, proposal: Proposal, stats: DrafterStats, arrived_s: float, was_awaited: bool
) -> None:
    draft = sequence.draft
    sent_s = draft.sent_s(proposal.base_len)
    if sent_s is not None:
        stats.replied(max(0.0, arrived_s - sent_s))
        stats.awaited(was_awaited)
    num_right, kind = draft.num_right_of(proposal), draft.grammar_kind
    if num_right is None:
        return
    if kind is not None:
        stats.under(kind).proposed(num_right)
    elif sequence.teaches:
        stats.decided(num_right, len(proposal.token_ids))
