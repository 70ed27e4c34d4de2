"""The drafter's loop: reads messages, drafts one batch, sends one message per target."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from cluster.errors import LinkClosed, LinkFull
from cluster.messages import DraftTiming, LevelReport, OutcomeReport, ProposalRound
from cluster.transport.base import LinkDown, Mailbox
from cluster.types import MAX_DRAFT_LEN, Proposal
from drafters.counterfactual import score_shadows
from drafters.protocol import Demand, Drafter
from drafters.session import Prepared, Session, TargetPeer
from drafters.sessions import SessionLimits, TargetSessions
from router.assignment import drafter_of

if TYPE_CHECKING:
    from drafters.draft_stops import DraftStops

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 0.1  # of level reports and scores; the router reads them once a slot
MAX_WAIT_S = 0.25  # run() checks its stop event at least this often
LONGEST_SCORING_S = 1.0  # that a step of scoring counts for: a machine that was suspended would score nothing for long


# What the first half of a step did. ``answered`` took no time of the drafter; the proposals of ``drafted`` are not sent yet.
StepWork = Literal["nothing", "answered", "drafted", "drafted ahead", "scored"]


class DrafterLoop:
    """Serves one drafter to any number of targets. No threads, clock or Ray of its own; not thread-safe.

    A step does the first of these that there is to do, so that messages never wait for more than one batch:

    1. Send what needs no draft: drafted tokens that a commit confirmed, resyncs, and empty proposals, for which the target
       need not wait.
    2. Draft one batch for the requests without a proposal.
    3. Draft ahead for requests whose proposal is being verified, on the drafter's own guess and for other likely outcomes
       (`drafters.outcome_drafts`).
    4. Score requests that other drafters drive.

    A simulation on a virtual clock calls the halves of ``step`` itself: ``begin`` and, when the time has passed, ``finish``.

    Args:
        ahead_len: tokens drafted beyond the last proposal while it is verified (PEARL's post-verify), or more where a target
            asks for them.
        spare_share: maximum share of time for scoring requests that others draft for.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        mailbox: Mailbox,
        limits: SessionLimits | None = None,
        *,
        ahead_len: int = 0,
        spare_share: float = 1.0,
    ) -> None:
        self.name = name
        self._drafter = drafter
        self._mailbox = mailbox
        self.sessions = TargetSessions(name, drafter, limits or SessionLimits())
        self._ahead_len = ahead_len
        self._num_drafting = 0  # requests of the batch under way
        self._num_steps = 1  # tokens of its longest draft
        self._reads_prompt = False  # so that its time tells nothing of other batches
        self.take_waited_s: Callable[[], float] = lambda: 0.0  # for hidden states from the target, since the last call
        self._next_report_s = self._next_scores_s = self._next_spare_s = 0.0
        self._spare_share = spare_share
        self._stops: DraftStops | None = None  # for drafters that do not end drafts themselves

    def step(self, now_s: float) -> bool:
        """Drafts at most one batch and sends at most one message per link. Returns whether there was anything to do beside
        reading messages: if so, call again at once. Exceptions of the drafter propagate."""
        work = self.begin(now_s)
        self.finish(work, now_s, now_s)
        return work != "nothing"

    def begin(self, now_s: float) -> StepWork:
        self._read_messages(now_s)
        self.sessions.expire(now_s)
        resyncs = self.sessions.due_resyncs(now_s)
        unanswered = self.sessions.unanswered()
        ready = [one for one in unanswered if self._is_ready(one[1])]
        if ready or resyncs or self.sessions.refusing():
            self._send_proposals(ready, resyncs, now_s)
            return "answered"
        if unanswered:
            self._draft([(session, session.draft_len - len(session.ahead)) for _, session in unanswered])
            return "drafted"
        if ahead := self._drafts_ahead(now_s):
            self._draft(ahead)
            return "drafted ahead"
        return "scored" if self._score(now_s) else "nothing"

    def finish(self, work: StepWork, began_s: float, now_s: float) -> None:
        """The second half of a step that began at ``began_s``: sends proposals and scores."""
        if self.sessions.spans is not None and work in ("drafted", "drafted ahead"):
            self.sessions.spans.drafted(began_s, now_s)
        if self.sessions.outcomes is not None and work in ("drafted", "drafted ahead") and now_s > began_s:
            self.sessions.outcomes.note_step(self._num_drafting, (now_s - began_s) / self._num_steps)
        if work == "drafted":
            self._read_messages(now_s)  # commits that came meanwhile make some drafts stale
            found = [
                (peer, session)
                for peer, session in self.sessions.unanswered()
                if session.ahead or session.exhausted or not session.draft_len
            ]
            waited_s = self.take_waited_s()
            seconds = now_s - began_s - waited_s
            timings = (
                (DraftTiming(self._num_drafting, seconds, waited_s),) if seconds > 0.0 and not self._reads_prompt else ()
            )
            self._send_proposals(found, {}, now_s, timings)
        elif work == "scored":
            self._next_spare_s = now_s + min(now_s - began_s, LONGEST_SCORING_S) * (1.0 / self._spare_share - 1.0)
            if self._next_scores_s <= now_s:
                self._next_scores_s = now_s + REPORT_PERIOD_S
                for peer in [peer for peer in self.sessions.peers.values() if peer.scores]:
                    self._send(peer, (), (), now_s)

    def run(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        """Steps until ``stop`` is set; wake the mailbox then. ``clock`` is monotonic, in seconds."""
        while not stop.is_set():
            start_s = clock()
            work = self.begin(start_s)
            if work != "nothing":
                self.finish(work, start_s, clock())
                continue
            due_s = self.next_due_s()
            wait_s = MAX_WAIT_S if due_s is None else min(MAX_WAIT_S, due_s - clock())
            self._mailbox.wait(max(0.0, wait_s))

    def wake(self) -> None:
        """Ends the wait of ``run``, from any thread."""
        self._mailbox.wake()

    def next_due_s(self) -> float | None:
        """When a step has something to do without a message; None: never."""
        due_s = self.sessions.next_due_s()
        if self.sessions.unscored and self._spare_share:
            return self._next_spare_s if due_s is None else min(due_s, self._next_spare_s)
        return due_s

    def check_integrity(self) -> None:
        self.sessions.check_integrity()
        self._drafter.check_integrity()

    def _read_messages(self, now_s: float) -> None:
        for event in self._mailbox.drain():
            self.sessions.handle(event, now_s)
        while self.sessions.unlinked:  # closing a link posts no LinkDown here, and the dialer needs one to redial
            self._mailbox.put(LinkDown(self.sessions.unlinked.pop(), "it sent too many unsound messages"))

    def _is_ready(self, session: Session) -> bool:
        """Whether a proposal can be sent without drafting. With drafting ahead any tokens will do."""
        return len(session.ahead) >= session.draft_len or (bool(session.ahead) and self._ahead_of(session) > 0)

    def _ahead_of(self, session: Session) -> int:
        return max(self._ahead_len, session.terms.ahead_len)

    def _score(self, now_s: float) -> bool:
        """Scores once, if scoring has had less than its share of time. Returns whether it did."""
        unscored = self.sessions.unscored
        if not unscored or not self._spare_share or now_s < self._next_spare_s:
            return False
        shadows = [shadow for _, shadow in unscored.values()]
        for peer, shadow in unscored.values():
            shadow.row_price = peer.row_price
        for key, score in score_shadows(self._drafter, shadows):
            unscored[key][0].scores.append(score)
        for shadow in shadows:
            if not shadow.pending:
                del unscored[shadow.key]
        return True

    def _drafts_ahead(self, now_s: float) -> list[tuple[Session | Prepared, int]]:
        outcomes, found = self.sessions.outcomes, []
        if outcomes is not None:
            found = outcomes.batch([session for session in self.sessions.drafted() if session.answered], now_s)
        if not found and (self._ahead_len or self.sessions.drafts_ahead):
            found = list(self._own_guesses())
        return found

    def _own_guesses(self) -> Iterator[tuple[Session | Prepared, int]]:
        """Sessions to draft ahead for, with a number of tokens: never beyond the end of the request."""
        for session in self.sessions.drafted():
            if session.answered and not session.exhausted:
                ahead_len = self._ahead_of(session)
                limit = min(session.num_sent + ahead_len, session.end_len - session.committed_len - 1)
                # Messages wait for a batch; a chain verifies it in one pass, so those of configured windows are longer.
                num_tokens = min(max(1, self._ahead_len // 4), limit - len(session.ahead))
                if num_tokens > 0:
                    yield session, num_tokens

    def _draft(self, batch: Sequence[tuple[Session | Prepared, int]]) -> None:
        self._num_drafting = len(batch)
        sessions = [one for one, _ in batch if isinstance(one, Session)]
        self._reads_prompt = any(one.committed_len - one.drafted_len > MAX_DRAFT_LEN + 1 for one in sessions)
        for session in sessions:
            session.drafted_len = session.committed_len
        demands = [one.demand(num_tokens) for one, num_tokens in batch]
        drafts = self._drafter.propose(demands)
        lens = [len(draft.token_ids) for draft in drafts]
        if not self._drafter.capabilities.stops and any(demand.terms.ends_drafts for demand in demands):
            lens = self._cut_lens(demands, [draft.confidences for draft in drafts])
        self._num_steps = max(1, *lens)
        for (one, num_tokens), draft, length in zip(batch, drafts, lens, strict=True):
            one.take(draft, length, num_tokens)
        if self.sessions.spans is not None:
            self.sessions.spans.note_batch([(one.key, length) for (one, _), length in zip(batch, lens, strict=True)])

    def _cut_lens(self, demands: Sequence[Demand], drafted: Sequence[Sequence[float]]) -> list[int]:
        from drafters.draft_stops import DraftStops, cut_lens  # needs numpy; processes of lookups do without otherwise

        self._stops = self._stops or DraftStops()
        return cut_lens(demands, drafted, self._stops)

    def _send_proposals(
        self,
        sessions: Sequence[tuple[TargetPeer, Session]],
        resyncs: Mapping[int, Sequence[str]],
        now_s: float,
        timings: tuple[DraftTiming, ...] = (),
    ) -> None:
        by_peer: dict[int, list[Session]] = {}
        for peer, session in sessions:
            by_peer.setdefault(id(peer.link), []).append(session)
        for number in dict.fromkeys([*by_peer, *resyncs, *self.sessions.refusing()]):
            peer = self.sessions.peers[number]
            proposals = [self._proposal(session, now_s) for session in by_peer.get(number, ())]
            proposals += [Proposal(one, length, (), (), self.name) for one, length in peer.refusals.items()]
            peer.refusals.clear()
            self._send(peer, tuple(proposals), tuple(resyncs.get(number, ())), now_s, timings)

    def _take_reports(self, now_s: float) -> tuple[tuple[LevelReport, ...], tuple[OutcomeReport, ...]]:
        """Of its chains and its outcomes, every REPORT_PERIOD_S and to one target: who reads them reads all targets."""
        chain, outcomes = self._drafter.capabilities.chain, self.sessions.outcomes
        if now_s < self._next_report_s:
            return (), ()
        self._next_report_s = now_s + REPORT_PERIOD_S
        levels = () if chain is None else tuple(chain.take_levels(drafter_of(self.name)))
        return levels, () if outcomes is None else outcomes.take_report()

    def _proposal(self, session: Session, now_s: float) -> Proposal:
        self.sessions.mark_answered(session, now_s)
        session.num_sent = min(session.draft_len, len(session.ahead))
        return Proposal(
            request_id=session.request_id,
            base_len=session.committed_len,
            token_ids=tuple(session.ahead[: session.num_sent]),
            confidences=tuple(session.confidences[: session.num_sent]),
            drafter=self.name,
            unfinished=not session.exhausted or session.num_sent < len(session.ahead),
        )

    def _send(
        self,
        peer: TargetPeer,
        proposals: tuple[Proposal, ...],
        resyncs: tuple[str, ...],
        now_s: float,
        timings: tuple[DraftTiming, ...] = (),
    ) -> None:
        """One message, with the peer's scores; none if it would be empty."""
        scores, peer.scores = tuple(peer.scores), []
        if not (proposals or resyncs or scores):
            return
        levels, outcomes = self._take_reports(now_s)
        message = ProposalRound(peer.table_version, proposals, scores, resyncs, levels, timings, outcomes)
        try:
            peer.link.send(message)
        except LinkFull:
            # As if the message was lost: the target decodes those requests plainly, and resyncs are requested again.
            logger.warning("drafter %s: %s reads too slowly, dropped a message to it", self.name, peer.link.peer.name)
        except LinkClosed:
            self.sessions.drop_link(peer.link)
