"""The requests that a drafter follows, by target: handling of mail, lost messages, limits."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cluster.config import DEFAULT_CAPACITY, DEFAULT_DRAFT_LEN
from cluster.messages import Budget, DraftRound, DraftScore, Extend, Open
from cluster.soundness import Inspection
from cluster.transport.base import Event, Link, LinkDown, LinkUp
from drafters.counterfactual import Shadow
from drafters.protocol import Drafter
from drafters.session import ExtendOutcome, Resyncs, Session, key_of, reconcile

logger = logging.getLogger(__name__)

_EXPIRY_CHECK_S = 1.0
MAX_UNSCORED = 256  # tokens of a request that a busy drafter leaves unscored; then it gives up scoring those
MAX_IGNORED = 4096


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits. Counts are of requests, over all links.

    ``resync_s``: time until an unanswered resync is repeated; doubles with each of ``max_resyncs`` attempts. ``idle_s``:
    time after which a silent request is dropped, since its release may be lost; if it lives, its next Extend brings it back.
    """

    capacity: int = DEFAULT_CAPACITY
    max_draft_len: int = DEFAULT_DRAFT_LEN  # of a proposal; a Budget may ask for less
    max_shadows: int = 4 * DEFAULT_CAPACITY  # requests of others that are kept in step with; 0: none
    resync_s: float = 0.25
    max_resyncs: int = 6
    idle_s: float = 60.0


@dataclass(slots=True)
class TargetPeer:
    """A target replica."""

    link: Link
    number: int  # of the link, counted from the start of the process: request ids are unique per target only
    resyncs: Resyncs
    table_version: int = 0
    followed: dict[str, Session] = field(default_factory=dict)
    scores: list[DraftScore] = field(default_factory=list)  # not yet sent
    ignored: dict[str, None] = field(default_factory=dict)  # others draft for them, and there is no room to keep in step
    refused: dict[str, float] = field(default_factory=dict)  # for want of room; when last heard of, oldest first
    owed: dict[str, int] = field(default_factory=dict)  # refused, not yet told so; the committed length to answer

    def take_scores(self) -> tuple[DraftScore, ...]:
        scores, self.scores = tuple(self.scores), []
        return scores

    def take_owed(self) -> dict[str, int]:
        owed, self.owed = self.owed, {}
        return owed


class TargetSessions:
    """The requests of all links, and the drafter that is told of each change. Time comes in as data."""

    def __init__(self, name: str, drafter: Drafter, limits: SessionLimits) -> None:
        self.peers: dict[int, TargetPeer] = {}  # by id(link): links are compared by identity
        self.unlinked: list[Link] = []  # links closed after MAX_UNSOUND unsound messages
        self._name = name
        self._drafter = drafter
        self._limits = limits
        self._inspection = Inspection(f"drafter {name}")
        self._num_links_seen = 0
        self._refusal_logged = self._missing_proposers_logged = False
        self._next_expiry_s: float | None = None

    @property
    def num_followed(self) -> int:
        """Those that it drafts for."""
        return sum(followed.shadow is None for peer in self.peers.values() for followed in peer.followed.values())

    @property
    def num_shadows(self) -> int:
        return sum(len(peer.followed) for peer in self.peers.values()) - self.num_followed

    @property
    def num_refused(self) -> int:
        return sum(len(peer.refused) for peer in self.peers.values())

    @property
    def owes_refusals(self) -> bool:
        return any(peer.owed for peer in self.peers.values())

    def live(self) -> Iterator[Session]:
        """Requests whose committed tokens are known to the end, and that want drafts."""
        for peer in self.peers.values():
            for request_id, followed in peer.followed.items():
                if followed.budget and request_id not in peer.resyncs:
                    yield followed

    def shadows(self) -> Iterator[tuple[TargetPeer, Shadow]]:
        """Requests that others draft for."""
        for peer in self.peers.values():
            for followed in peer.followed.values():
                if followed.shadow is not None:
                    yield peer, followed.shadow

    def take(self, event: Event, now_s: float) -> None:
        if isinstance(event, LinkUp):
            resyncs = Resyncs(self._limits.resync_s, self._limits.max_resyncs, 4 * self._limits.capacity)
            self.peers[id(event.link)] = TargetPeer(event.link, self._num_links_seen, resyncs)
            self._num_links_seen += 1
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
        """The target is gone, and with it its requests. Idempotent."""
        self._inspection.forget(link)
        peer = self.peers.pop(id(link), None)
        if peer is not None:
            for request_id in list(peer.followed):
                self._forget(peer, request_id)
            link.close()

    def expire(self, now_s: float) -> None:
        """Forget what was not heard of for long; ask for requests refused before, oldest first, when room came free."""
        if self._next_expiry_s is None or now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + min(_EXPIRY_CHECK_S, self._limits.idle_s)
            limit_s = now_s - self._limits.idle_s
            for peer in self.peers.values():
                for request_id in [r for r, followed in peer.followed.items() if followed.heard_s < limit_s]:
                    self._release(peer, request_id)
                for request_id in [r for r, heard_s in peer.refused.items() if heard_s < limit_s]:
                    del peer.refused[request_id]
        if self.num_refused:
            self._readmit(now_s)

    def due_resyncs(self, now_s: float) -> dict[int, list[str]]:
        """What to ask each peer for now. Requests that it does not answer for are forgotten after the last attempt."""
        due = {}
        for key, peer in self.peers.items():
            asked, given_up = peer.resyncs.take_due(now_s)
            for request_id in given_up:
                self._forget(peer, request_id)
            if asked:
                due[key] = asked
        return due

    def next_due_s(self) -> float | None:
        """When the next resync is due."""
        due = [due_s for peer in self.peers.values() if (due_s := peer.resyncs.next_due_s()) is not None]
        return min(due, default=None)

    def check_integrity(self) -> None:
        """Raises AssertionError when the roster disagrees with itself."""
        assert self.num_followed <= self._limits.capacity, "more requests are followed than there is room for"
        for peer in self.peers.values():
            assert not peer.refused.keys() & peer.followed.keys(), "a request is both followed and refused"
            assert not peer.owed.keys() & peer.followed.keys(), "a followed request is to be answered as a refused one"
            for request_id, followed in peer.followed.items():
                assert followed.request_id == request_id, "a request is filed under another's name"
                assert len(followed.ahead) == len(followed.confidences), "a draft token without its confidence"
                assert followed.num_sent <= len(followed.ahead), "more was proposed than drafted"
                assert followed.answered or not followed.num_sent, "a proposal was sent, yet none is noted"

    def _receive(self, peer: TargetPeer, message: DraftRound, now_s: float) -> None:
        peer.table_version = max(peer.table_version, message.table_version)
        budgets = {budget.request_id: budget.num_tokens for budget in message.budgets}
        opened = {opening.request_id for opening in message.opens}
        # What others open may need the room of those that end; a request may end in the round that opened it, too.
        ended = [request_id for request_id in message.releases if opened and request_id not in opened]
        for request_id in ended:
            self._release(peer, request_id)
        for opening in message.opens:
            if budgets.get(opening.request_id) == 0 and opening.request_id not in peer.followed:
                self._shadow(peer, opening, now_s)
            else:
                self._open(peer, opening, now_s)
        for extension in message.extends:
            self._extend(peer, extension, now_s)
        for budget in message.budgets:
            self._budget(peer, budget, now_s)
        for request_id in message.releases:
            if request_id not in ended:
                self._release(peer, request_id)

    def _open(self, peer: TargetPeer, opening: Open, now_s: float) -> None:
        request_id = opening.request_id
        if not opening.token_ids:
            logger.warning("drafter %s: ignored an opening of %s without tokens", self._name, request_id)
            return
        followed = peer.followed.get(request_id)
        if followed is not None:
            verdict, new = reconcile(followed.token_ids, 0, opening.token_ids)
            if verdict is not ExtendOutcome.CONFLICT and len(opening.token_ids) <= followed.end_len:
                self._commit(peer, followed, new, now_s)
                self._set_proposers(followed.key, opening)
                return
            self._forget(peer, request_id)  # its id is used anew
        if self.num_followed >= self._limits.capacity:
            self._refuse(peer, request_id, len(opening.token_ids), now_s)
            return
        self._follow(peer, opening, now_s)

    def _shadow(self, peer: TargetPeer, opening: Open, now_s: float) -> None:
        """Others draft for it. Where there is no room to keep in step, nobody need know."""
        peer.resyncs.drop(opening.request_id)
        if self.num_shadows >= self._limits.max_shadows:
            self._ignore(peer, opening.request_id)
            return
        followed = self._follow(peer, opening, now_s)
        followed.budget = 0
        followed.shadow = self._new_shadow(followed)

    def _new_shadow(self, followed: Session) -> Shadow:
        return Shadow(
            followed.key, followed.request_id, followed.committed_len, self._limits.max_draft_len, followed.end_len
        )

    @staticmethod
    def _ignore(peer: TargetPeer, request_id: str) -> None:
        peer.refused.pop(request_id, None)
        peer.owed.pop(request_id, None)
        peer.ignored[request_id] = None
        if len(peer.ignored) > MAX_IGNORED:
            del peer.ignored[next(iter(peer.ignored))]

    def _follow(self, peer: TargetPeer, opening: Open, now_s: float) -> Session:
        request_id = opening.request_id
        for others in (peer.ignored, peer.refused, peer.owed):
            others.pop(request_id, None)
        followed = Session(
            key=key_of(peer.number, request_id),
            request_id=request_id,
            token_ids=list(opening.token_ids),
            end_len=opening.prompt_len + opening.sampling.max_tokens,
            budget=self._limits.max_draft_len,
            row_price=0.0,
            heard_s=now_s,
        )
        self._drafter.open(followed.key, opening.token_ids, opening.prompt_len, opening.sampling)
        self._set_proposers(followed.key, opening)
        peer.followed[request_id] = followed
        peer.resyncs.learned(request_id, followed.committed_len)
        return followed

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
        followed = peer.followed.get(request_id)
        if followed is None:
            peer.resyncs.want(request_id, end_len, now_s)
            return
        if end_len > followed.end_len:
            fault = f"an extension of {request_id} to {end_len} tokens, at most {followed.end_len} were announced"
            self._inspection.note(peer.link, [fault])
            return
        verdict, new = reconcile(followed.token_ids, extension.base_len, extension.token_ids)
        if verdict is ExtendOutcome.APPLIED or verdict is ExtendOutcome.KNOWN:
            self._commit(peer, followed, new, now_s)
            return
        if verdict is ExtendOutcome.CONFLICT:
            self._forget(peer, request_id)
        peer.resyncs.want(request_id, end_len, now_s)

    def _commit(self, peer: TargetPeer, followed: Session, token_ids: Sequence[int], now_s: float) -> None:
        followed.heard_s = now_s
        if token_ids:
            if followed.shadow is None:
                self._drafter.extend(followed.key, token_ids)
            else:
                followed.shadow.commit(token_ids)
                if len(followed.shadow.pending) > MAX_UNSCORED:
                    self._drafter.extend(followed.key, followed.shadow.skip())
            followed.commit(token_ids)
        peer.resyncs.learned(followed.request_id, followed.committed_len)

    def _budget(self, peer: TargetPeer, budget: Budget, now_s: float) -> None:
        followed = peer.followed.get(budget.request_id)
        num_tokens = max(0, min(budget.num_tokens, self._limits.max_draft_len))
        if followed is None:
            if num_tokens and budget.request_id in peer.ignored:
                del peer.ignored[budget.request_id]
                peer.resyncs.want(budget.request_id, 0, now_s)
            return
        if num_tokens and followed.shadow is not None:  # it is to draft for it now, and need not catch up with much
            if self.num_followed >= self._limits.capacity:
                self._forget(peer, budget.request_id)
                self._refuse(peer, budget.request_id, followed.committed_len, now_s)
                return
            skipped = followed.shadow.skip()
            if skipped:
                self._drafter.extend(followed.key, skipped)
            followed.shadow = None
        elif not num_tokens and followed.shadow is None:  # another drafts for it now
            if self.num_shadows >= self._limits.max_shadows:
                self._forget(peer, budget.request_id)
                self._ignore(peer, budget.request_id)
                return
            followed.ahead.clear()
            followed.confidences.clear()
            followed.num_sent, followed.answered = 0, False
            followed.shadow = self._new_shadow(followed)
        followed.budget, followed.row_price = num_tokens, budget.row_price

    def _refuse(self, peer: TargetPeer, request_id: str, committed_len: int, now_s: float) -> None:
        """The target is owed an empty proposal for each commit, or it would hold the request for one that never comes, and
        take that for the time of a reply."""
        if not self._refusal_logged:
            self._refusal_logged = True
            logger.warning("drafter %s follows %d requests, no room for more", self._name, self._limits.capacity)
        peer.resyncs.drop(request_id)
        peer.refused.pop(request_id, None)
        peer.refused[request_id] = now_s
        peer.owed[request_id] = max(committed_len, peer.owed.get(request_id, 0))  # mail may come out of order
        if len(peer.refused) > 4 * self._limits.capacity:
            del peer.refused[next(iter(peer.refused))]

    def _readmit(self, now_s: float) -> None:
        for peer in self.peers.values():
            while peer.refused and self.num_followed + self._num_missing() < self._limits.capacity:
                request_id = next(iter(peer.refused))
                del peer.refused[request_id]
                peer.resyncs.want(request_id, 0, now_s)

    def _num_missing(self) -> int:
        """Requests asked for that are not followed: they will take room when they come."""
        return sum(1 for peer in self.peers.values() for request_id in peer.resyncs if request_id not in peer.followed)

    def _release(self, peer: TargetPeer, request_id: str) -> None:
        self._forget(peer, request_id)
        peer.resyncs.drop(request_id)
        peer.refused.pop(request_id, None)
        peer.owed.pop(request_id, None)
        peer.ignored.pop(request_id, None)

    def _forget(self, peer: TargetPeer, request_id: str) -> None:
        followed = peer.followed.pop(request_id, None)
        if followed is not None:
            self._drafter.release(followed.key)
