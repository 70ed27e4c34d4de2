"""A drafter's view of a request, kept correct by messages that may be lost, duplicated, late or reordered.

Pure bookkeeping: no drafter, link or clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from drafters.counterfactual import Shadow


def key_of(link_number: int, request_id: str) -> str:
    """A drafter's key for a request, since request ids are unique per target only."""
    return f"{link_number}/{request_id}"


def request_id_of(key: str) -> str:
    """The target's id of a key."""
    return key.partition("/")[2]


@dataclass(slots=True)
class Session:
    """One request, and what was drafted beyond its committed tokens.

    0 ............ committed_len ............ + num_sent ............ + len(ahead)
    | token_ids    | ahead, proposed          | ahead, not yet sent   |
    """

    key: str  # the drafter's name for it: unique over all links
    request_id: str
    token_ids: list[int]
    end_len: int  # committed length at which the request ends at the latest
    budget: int  # draft tokens per proposal
    row_price: float  # in tokens: of verifying one of them
    heard_s: float
    ahead: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)  # of ahead
    num_sent: int = 0
    answered: bool = False  # a proposal for this committed length has left
    shadow: Shadow | None = None  # set while another drafter drives the request: this one keeps in step and is scored
    exhausted: bool = False  # the drafter gave less than it was asked for: ask no more while what it gave stands

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def wanted(self) -> int:
        """How many tokens a proposal may hold now: the last token of a request is the target's own and needs no draft."""
        return max(0, min(self.budget, self.end_len - len(self.token_ids) - 1))

    def commit(self, token_ids: Sequence[int]) -> None:
        """Tokens became final. What was drafted beyond them is kept if they agree with it (drafting ahead)."""
        num_new = len(token_ids)
        if self.ahead[:num_new] == list(token_ids):
            del self.ahead[:num_new]
            del self.confidences[:num_new]
        else:
            self.ahead.clear()
            self.confidences.clear()
        self.token_ids.extend(token_ids)
        self.num_sent = 0
        self.answered = False
        self.exhausted = self.exhausted and bool(self.ahead)


class ExtendOutcome(Enum):
    """Result of news about a request."""

    APPLIED = auto()
    KNOWN = auto()  # nothing in it is new
    GAP = auto()  # something before it is missing: the request must be opened again
    CONFLICT = auto()  # it contradicts what is known: forget the request, it must be opened again


def reconcile(known: Sequence[int], base_len: int, token_ids: Sequence[int]) -> tuple[ExtendOutcome, Sequence[int]]:
    """Compare tokens at ``base_len`` with what is known; returns the verdict and the tokens that are new.

    Committed tokens never change, so news that is wholly known and agrees is a duplicate or late, and harmless.
    """
    known_len = len(known)
    if base_len > known_len or base_len < 0:
        return ExtendOutcome.GAP, ()
    overlap = min(known_len - base_len, len(token_ids))
    if list(known[base_len : base_len + overlap]) != list(token_ids[:overlap]):
        return ExtendOutcome.CONFLICT, ()
    new = token_ids[overlap:]
    return (ExtendOutcome.APPLIED if new else ExtendOutcome.KNOWN), new


@dataclass(slots=True)
class _Resync:
    wanted_len: int  # satisfied when this much of the request is known
    due_s: float
    num_asked: int = 0


class Resyncs:
    """Which requests must be opened again, and when to ask (again): a request for a resync may be lost like any message.

    The pause doubles with every attempt; after ``max_attempts`` the request is given up, for its target does not know it
    any more. Bounded: what does not fit is not asked for, the next Extend of that request will try again.
    """

    def __init__(self, pause_s: float, max_attempts: int, capacity: int) -> None:
        self._pause_s = pause_s
        self._max_attempts = max_attempts
        self._capacity = capacity
        self._pending: dict[str, _Resync] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pending)

    def want(self, request_id: str, wanted_len: int, now_s: float) -> None:
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.wanted_len = max(pending.wanted_len, wanted_len)
        elif len(self._pending) < self._capacity:
            self._pending[request_id] = _Resync(wanted_len, now_s)

    def learned(self, request_id: str, known_len: int) -> None:
        """The request is known up to here; this may be all that was wanted."""
        pending = self._pending.get(request_id)
        if pending is not None and known_len >= pending.wanted_len:
            del self._pending[request_id]

    def drop(self, request_id: str) -> None:
        self._pending.pop(request_id, None)

    def take_due(self, now_s: float) -> tuple[list[str], list[str]]:
        """The requests to ask for now, and those given up."""
        asked, given_up = [], []
        for request_id, pending in self._pending.items():
            if pending.due_s > now_s:
                continue
            if pending.num_asked >= self._max_attempts:
                given_up.append(request_id)
                continue
            pending.due_s = now_s + self._pause_s * 2**pending.num_asked
            pending.num_asked += 1
            asked.append(request_id)
        for request_id in given_up:
            del self._pending[request_id]
        return asked, given_up

    def next_due_s(self) -> float | None:
        return min((pending.due_s for pending in self._pending.values()), default=None)
