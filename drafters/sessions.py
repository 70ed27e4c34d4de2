"""The sessions of a drafter by target: handling of messages, lost messages and limits."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.config import DEFAULT_CAPACITY, DEFAULT_DRAFT_LEN
from cluster.message_checks import Inspection
from cluster.messages import Budget, DraftRound, Extend, Open
from cluster.transport.base import Event, Link, LinkDown, LinkUp
from cluster.types import DraftTerms
from drafters.counterfactual import Shadow
from drafters.protocol import Drafter
from drafters.session import ExtendOutcome, Resyncs, Session, TargetPeer, key_of, reconcile

if TYPE_CHECKING:
    from drafters.draft_spans import DraftSpans
    from drafters.outcome_drafts import OutcomeDrafts

logger = logging.getLogger(__name__)

_EXPIRY_CHECK_S = 1.0
MAX_UNSCORED = 256  # tokens of a request that a busy drafter may leave unscored; beyond, they are skipped
MAX_IGNORED = 4096


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits. Counts are of requests, over all links."""

    capacity: int = DEFAULT_CAPACITY
    max_draft_len: int = DEFAULT_DRAFT_LEN  # of a proposal; a Budget may ask for less
    max_shadows: int = 4 * DEFAULT_CAPACITY  # requests that others draft for and that are kept in step; 0: none
    resync_s: float = 0.25  # until an unanswered resync is repeated; doubles with each attempt
    max_resyncs: int = 6
    idle_s: float = 60.0  # until a silent request is dropped, as its release may be lost; its next Extend reopens it
    max_outcomes: int = 0  # of a verification that are prepared for a request, beside the drafter's own guess


class TargetSessions:
    """The sessions of all links. Passes every change on to the drafter. Time comes in as data."""

    def __init__(self, name: str, drafter: Drafter, limits: SessionLimits) -> None:
        self.peers: dict[int, TargetPeer] = {}  # by id(link): links are compared by identity
        self.unlinked: list[Link] = []  # closed after MAX_UNSOUND unsound messages
        self.unscored: dict[str, tuple[TargetPeer, Shadow]] = {}  # shadows with unscored tokens, by key
        self._unanswered: dict[str, tuple[TargetPeer, Session]] = {}  # without a proposal for their committed length
        self._pending: dict[int, TargetPeer] = {}  # peers with ``has_pending``, by key of ``peers``
        self._num_sessions = 0
        self.num_shadows = 0
        self.linked: Callable[[Link, int], None] | None = None  # told of each new link, with its number
        self.drafts_ahead = False  # a target has asked for it, so far
        self.spans: DraftSpans | None = None  # of traced requests; None: nothing is traced
        self.outcomes: OutcomeDrafts | None = None  # of drafters that fork
        if limits.max_outcomes and drafter.capabilities.forks is not None:
            from drafters import outcome_drafts  # needs numpy; processes of lookups do without

            self.outcomes = outcome_drafts.OutcomeDrafts(drafter, drafter.capabilities.forks, limits.max_outcomes)
        self._name = name
        self._drafter = drafter
        self._limits = limits
        self._inspection = Inspection(f"drafter {name}")
        self._num_links = 0  # so far
        self._refusal_logged = self._missing_proposers_logged = False
        self._next_expiry_s: float | None = None

    @property
    def num_drafted(self) -> int:
        return self._num_sessions - self.num_shadows

    def refusing(self) -> list[int]:
        """The peers that refusals are to be sent to."""
        return [key for key, peer in self._pending.items() if peer.refusals]

    def unanswered(self) -> list[tuple[TargetPeer, Session]]:
        """Sessions that want drafts, have no proposal, and whose committed tokens are known to the end."""
        return [
            (peer, session)
            for peer, session in self._unanswered.values()
            if session.terms.num_tokens and session.request_id not in peer.resyncs
        ]

    def mark_answered(self, session: Session, now_s: float) -> None:
        session.answered, session.answered_s = True, now_s
        self._unanswered.pop(session.key, None)

    def drafted(self) -> Iterator[Session]:
        """Sessions that want drafts, and whose committed tokens are known to the end."""
        for peer in self.peers.values():
            for request_id, session in peer.sessions.items():
                if session.terms.num_tokens and request_id not in peer.resyncs:
                    yield session

    def handle(self, event: Event, now_s: float) -> None:
        if isinstance(event, LinkUp):
            resyncs = Resyncs(self._limits.resync_s, self._limits.max_resyncs, 4 * self._limits.capacity)
            self.peers[id(event.link)] = TargetPeer(event.link, self._num_links, resyncs)
            if self.linked is not None:
                self.linked(event.link, self._num_links)
            self._num_links += 1
        elif isinstance(event, LinkDown):
            self.drop_link(event.link)
        elif (peer := self.peers.get(id(event.link))) is not None:  # else it was queued behind the end of its link
            message = self._inspection.sound_part(event.link, event.message, event.link.peer.vocab_size)
            if isinstance(message, DraftRound):
                self._receive(peer, message, now_s)
            else:
                self._inspection.note(event.link, [f"a {type(message).__name__}, which a drafter does not take"])
            if self._inspection.must_go(event.link):
                self.unlinked.append(event.link)
                self.drop_link(event.link)

    def drop_link(self, link: Link) -> None:
        """Forgets a target and its requests. Idempotent."""
        self._inspection.forget(link)
        peer = self.peers.pop(id(link), None)
        self._pending.pop(id(link), None)
        if peer is not None:
            for request_id in list(peer.sessions):
                self._close(peer, request_id)
            link.close()

    def expire(self, now_s: float) -> None:
        """Drops idle requests; asks for refused ones, oldest first, when there is capacity."""
        if self._next_expiry_s is None or now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + min(_EXPIRY_CHECK_S, self._limits.idle_s)
            limit_s = now_s - self._limits.idle_s
            for peer in self.peers.values():
                for request_id in [r for r, session in peer.sessions.items() if session.last_message_s < limit_s]:
                    self._release(peer, request_id)
                for request_id in [r for r, last_message_s in peer.refused.items() if last_message_s < limit_s]:
                    del peer.refused[request_id]
        if self._pending:
            self._readmit(now_s)

    def due_resyncs(self, now_s: float) -> dict[int, list[str]]:
        """Resyncs to request now, by peer. Closes the sessions of requests that are given up."""
        due = {}
        for key, peer in list(self._pending.items()):
            requested, given_up = peer.resyncs.take_due(now_s)
            for request_id in given_up:
                self._close(peer, request_id)
            if requested:
                due[key] = requested
            if not peer.has_pending:
                del self._pending[key]
        return due

    def next_due_s(self) -> float | None:
        due = [due_s for peer in self._pending.values() if (due_s := peer.resyncs.next_due_s()) is not None]
        return min(due, default=None)

    def check_integrity(self) -> None:
        assert self.num_drafted <= self._limits.capacity, "more requests are followed than the capacity"
        sessions = [session for peer in self.peers.values() for session in peer.sessions.values()]
        assert self._num_sessions == len(sessions), "sessions were miscounted"
        assert self.num_shadows == sum(session.shadow is not None for session in sessions), "shadows were miscounted"
        unanswered = {session.key for session in sessions if session.shadow is None and not session.answered}
        assert self._unanswered.keys() == unanswered, "the sessions without a proposal are not those listed"
        unscored = {session.key for session in sessions if session.shadow is not None and session.shadow.pending}
        assert self.unscored.keys() == unscored, "the shadows with unscored tokens are not those listed"
        for key, peer in self.peers.items():
            assert not peer.has_pending or key in self._pending, "a peer with something pending is not listed"
        for peer in self.peers.values():
            assert not peer.refused.keys() & peer.sessions.keys(), "a request is both followed and refused"
            assert not peer.refusals.keys() & peer.sessions.keys(), "a followed request is to be answered as a refused one"
            for request_id, session in peer.sessions.items():
                assert session.request_id == request_id, "a request is filed under another's name"
                assert len(session.ahead) == len(session.confidences), "a draft token without its confidence"
                assert session.num_sent <= len(session.ahead), "more was proposed than drafted"
                num_ranked = len(session.runners_up)
                assert not session.num_runners_up or num_ranked == len(session.ahead), "a draft token without its runners-up"
                assert session.answered or not session.num_sent, "a proposal was sent, but not recorded"
                assert session.answered or not session.prepared, "outcomes are prepared, and nothing is verified"
                assert len(session.prepared) <= self._limits.max_outcomes, "more outcomes are prepared than may be"

    def _receive(self, peer: TargetPeer, message: DraftRound, now_s: float) -> None:
        peer.table_version = max(peer.table_version, message.table_version)
        budgets = {budget.request_id: budget.terms.num_tokens for budget in message.budgets}
        opened = {opening.request_id for opening in message.opens}
        # Releases come first, since opened requests may need their capacity; except of a request opened in the same round.
        ended = [request_id for request_id in message.releases if opened and request_id not in opened]
        for request_id in ended:
            self._release(peer, request_id)
        for opening in message.opens:
            is_shadow = budgets.get(opening.request_id) == 0 and opening.request_id not in peer.sessions
            (self._open_shadow if is_shadow else self._open)(peer, opening, now_s)
        for extension in message.extends:
            self._extend(peer, extension, now_s)
        for budget in message.budgets:
            self._set_budget(peer, budget, now_s)
        for request_id in message.releases:
            if request_id not in ended:
                self._release(peer, request_id)
        if peer.has_pending:
            self._pending[id(peer.link)] = peer

    def _open(self, peer: TargetPeer, opening: Open, now_s: float) -> None:
        request_id = opening.request_id
        session = peer.sessions.get(request_id)
        if session is not None:
            outcome, new = reconcile(session.token_ids, 0, opening.token_ids)
            if outcome is not ExtendOutcome.CONFLICT and len(opening.token_ids) <= session.end_len:
                self._commit(peer, session, new, now_s)
                self._set_proposers(session.key, opening)
                return
            self._close(peer, request_id)  # its id is used for a new request
        if self.num_drafted >= self._limits.capacity:
            self._refuse(peer, request_id, len(opening.token_ids), now_s)
            return
        self._new_session(peer, opening, now_s)

    def _open_shadow(self, peer: TargetPeer, opening: Open, now_s: float) -> None:
        peer.resyncs.drop(opening.request_id)
        if self.num_shadows >= self._limits.max_shadows:
            self._ignore(peer, opening.request_id)
        else:
            self._make_shadow(self._new_session(peer, opening, now_s))

    @staticmethod
    def _ignore(peer: TargetPeer, request_id: str) -> None:
        peer.forget(request_id)
        peer.ignored[request_id] = None
        if len(peer.ignored) > MAX_IGNORED:
            del peer.ignored[next(iter(peer.ignored))]

    def _new_session(self, peer: TargetPeer, opening: Open, now_s: float) -> Session:
        request_id = opening.request_id
        peer.forget(request_id)
        session = Session(
            key=key_of(peer.number, request_id),
            request_id=request_id,
            token_ids=list(opening.token_ids),
            end_len=opening.prompt_len + opening.sampling.max_tokens,
            terms=DraftTerms(self._limits.max_draft_len),
            last_message_s=now_s,
            num_runners_up=0 if self.outcomes is None else self.outcomes.num_runners_up,
        )
        self._drafter.open(session.key, opening.token_ids, opening.prompt_len, opening.sampling, opening.cache_salt)
        if self.spans is not None:
            self.spans.opened(session.key, opening)
        self._set_proposers(session.key, opening)
        peer.sessions[request_id] = session
        self._num_sessions += 1
        self._unanswered[session.key] = (peer, session)
        peer.resyncs.update(request_id, session.committed_len)
        return session

    def _set_proposers(self, key: str, opening: Open) -> None:
        """Sets the proposers of a request's chain. Without them the drafter drafts alone."""
        chain = self._drafter.capabilities.chain
        found = chain is not None and chain.set_proposers(key, opening.proposers)
        if opening.proposers and not found and not self._missing_proposers_logged:
            self._missing_proposers_logged = True
            logger.warning("drafter %s drafts alone: it has no proposers %s", self._name, ", ".join(opening.proposers))

    def _extend(self, peer: TargetPeer, extension: Extend, now_s: float) -> None:
        request_id = extension.request_id
        end_len = extension.base_len + len(extension.token_ids)
        if request_id in peer.refused:
            self._refuse(peer, request_id, end_len, now_s)
            return
        if request_id in peer.ignored:
            return
        session = peer.sessions.get(request_id)
        if session is None:
            peer.resyncs.request(request_id, end_len, now_s)
            return
        if end_len > session.end_len:
            fault = f"an extension of {request_id} to {end_len} tokens, at most {session.end_len} were announced"
            self._inspection.note(peer.link, [fault])
            return
        outcome, new = reconcile(session.token_ids, extension.base_len, extension.token_ids)
        if outcome is ExtendOutcome.APPLIED:
            self._commit(peer, session, new, now_s)
            return
        if outcome is ExtendOutcome.CONFLICT:
            self._close(peer, request_id)
        peer.resyncs.request(request_id, end_len, now_s)

    def _commit(self, peer: TargetPeer, session: Session, token_ids: Sequence[int], now_s: float) -> None:
        session.last_message_s = now_s
        if token_ids:
            if session.shadow is None:
                self._drafter.extend(session.key, token_ids)
            else:
                session.shadow.commit(token_ids)
                self.unscored[session.key] = (peer, session.shadow)
                if len(session.shadow.pending) > MAX_UNSCORED:
                    self._skip(session, session.shadow)
            if self.outcomes is None:
                session.commit(token_ids)
            else:
                self.outcomes.commit(session, token_ids, now_s)
            if session.shadow is None:
                self._unanswered[session.key] = (peer, session)
        peer.resyncs.update(session.request_id, session.committed_len)

    def _set_budget(self, peer: TargetPeer, budget: Budget, now_s: float) -> None:
        """A budget of 0 makes a session a shadow."""
        request_id = budget.request_id
        if budget.terms.num_tokens:
            peer.row_price = budget.terms.row_price
        session = peer.sessions.get(request_id)
        num_tokens = min(budget.terms.num_tokens, self._limits.max_draft_len)
        if session is None:
            if num_tokens and request_id in peer.ignored:
                del peer.ignored[request_id]
                peer.resyncs.request(request_id, 0, now_s)
            return
        if num_tokens and session.shadow is not None:
            if self.num_drafted >= self._limits.capacity:
                self._close(peer, request_id)
                self._refuse(peer, request_id, session.committed_len, now_s)
                return
            self._skip(session, session.shadow)
            session.shadow = None
            self.num_shadows -= 1
            self._unanswered[session.key] = (peer, session)
        elif not num_tokens and session.shadow is None:
            if self.num_shadows >= self._limits.max_shadows:
                self._close(peer, request_id)
                self._ignore(peer, request_id)
                return
            self._make_shadow(session)
        terms = budget.terms
        session.terms = terms if num_tokens == terms.num_tokens else replace(terms, num_tokens=num_tokens)
        self.drafts_ahead |= terms.ahead_len > 0

    def _make_shadow(self, session: Session) -> None:
        """Another drafter drives the request from now on. If this one is to draft again, it is alone."""
        if (chain := self._drafter.capabilities.chain) is not None:
            chain.set_proposers(session.key, ())
        if self.outcomes is not None:
            self.outcomes.drop(session)
        session.make_shadow(self._limits.max_draft_len)
        self.num_shadows += 1
        self._unanswered.pop(session.key, None)

    def _skip(self, session: Session, shadow: Shadow) -> None:
        """Leaves the pending tokens of a shadow unscored."""
        if self.unscored.pop(session.key, None) is not None:
            self._drafter.extend(session.key, shadow.skip())

    def _refuse(self, peer: TargetPeer, request_id: str, committed_len: int, now_s: float) -> None:
        """Refuses a request without capacity. Each commit is answered with an empty proposal, so that the target does not
        wait for one."""
        if not self._refusal_logged:
            self._refusal_logged = True
            logger.warning("drafter %s is at its capacity of %d requests", self._name, self._limits.capacity)
        peer.resyncs.drop(request_id)
        peer.refused.pop(request_id, None)
        peer.refused[request_id] = now_s
        peer.refusals[request_id] = max(committed_len, peer.refusals.get(request_id, 0))  # messages may be reordered
        if len(peer.refused) > 4 * self._limits.capacity:
            del peer.refused[next(iter(peer.refused))]

    def _readmit(self, now_s: float) -> None:
        for peer in self._pending.values():
            while peer.refused and self.num_drafted + self._num_resyncing() < self._limits.capacity:
                request_id = next(iter(peer.refused))
                del peer.refused[request_id]
                peer.resyncs.request(request_id, 0, now_s)

    def _num_resyncing(self) -> int:
        """Requests without a session that were asked for: they will need capacity."""
        return sum(
            1 for peer in self._pending.values() for request_id in peer.resyncs.pending if request_id not in peer.sessions
        )

    def _release(self, peer: TargetPeer, request_id: str) -> None:
        self._close(peer, request_id)
        peer.resyncs.drop(request_id)
        peer.forget(request_id)

    def _close(self, peer: TargetPeer, request_id: str) -> None:
        session = peer.sessions.pop(request_id, None)
        if session is not None:
            if self.outcomes is not None:
                self.outcomes.drop(session)
            self._num_sessions -= 1
            self.num_shadows -= session.shadow is not None
            self._unanswered.pop(session.key, None)
            self.unscored.pop(session.key, None)
            self._drafter.release(session.key)
            if self.spans is not None:
                self.spans.closed(session.key)
