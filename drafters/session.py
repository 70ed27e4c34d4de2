"""A drafter's view of a request, kept correct by messages that may be lost, duplicated, late or reordered."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import prod

from cluster.messages import DraftScore
from cluster.transport.base import Link
from cluster.types import NO_DRAFTS, DraftTerms
from drafters.counterfactual import Shadow
from drafters.protocol import Demand, Draft


def key_of(link_number: int, request_id: str) -> str:
    """A drafter's key for a request, since request ids are unique per target only."""
    return f"{link_number}/{request_id}"


def request_id_of(key: str) -> str:
    return key.partition("/")[2]


@dataclass(slots=True, kw_only=True)
class GrowingDraft:
    """``ahead``: drafted tokens, behind those that are committed or assumed."""

    key: str  # the drafter's name for the request, or for a branch of it: unique over all links
    terms: DraftTerms
    num_runners_up: int = 0  # wanted of each draft token
    ahead: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)  # of ahead
    runners_up: list[tuple[int, ...]] = field(default_factory=list)  # of ahead, if wanted
    exhausted: bool = False  # the last draft was shorter than demanded: no more is drafted until it is rejected

    def take(self, draft: Draft, length: int, num_tokens: int) -> None:
        """Adds the first ``length`` tokens of a draft of ``num_tokens``."""
        self.ahead.extend(draft.token_ids[:length])
        self.confidences.extend(draft.confidences[:length])
        self.runners_up.extend(draft.runners_up[:length])
        self.exhausted = length < num_tokens


@dataclass(slots=True, kw_only=True)
class Session(GrowingDraft):
    """A request as its drafter follows it.

    0 ............ committed_len ............ + num_sent ............ + len(ahead)
    | token_ids    | ahead, proposed          | ahead, not yet sent   |
    """

    request_id: str
    token_ids: list[int]
    end_len: int  # maximum committed length
    last_message_s: float
    num_sent: int = 0
    answered: bool = False  # a proposal for this committed length was sent
    shadow: Shadow | None = None  # set while another drafter drives the request: this one keeps in step and is scored
    answered_s: float = 0.0  # when the proposal was sent
    prepared: list["Prepared"] = field(default_factory=list)  # drafts for outcomes of the verification under way
    num_considered: int = 0  # positions of ahead at which outcomes were considered
    drafted_len: int = 0  # committed length at the last draft

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def draft_len(self) -> int:
        """Maximum tokens of a proposal now. The last token of a request needs no draft."""
        return max(0, min(self.terms.num_tokens, self.end_len - len(self.token_ids) - 1))

    def commit(self, token_ids: Sequence[int]) -> "Prepared | None":
        """Appends committed tokens. Drafted tokens beyond them are kept if the drafted ones before agree; else those of the
        outcome that was prepared and came true, which is returned."""
        num_new = len(token_ids)
        hit = None
        if self.ahead[:num_new] == list(token_ids):
            for one in (self.ahead, self.confidences, self.runners_up):
                del one[:num_new]
        else:
            hit = next((one for one in self.prepared if one.assumed == tuple(token_ids)), None)
            self.drop_ahead()
            if hit is not None:
                self.ahead, self.confidences, self.runners_up = hit.ahead, hit.confidences, hit.runners_up
                self.exhausted = hit.exhausted
        self.token_ids.extend(token_ids)
        self.num_sent = 0
        self.answered = False
        self.exhausted = self.exhausted and bool(self.ahead)
        return hit

    def drop_ahead(self) -> None:
        self.ahead, self.confidences, self.runners_up = [], [], []

    def demand(self, num_tokens: int) -> Demand:
        """For tokens beyond ``ahead``. Nobody waits for those that are drafted while a proposal is verified."""
        terms = replace(self.terms, second_price=0.0) if self.answered and self.terms.second_price else self.terms
        survival = prod(self.confidences[self.num_sent :])
        return Demand(self.key, num_tokens, tuple(self.ahead), terms, survival, self.num_runners_up)

    def make_shadow(self, max_draft_len: int) -> None:
        """Scores it from now on, with drafts of up to ``max_draft_len`` tokens."""
        self.drop_ahead()
        self.num_sent, self.answered, self.terms = 0, False, NO_DRAFTS
        self.shadow = Shadow(self.key, self.request_id, self.committed_len, max_draft_len, self.end_len)


@dataclass(slots=True, kw_only=True)
class Prepared(GrowingDraft):
    """A draft that follows ``assumed``: the tokens of the next commit, if this outcome comes true."""

    assumed: tuple[int, ...]
    draft_len: int  # maximum tokens

    def demand(self, num_tokens: int) -> Demand:
        ahead, survival = (*self.assumed, *self.ahead), prod(self.confidences)
        return Demand(self.key, num_tokens, ahead, self.terms, survival, self.num_runners_up)


class ExtendOutcome(Enum):
    APPLIED = auto()  # possibly none is new
    GAP = auto()  # tokens before them are missing: the request must be opened again
    CONFLICT = auto()  # they contradict the known ones: the request must be forgotten and opened again


def reconcile(known: Sequence[int], base_len: int, token_ids: Sequence[int]) -> tuple[ExtendOutcome, Sequence[int]]:
    """Compares committed tokens at ``base_len`` with the known ones; returns the outcome and the new tokens."""
    known_len = len(known)
    if base_len > known_len:
        return ExtendOutcome.GAP, ()
    overlap = min(known_len - base_len, len(token_ids))
    if list(known[base_len : base_len + overlap]) != list(token_ids[:overlap]):
        return ExtendOutcome.CONFLICT, ()
    return ExtendOutcome.APPLIED, token_ids[overlap:]


@dataclass(slots=True)
class _Resync:
    min_len: int  # satisfied when this much of the request is known
    due_s: float
    num_attempts: int = 0


class Resyncs:
    """Requests that their target must open again, and when to ask it.

    The pause doubles with every attempt. After ``max_attempts`` the request is given up. A request beyond ``capacity`` is
    not added; its next Extend tries again.
    """

    def __init__(self, pause_s: float, max_attempts: int, capacity: int) -> None:
        self._pause_s = pause_s
        self._max_attempts = max_attempts
        self._capacity = capacity
        self.pending: dict[str, _Resync] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.pending

    def request(self, request_id: str, min_len: int, now_s: float) -> None:
        pending = self.pending.get(request_id)
        if pending is not None:
            pending.min_len = max(pending.min_len, min_len)
        elif len(self.pending) < self._capacity:
            self.pending[request_id] = _Resync(min_len, now_s)

    def update(self, request_id: str, known_len: int) -> None:
        pending = self.pending.get(request_id)
        if pending is not None and known_len >= pending.min_len:
            del self.pending[request_id]

    def drop(self, request_id: str) -> None:
        self.pending.pop(request_id, None)

    def take_due(self, now_s: float) -> tuple[list[str], list[str]]:
        """Requests to ask for now, and those given up."""
        due, given_up = [], []
        for request_id, pending in self.pending.items():
            if pending.due_s > now_s:
                continue
            if pending.num_attempts >= self._max_attempts:
                given_up.append(request_id)
                continue
            pending.due_s = now_s + self._pause_s * 2**pending.num_attempts
            pending.num_attempts += 1
            due.append(request_id)
        for request_id in given_up:
            del self.pending[request_id]
        return due, given_up

    def next_due_s(self) -> float | None:
        return min((pending.due_s for pending in self.pending.values()), default=None)


@dataclass(slots=True)
class TargetPeer:
    """A target replica. A request is in at most one of ``sessions``, ``ignored`` and ``refused``."""

    link: Link
    number: int  # of the link, counted from the start of the process: request ids are unique per target only
    resyncs: Resyncs
    table_version: int = 0
    sessions: dict[str, Session] = field(default_factory=dict)
    scores: list[DraftScore] = field(default_factory=list)  # unsent
    ignored: dict[str, None] = field(default_factory=dict)  # others draft for them, and there is no capacity for a shadow
    row_price: float = 0.0  # of the last budget: a target has one price for all requests of a pass
    refused: dict[str, float] = field(default_factory=dict)  # without capacity: time of the last message, oldest first
    refusals: dict[str, int] = field(default_factory=dict)  # unsent empty proposals: committed length that they answer

    def forget(self, request_id: str) -> None:
        for others in (self.ignored, self.refused, self.refusals):
            others.pop(request_id, None)

    @property
    def has_pending(self) -> bool:
        """Whether there are refusals or resyncs to send, or requests that wait for capacity."""
        return bool(self.refusals or self.refused or self.resyncs.pending)
