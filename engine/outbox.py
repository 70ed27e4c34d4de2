"""The target's ends of its links: what there is to say to each drafter and gateway, gathered into one message a round."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cluster.errors import LinkClosed, LinkFull, WireError
from cluster.messages import Budget, CommitRound, DraftRound, Extend, Open
from cluster.transport.base import Link
from cluster.types import Commit
from engine.sequences import LiveSequence
from router.assignment import drafter_of

# What the other end has not taken yet; beyond this it is not reading, and its link is closed.
MAX_PENDING_COMMITS = 16384
MAX_PENDING_RELEASES = 65536
# What one message holds at most, well below what links carry: a drafter that comes back follows everything at once.
MAX_OPENED_TOKENS = 500_000
MAX_COMMITS = 256


@dataclass(slots=True)
class DrafterPort:
    """One drafter as the round speaks to it. What a full link refused is kept, merged, and sent with the next round."""

    link: Link
    followed: set[str] = field(default_factory=set)  # requests that the drafter was told to follow
    shadows: set[str] = field(default_factory=set)  # those of them that others draft for
    _opens: dict[str, Open] = field(default_factory=dict)
    _extends: dict[str, Extend] = field(default_factory=dict)
    _budgets: dict[str, Budget] = field(default_factory=dict)
    _releases: set[str] = field(default_factory=set)

    def open(self, sequence: LiveSequence, max_draft_len: int) -> None:
        """Also the answer to a resync, and the way to start over."""
        self.shadows.discard(sequence.request.id)
        self._open(sequence, max_draft_len, tuple(map(drafter_of, sequence.chain[:-1])))

    def shadow(self, sequence: LiveSequence) -> None:
        """The drafter is to keep in step with a request that others draft for, in its spare time."""
        self.shadows.add(sequence.request.id)
        self._open(sequence, 0, ())

    def shift(self, request_id: str, max_draft_len: int) -> None:
        """Between drafting for a request that is followed and keeping in step with it (0)."""
        (self.shadows.discard if max_draft_len else self.shadows.add)(request_id)
        self._budgets[request_id] = Budget(request_id, max_draft_len)

    def _open(self, sequence: LiveSequence, max_draft_len: int, proposers: tuple[str, ...]) -> None:
        request = sequence.request
        self.followed.add(request.id)
        self._releases.discard(request.id)
        self._extends.pop(request.id, None)
        self._opens[request.id] = Open(
            request.id, tuple(sequence.token_ids), sequence.prompt_len, request.sampling, proposers
        )
        self._budgets[request.id] = Budget(request.id, max_draft_len)

    def budget(self, max_draft_len: int) -> None:
        """A new bound for every request that is followed."""
        self._budgets.update((request_id, Budget(request_id, max_draft_len)) for request_id in self.followed - self.shadows)

    def extend(self, request_id: str, base_len: int, token_ids: tuple[int, ...]) -> None:
        opening = self._opens.get(request_id)
        pending = self._extends.get(request_id)
        if opening is not None:
            self._opens[request_id] = replace(opening, token_ids=opening.token_ids + token_ids)
        elif pending is not None:
            self._extends[request_id] = Extend(request_id, pending.base_len, pending.token_ids + token_ids)
        else:
            self._extends[request_id] = Extend(request_id, base_len, token_ids)

    def release(self, request_id: str) -> None:
        """Also for requests that only the drafter still knows."""
        self.followed.discard(request_id)
        self.shadows.discard(request_id)
        self._opens.pop(request_id, None)
        self._extends.pop(request_id, None)
        self._budgets.pop(request_id, None)
        self._releases.add(request_id)

    def flush(self, table_version: int) -> None:
        """Sends what has gathered, if anything.

        Raises:
            LinkClosed: the drafter is gone, or must go: it does not read, or what it must be told cannot be sent.
        """
        while self._opens or self._extends or self._releases or self._budgets:
            opens = self._some_opens()
            later = self._opens.keys() - opens.keys()
            message = DraftRound(
                table_version=table_version,
                opens=tuple(opens.values()),
                extends=tuple(self._extends.values()),
                budgets=tuple(budget for key, budget in self._budgets.items() if key not in later),
                releases=tuple(self._releases),
            )
            try:
                self.link.send(message)
            except LinkFull:
                if len(self._releases) > MAX_PENDING_RELEASES:
                    raise _hung_up(self.link, f"{len(self._releases)} releases unread") from None
                return
            except WireError as error:
                raise _hung_up(self.link, f"what cannot be sent: {error}") from error
            for request_id in opens:
                del self._opens[request_id]
            self._budgets = {key: budget for key, budget in self._budgets.items() if key in later}
            self._extends.clear()
            self._releases.clear()

    def _some_opens(self) -> dict[str, Open]:
        """As many as one message holds, at least one."""
        some: dict[str, Open] = {}
        num_tokens = 0
        for request_id, opening in self._opens.items():
            num_tokens += len(opening.token_ids)
            if some and num_tokens > MAX_OPENED_TOKENS:
                break
            some[request_id] = opening
        return some


@dataclass(slots=True)
class GatewayPort:
    """One gateway as the round speaks to it."""

    link: Link
    _commits: list[Commit] = field(default_factory=list)

    def publish(self, commits: Iterable[Commit]) -> None:
        self._commits.extend(commits)

    def flush(self) -> None:
        """Sends what has gathered, if anything.

        Raises:
            LinkClosed: the gateway is gone, or must go: it does not read, or what it must be told cannot be sent.
        """
        while self._commits:
            try:
                self.link.send(CommitRound(tuple(self._commits[:MAX_COMMITS])))
            except LinkFull:
                if len(self._commits) > MAX_PENDING_COMMITS:
                    raise _hung_up(self.link, f"{len(self._commits)} commits unread") from None
                return
            except WireError as error:
                raise _hung_up(self.link, f"what cannot be sent: {error}") from error
            del self._commits[:MAX_COMMITS]


def _hung_up(link: Link, left: str) -> LinkClosed:
    link.close()
    return LinkClosed(f"{link.peer.role} {link.peer.name} left {left}; its link is closed")
