"""The target's ends of its links: what to send to each drafter and gateway, merged into one message a round."""

from dataclasses import dataclass, field, replace

from cluster.errors import LinkClosed, LinkFull, WireError
from cluster.messages import Budget, CommitRound, DraftRound, Extend, Open
from cluster.transport.base import Link
from cluster.types import Commit
from engine.sequences import LiveSequence
from router.assignment import drafter_of
from router.plan import NO_DRAFTS, DraftBudget

# Beyond these the other end is not reading, and its link is closed.
MAX_PENDING_COMMITS = 16384
MAX_PENDING_RELEASES = 65536
# Of one message, well below what links carry: a drafter that reconnects opens every session at once.
MAX_OPENED_TOKENS = 500_000
MAX_COMMITS = 256


@dataclass(slots=True)
class DrafterOutbox:
    """What one drafter is to be sent. A full link keeps it, merged, for the next round."""

    link: Link
    followed: set[str] = field(default_factory=set)  # requests with a session at the drafter
    scoring: set[str] = field(default_factory=set)  # of those, the ones that another drafter drafts for
    _opens: dict[str, Open] = field(default_factory=dict)
    _extends: dict[str, Extend] = field(default_factory=dict)
    _budgets: dict[str, DraftBudget] = field(default_factory=dict)
    _releases: set[str] = field(default_factory=set)

    def open(self, sequence: LiveSequence) -> None:
        """Opens a session in which the drafter drafts, or opens it anew (a resync, a new chain)."""
        self.scoring.discard(sequence.request.id)
        proposers = tuple([drafter_of(name) for name in sequence.draft.chain[:-1]])
        self._open(sequence, sequence.draft.budget, proposers)

    def open_for_scoring(self, sequence: LiveSequence) -> None:
        """Opens a session in which the drafter only keeps in step, in its spare time."""
        self._open(sequence, NO_DRAFTS, ())
        self.scoring.add(sequence.request.id)

    def start_drafting(self, request_id: str, budget: DraftBudget) -> None:
        """The drafter is in step with the request, and drafts for it from now on."""
        self.scoring.discard(request_id)
        self._budgets[request_id] = budget

    def stop_drafting(self, request_id: str) -> None:
        """The drafter stays in step with the request."""
        self.scoring.add(request_id)
        self._budgets[request_id] = NO_DRAFTS

    def set_budget(self, request_id: str, budget: DraftBudget) -> None:
        if request_id in self.followed:
            self._budgets[request_id] = budget

    def extend(self, request_id: str, base_len: int, token_ids: tuple[int, ...]) -> None:
        opening = self._opens.get(request_id) if self._opens else None
        if opening is not None:
            self._opens[request_id] = replace(opening, token_ids=opening.token_ids + token_ids)
            return
        pending = self._extends.get(request_id)
        if pending is not None:
            base_len, token_ids = pending.base_len, pending.token_ids + token_ids
        self._extends[request_id] = Extend(request_id, base_len, token_ids)

    def release(self, request_id: str) -> None:
        """Also ends sessions that only the drafter still knows of."""
        self.scoring.discard(request_id)
        self.followed.discard(request_id)  # last: other threads count those followed less those scored
        self._opens.pop(request_id, None)
        self._extends.pop(request_id, None)
        self._budgets.pop(request_id, None)
        self._releases.add(request_id)

    def num_unsent(self) -> int:
        """Committed tokens that are pending."""
        num_opened = sum([len(one.token_ids) for one in self._opens.values()])
        return num_opened + sum([len(one.token_ids) for one in self._extends.values()])

    def flush(self, table_version: int) -> None:
        """Sends what is pending. Raises LinkClosed as ``_send``."""
        while self._opens or self._extends or self._budgets or self._releases:
            opens = self._next_opens()
            later = self._opens.keys() - opens.keys()
            message = DraftRound(
                table_version,
                tuple(opens.values()),
                tuple(self._extends.values()),
                tuple(
                    [
                        Budget(key, one.num_tokens, one.row_price, one.stop, one.ahead_len)
                        for key, one in self._budgets.items()
                        if key not in later
                    ]
                ),
                tuple(self._releases),
            )
            if not _send(self.link, message, len(self._releases), MAX_PENDING_RELEASES):
                return
            for request_id in opens:
                del self._opens[request_id]
            self._budgets = {key: budget for key, budget in self._budgets.items() if key in later}
            self._extends.clear()
            self._releases.clear()

    def flush_releases(self, table_version: int) -> None:
        """Sends the pending releases, and keeps the rest. Raises LinkClosed as ``_send``."""
        message = DraftRound(table_version, releases=tuple(self._releases))
        if message.releases and _send(self.link, message, len(message.releases), MAX_PENDING_RELEASES):
            self._releases.clear()

    def _open(self, sequence: LiveSequence, budget: DraftBudget, proposers: tuple[str, ...]) -> None:
        request = sequence.request
        self.followed.add(request.id)
        self._releases.discard(request.id)
        self._extends.pop(request.id, None)
        sampling = request.sampling
        if sampling.grammar is not None:  # no drafter masks: its proposals are cut to what the grammar allows
            sampling = replace(sampling, grammar=None)
        self._opens[request.id] = Open(
            request.id,
            tuple(sequence.token_ids),
            sequence.prompt_len,
            sampling,
            proposers,
            request.cache_salt,
            request.trace,
        )
        self._budgets[request.id] = budget

    def _next_opens(self) -> dict[str, Open]:
        """As many as one message holds, at least one."""
        opens: dict[str, Open] = {}
        num_tokens = 0
        for request_id, opening in self._opens.items():
            num_tokens += len(opening.token_ids)
            if opens and num_tokens > MAX_OPENED_TOKENS:
                break
            opens[request_id] = opening
        return opens


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
