"""The target's ends of its links: what to send to each drafter and gateway, merged into one message a round."""

from dataclasses import dataclass, field, replace

from cluster.errors import LinkClosed, LinkFull, WireError
from cluster.messages import Budget, CommitRound, DraftRound, Extend, Open
from cluster.transport.base import Link
from cluster.types import NO_DRAFTS, Commit, DraftTerms
from engine.feature_feed import FeatureFeed
from engine.sequences import LiveSequence
from router.assignment import drafter_of

# Beyond these the other end is not reading, and its link is closed.
MAX_PENDING_COMMITS = 16384
MAX_PENDING_RELEASES = 65536
# Of one message, well below what links carry: a drafter that reconnects opens every session at once.
MAX_OPENED_TOKENS = 500_000
MAX_COMMITS = 256


@dataclass(slots=True)
class DrafterOutbox:
    """What one drafter is to be sent. What a full link refused goes with the next message, and so does what is not flushed
    while the drafter is not queried. A session stores only the number of tokens sent, so that what waits is not copied."""

    link: Link
    feed: FeatureFeed | None = None  # of a drafter in another process that reads hidden states
    followed: dict[str, "_Session"] = field(default_factory=dict)  # requests with a session at the drafter
    scoring: set[str] = field(default_factory=set)  # of those, the ones that another drafter drafts for
    _unopened: dict[str, None] = field(default_factory=dict)  # of those, the ones to be opened, or opened anew
    _extended: dict[str, None] = field(default_factory=dict)  # of those, the ones with commits since the last message
    _budgets: dict[str, DraftTerms] = field(default_factory=dict)
    _releases: set[str] = field(default_factory=set)

    def close(self) -> None:
        """Closes its links."""
        self.link.close()
        if self.feed is not None:
            self.feed.close()

    def open(self, sequence: LiveSequence) -> None:
        """Opens a session in which the drafter drafts, or opens it anew (a resync, a new chain)."""
        self.scoring.discard(sequence.request.id)
        self._open(sequence, sequence.draft.asked_budget)

    def open_for_scoring(self, sequence: LiveSequence) -> None:
        """Opens a session in which the drafter only keeps in step, in its spare time."""
        self._open(sequence, NO_DRAFTS)
        self.scoring.add(sequence.request.id)

    def start_drafting(self, request_id: str, budget: DraftTerms) -> None:
        """The drafter is in step with the request, and drafts for it from now on."""
        self.scoring.discard(request_id)
        self._budgets[request_id] = budget

    def stop_drafting(self, request_id: str) -> None:
        """The drafter stays in step with the request."""
        self.scoring.add(request_id)
        self._budgets[request_id] = NO_DRAFTS

    def set_budget(self, request_id: str, budget: DraftTerms) -> None:
        if request_id in self.followed:
            self._budgets[request_id] = budget

    def extend(self, request_id: str) -> None:
        """Tokens were committed to a followed request."""
        if request_id not in self._unopened:
            self._extended[request_id] = None

    def release(self, request_id: str) -> None:
        """Also ends sessions that only the drafter still knows of."""
        self.scoring.discard(request_id)
        self.followed.pop(request_id, None)  # last: other threads count those followed less those scored
        for pending in (self._unopened, self._extended, self._budgets):
            pending.pop(request_id, None)
        self._releases.add(request_id)

    def num_unsent(self) -> int:
        """Committed tokens that are pending."""
        pending = [self.followed[request_id] for request_id in (*self._unopened, *self._extended)]
        return sum([len(one.sequence.token_ids) - one.num_sent for one in pending])

    def flush(self, table_version: int) -> None:
        """Sends what is pending. Raises LinkClosed as ``_send``."""
        while self._unopened or self._extended or self._budgets or self._releases:
            opened = self._next_to_open()
            later = self._unopened.keys() - opened
            followed = self.followed
            extended = [followed[key] for key in self._extended]
            message = DraftRound(
                table_version,
                tuple([self._opening(followed[key].sequence) for key in opened]),
                tuple([one.extension() for one in extended]),
                tuple([Budget(key, terms) for key, terms in self._budgets.items() if key not in later]),
                tuple(self._releases),
            )
            if self.feed is not None:
                self.feed.feed(message)
            if not _send(self.link, message, len(self._releases), MAX_PENDING_RELEASES):
                return
            for session in [*[followed[key] for key in opened], *extended]:
                session.num_sent = len(session.sequence.token_ids)
            for request_id in opened:
                del self._unopened[request_id]
            self._budgets = {key: budget for key, budget in self._budgets.items() if key in later}
            self._extended.clear()
            self._releases.clear()

    def flush_releases(self, table_version: int) -> None:
        """Sends the pending releases, and keeps the rest. Raises LinkClosed as ``_send``."""
        message = DraftRound(table_version, releases=tuple(self._releases))
        if self.feed is not None:
            self.feed.feed(message)
        if message.releases and _send(self.link, message, len(message.releases), MAX_PENDING_RELEASES):
            self._releases.clear()

    def _open(self, sequence: LiveSequence, budget: DraftTerms) -> None:
        request_id = sequence.request.id
        self.followed[request_id] = _Session(sequence)
        self._releases.discard(request_id)
        self._extended.pop(request_id, None)
        self._unopened[request_id] = None
        self._budgets[request_id] = budget

    def _opening(self, sequence: LiveSequence) -> Open:
        request = sequence.request
        sampling = request.sampling
        if sampling.grammar is not None:  # no drafter masks: its proposals are cut to what the grammar allows
            sampling = replace(sampling, grammar=None)
        ahead = () if request.id in self.scoring else sequence.draft.chain[:-1]
        return Open(
            request.id,
            tuple(sequence.token_ids),
            sequence.prompt_len,
            sampling,
            tuple([drafter_of(name) for name in ahead]),
            request.salt,
            request.trace,
        )

    def _next_to_open(self) -> list[str]:
        """As many as one message holds, at least one."""
        opened: list[str] = []
        num_tokens = 0
        for request_id in self._unopened:
            num_tokens += len(self.followed[request_id].sequence.token_ids)
            if opened and num_tokens > MAX_OPENED_TOKENS:
                break
            opened.append(request_id)
        return opened


@dataclass(slots=True, eq=False)
class _Session:
    """A request that a drafter follows. ``num_sent``: committed tokens that it was sent."""

    sequence: LiveSequence
    num_sent: int = 0

    def extension(self) -> Extend:
        sequence, start = self.sequence, self.num_sent
        span = sequence.span  # whose tokens were committed last
        num = len(sequence.token_ids) - start
        new = span.chosen if len(span.chosen) == num else tuple(sequence.token_ids[start:])
        return Extend(sequence.request.id, start, new)


@dataclass(slots=True)
class GatewayOutbox:
    """What one gateway is to be sent."""

    link: Link
    _commits: list[Commit] = field(default_factory=list)

    def publish(self, commit: Commit) -> None:
        self._commits.append(commit)

    def flush(self) -> None:
        """Sends what is pending. Raises LinkClosed as ``_send``."""
        while self._commits:
            message = CommitRound(tuple(self._commits[:MAX_COMMITS]))
            if not _send(self.link, message, len(self._commits), MAX_PENDING_COMMITS):
                return
            del self._commits[:MAX_COMMITS]


def _send(link: Link, message: DraftRound | CommitRound, num_pending: int, max_pending: int) -> bool:
    """Returns False if the link is full: what is pending stays. Raises LinkClosed: the peer is gone, or more than
    ``max_pending`` are pending, or the message cannot be sent."""
    try:
        link.send(message)
        return True
    except LinkFull:
        if num_pending <= max_pending:
            return False
        what = "commits" if isinstance(message, CommitRound) else "releases"
        fault = f"{num_pending} {what} unread"
    except WireError as error:
        fault = f"a message that cannot be sent: {error}"
    link.close()
    raise LinkClosed(f"{link.peer.role} {link.peer.name} left {fault}; its link is closed")
