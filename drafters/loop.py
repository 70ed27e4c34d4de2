"""The drafter's loop: drains mail, drafts one batch, sends one message per target."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cluster.errors import LinkClosed, LinkFull
from cluster.messages import LevelReport, ProposalRound
from cluster.transport.base import LinkDown, Mailbox
from cluster.types import Proposal
from drafters.counterfactual import Scorer
from drafters.protocol import Demand, Drafter
from drafters.session import Session
from drafters.sessions import SessionLimits, TargetPeer, TargetSessions
from router.assignment import drafter_of

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 0.1  # of what models in chains did: the router looks once a slot
MAX_WAIT_S = 0.25  # run() looks at its stop event at least this often


class Begun(Enum):
    """What the first half of a step did."""

    NOTHING = auto()
    ANSWERED = auto()  # or read mail; it took no time of the drafter
    DRAFTED = auto()  # ``finish`` sends the proposals
    DRAFTED_AHEAD = auto()
    SCORED = auto()


@dataclass(frozen=True, slots=True)
class LoopTelemetry:
    """Counters of a loop since its start, over all links."""

    num_links: int
    num_requests: int  # followed now
    num_refused: int  # not followed now for want of room
    num_batches: int
    num_proposals: int
    num_tokens: int  # proposed
    num_resyncs: int  # asked for
    mean_batch: float | None  # requests per batch of drafts; None before the first
    mean_draft_s: float | None  # of a batch, as run() timed it; None when driven by hand


class DrafterLoop:
    """Serves one drafter to any number of targets. No threads, clock or Ray of its own; not thread-safe.

    A step answers what can be answered at once (drafts that a commit has confirmed, requests that want no draft or are
    refused, resyncs); else it drafts one batch for the requests that have no proposal yet; else, if ``ahead_len`` is not 0,
    it drafts a little further for those that await a verdict. So mail never waits for more than one batch. An empty
    proposal is sent too: the target then need not wait for one.

    A simulation on a virtual clock calls the halves of ``step`` itself: ``begin``, and ``finish`` when the drafter has taken
    its time.

    Args:
        ahead_len: tokens drafted beyond the last proposal while its verdict is awaited (PEARL's post-verify). Worthwhile
            where drafting takes time; 0 for lookups.
        spare_share: the most of its time that goes into keeping in step with requests that others draft for, and scoring
            what it would have drafted; of a loop driven by hand, whatever nothing else needs.
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
        self._roster = TargetSessions(name, drafter, limits or SessionLimits())
        self._ahead_len = ahead_len
        self._ahead_chunk = max(1, ahead_len // 4)  # per batch: mail waits for it, and a chain verifies it in one pass
        self._num_batches = self._num_drafted = self._num_proposals = self._num_tokens = self._num_resyncs = 0
        self._num_timed = 0
        self._next_report_s = self._next_scores_s = self._next_spare_s = 0.0
        self._spare_share = spare_share
        self._scorer = Scorer(drafter)
        self._timed_s = 0.0

    def step(self, now_s: float) -> bool:
        """Returns whether there was anything to do: if so, call again at once.

        Drafts at most one batch and sends at most one message per link. What the drafter raises is not caught: its owner
        restarts it, and the targets decode plainly meanwhile.
        """
        begun = self.begin(now_s)
        self.finish(begun, now_s, now_s)
        return begun is not Begun.NOTHING

    def begin(self, now_s: float) -> Begun:
        """The first half of a step: everything but what follows from a draft or a score when it is there."""
        heard = self._hear(now_s)
        self._roster.expire(now_s)
        resyncs = self._roster.due_resyncs(now_s)
        unanswered = self._unanswered()
        ready = [followed for followed in unanswered if self._is_ready(followed)]
        if ready or resyncs or self._roster.owes_refusals:
            self._answer(ready, resyncs, now_s)
            return Begun.ANSWERED
        if unanswered:
            self._draft((followed, followed.wanted - len(followed.ahead)) for followed in unanswered)
            return Begun.DRAFTED
        if self._draft(self._further()):
            return Begun.DRAFTED_AHEAD
        if heard:
            return Begun.ANSWERED
        return Begun.SCORED if self._score(now_s) else Begun.NOTHING

    def finish(self, begun: Begun, began_s: float, now_s: float) -> None:
        """The second half of a step that began at ``began_s``: sends proposals and scores."""
        if begun is Begun.DRAFTED:
            self._hear(now_s)  # what was committed meanwhile makes some of it stale: only the rest is worth sending
            self._answer([f for f in self._unanswered() if f.ahead or f.exhausted or not f.wanted], {}, now_s)
        elif begun is Begun.SCORED:
            self._next_spare_s = now_s + (now_s - began_s) * (1.0 / self._spare_share - 1.0)
            if self._next_scores_s <= now_s:
                self._next_scores_s = now_s + REPORT_PERIOD_S
                self._answer([], {}, now_s)

    def run(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        """Step until ``stop`` is set (then wake the mailbox, to be heard at once). ``clock`` is monotonic, in seconds."""
        while not stop.is_set():
            start_s = clock()
            begun = self.begin(start_s)
            if begun is Begun.NOTHING:
                due_s = self.next_due_s()
                wait_s = MAX_WAIT_S if due_s is None else min(MAX_WAIT_S, due_s - clock())
                self._mailbox.wait(max(0.0, wait_s))
                continue
            end_s = clock()
            if begun in (Begun.DRAFTED, Begun.DRAFTED_AHEAD):
                self._num_timed += 1
                self._timed_s += end_s - start_s
            self.finish(begun, start_s, end_s)

    def telemetry(self) -> LoopTelemetry:
        return LoopTelemetry(
            num_links=len(self._roster.peers),
            num_requests=self._roster.num_followed,
            num_refused=self._roster.num_refused,
            num_batches=self._num_batches,
            num_proposals=self._num_proposals,
            num_tokens=self._num_tokens,
            num_resyncs=self._num_resyncs,
            mean_batch=self._num_drafted / self._num_batches if self._num_batches else None,
            mean_draft_s=self._timed_s / self._num_timed if self._num_timed else None,
        )

    def next_due_s(self) -> float | None:
        """When a step has something to do though no mail comes; None: never."""
        due_s = self._roster.next_due_s()
        if any(shadow.pending for _, shadow in self._roster.shadows()):
            return self._next_spare_s if due_s is None else min(due_s, self._next_spare_s)
        return due_s

    def check_integrity(self) -> None:
        """Raises AssertionError when the loop's state, or the drafter's, disagrees with itself."""
        self._roster.check_integrity()
        self._drafter.check_integrity()

    def _hear(self, now_s: float) -> bool:
        events = self._mailbox.drain()
        for event in events:
            self._roster.take(event, now_s)
        while self._roster.unlinked:  # closing a link posts no LinkDown here, and the dialler needs one to redial
            self._mailbox.put(LinkDown(self._roster.unlinked.pop(), "it sent too many unsound messages"))
        return bool(events)

    def _unanswered(self) -> list[Session]:
        return [followed for followed in self._roster.live() if not followed.answered]

    def _is_ready(self, followed: Session) -> bool:
        """To be answered with what is at hand. Who drafts ahead sends the rest of it at once, be it short: the target works
        on it while the next tokens are drafted."""
        return len(followed.ahead) >= followed.wanted or (self._ahead_len > 0 and bool(followed.ahead))

    def _score(self, now_s: float) -> bool:
        """Spare time: a small piece of keeping in step with requests that others draft for, when none was done for long
        enough that it stays a share of the time. Mail and drafts come first, and wait for one such piece at the most."""
        if now_s < self._next_spare_s:
            return False
        peers = {shadow.key: peer for peer, shadow in self._roster.shadows()}
        scored = self._scorer.work(shadow for _, shadow in self._roster.shadows())
        if scored is None:
            return False
        for key, score in scored:
            peers[key].scores.append(score)
        return True

    def _further(self) -> Iterator[tuple[Session, int]]:
        """Drafting ahead: beyond what was proposed, never beyond the end of the request."""
        if not self._ahead_len:
            return
        for followed in self._roster.live():
            if followed.answered and not followed.exhausted:
                limit = min(followed.num_sent + self._ahead_len, followed.end_len - followed.committed_len - 1)
                num_tokens = min(self._ahead_chunk, limit - len(followed.ahead))
                if num_tokens > 0:
                    yield followed, num_tokens

    def _draft(self, wanted: Iterable[tuple[Session, int]]) -> bool:
        """One batch. Returns whether there was anything to draft."""
        batch = list(wanted)
        if not batch:
            return False
        demands = [
            Demand(followed.key, num_tokens, tuple(followed.ahead), followed.row_price) for followed, num_tokens in batch
        ]
        for (followed, num_tokens), draft in zip(batch, self._drafter.propose(demands), strict=True):
            followed.ahead.extend(draft.token_ids)
            followed.confidences.extend(draft.confidences)
            followed.exhausted = len(draft.token_ids) < num_tokens
        self._num_batches += 1
        self._num_drafted += len(batch)
        return True

    def _answer(self, answered: Sequence[Session], resyncs: Mapping[int, Sequence[str]], now_s: float) -> None:
        """One message to each peer that is owed one."""
        keys = {followed.key for followed in answered}
        for number, peer in list(self._roster.peers.items()):
            proposals = tuple(self._proposal(followed) for followed in peer.followed.values() if followed.key in keys)
            proposals += tuple(Proposal(request_id, n, (), (), self.name) for request_id, n in peer.take_owed().items())
            asked = tuple(resyncs.get(number, ()))
            scores = peer.take_scores()
            if proposals or asked or scores:
                self._num_proposals += len(proposals)
                self._num_tokens += sum(len(proposal.token_ids) for proposal in proposals)
                self._num_resyncs += len(asked)
                self._send(peer, ProposalRound(peer.table_version, proposals, scores, asked, self._take_levels(now_s)))

    def _take_levels(self, now_s: float) -> tuple[LevelReport, ...]:
        """What the models of this drafter's chains did, once in a while and to one of the targets: the router asks all."""
        chain = self._drafter.capabilities.chain
        if chain is None or now_s < self._next_report_s:
            return ()
        self._next_report_s = now_s + REPORT_PERIOD_S
        return tuple(chain.take_levels(drafter_of(self.name)))

    def _proposal(self, followed: Session) -> Proposal:
        followed.answered = True
        followed.num_sent = min(followed.wanted, len(followed.ahead))
        return Proposal(
            request_id=followed.request_id,
            base_len=followed.committed_len,
            token_ids=tuple(followed.ahead[: followed.num_sent]),
            confidences=tuple(followed.confidences[: followed.num_sent]),
            drafter=self.name,
            unfinished=not followed.exhausted or followed.num_sent < len(followed.ahead),
        )

    def _send(self, peer: TargetPeer, message: ProposalRound) -> None:
        try:
            peer.link.send(message)
        except LinkFull:
            # As if lost on the way: the target decodes those requests plainly, and resyncs are asked for again.
            logger.warning("drafter %s: %s reads too slowly, dropped a message to it", self.name, peer.link.peer.name)
        except LinkClosed:
            self._roster.drop_link(peer.link)
