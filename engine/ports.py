"""The target's ends of its links: what there is to say to each drafter and gateway, gathered into one message a round."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.errors import LinkClosed, LinkFull
from cluster.messages import Budget, CommitRound, DraftRound, Extend, Open
from cluster.transport.base import Link
from cluster.types import Commit
from engine.sequences import LiveSequence

# Commits that a gateway has not taken yet; beyond this it is not reading, and its link is closed.
MAX_PENDING_COMMITS = 16384


@dataclass(slots=True)
class DrafterPort:
    """One drafter as the round speaks to it. What a full link refused is kept, merged, and sent with the next round."""

    link: Link
    followed: set[str] = field(default_factory=set)  # requests that the drafter was told to follow
    _opens: dict[str, Open] = field(default_factory=dict)
    _extends: dict[str, Extend] = field(default_factory=dict)
    _budgets: dict[str, Budget] = field(default_factory=dict)
    _releases: set[str] = field(default_factory=set)

    def open(self, sequence: LiveSequence, max_draft_len: int) -> None:
        """Also the answer to a resync, and the way to start over."""
        request = sequence.request
        self.followed.add(request.id)
        self._releases.discard(request.id)
        self._extends.pop(request.id, None)
        self._opens[request.id] = Open(request.id, tuple(sequence.token_ids), sequence.prompt_len, request.sampling)
        self._budgets[request.id] = Budget(request.id, max_draft_len)

    def extend(self, request_id: str, base_len: int, token_ids: tuple[int, ...]) -> None:
        opening = self._opens.get(request_id)
        pending = self._extends.get(request_id)
        if opening is not None:
            self._opens[request_id] = Open(request_id, opening.token_ids + token_ids, opening.prompt_len, opening.sampling)
        elif pending is not None:
            self._extends[request_id] = Extend(request_id, pending.base_len, pending.token_ids + token_ids)
        else:
            self._extends[request_id] = Extend(request_id, base_len, token_ids)

    def release(self, request_id: str) -> None:
        """Also for requests that only the drafter still knows."""
        self.followed.discard(request_id)
        self._opens.pop(request_id, None)
        self._extends.pop(request_id, None)
        self._budgets.pop(request_id, None)
        self._releases.add(request_id)

    def flush(self, table_version: int) -> None:
        """Sends what has gathered, if anything.

        Raises:
            LinkClosed: the drafter is gone; a LinkDown follows or has come.
        """
        if not (self._opens or self._extends or self._releases or self._budgets):
            return
        message = DraftRound(
            table_version=table_version,
            opens=tuple(self._opens.values()),
            extends=tuple(self._extends.values()),
            budgets=tuple(self._budgets.values()),
            releases=tuple(self._releases),
        )
        try:
            self.link.send(message)
        except LinkFull:
            return
        for pending in (self._opens, self._extends, self._budgets, self._releases):
            pending.clear()


@dataclass(slots=True)
class GatewayPort:
    """One gateway as the round speaks to it."""

    link: Link
    requests: set[str] = field(default_factory=set)
    _commits: list[Commit] = field(default_factory=list)

    def publish(self, commits: Iterable[Commit]) -> None:
        self._commits.extend(commits)

    def flush(self) -> None:
        """Raises LinkClosed when the gateway is gone, or has stopped reading: its link is then closed."""
        if not self._commits:
            return
        try:
            self.link.send(CommitRound(tuple(self._commits)))
        except LinkFull:
            if len(self._commits) > MAX_PENDING_COMMITS:
                self.link.close()
                raise LinkClosed(
                    f"gateway {self.link.peer.name} left {len(self._commits)} commits unread; its link is closed"
                ) from None
            return
        self._commits.clear()
