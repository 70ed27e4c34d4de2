"""Of a request that others draft for: the drafts that would have been, and how far they were right. Pure bookkeeping."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a drafter that goes token by token ends a draft of its own accord: before a token of less confidence, or behind
    the token with which the whole draft is less likely right."""

    min_confidence: float = 0.0
    min_survival: float = 0.0


NEVER = Stopping()


@dataclass(slots=True)
class _Virtual:
    """A draft that would have begun at ``base_len``, of at most ``limit`` tokens. ``token_ids``: of a drafter that drafts
    whole; None: it goes token by token."""

    base_len: int
    limit: int
    token_ids: tuple[int, ...] | None = None
    survival: float = 1.0


class Shadowing:
    """Of a request that others draft for: what the drafter has not been told yet, and its drafts that would have been. Pure.

    0 ......... scored_len ......... committed_len
    | the drafter knows | pending, one commit after the other |
    """

    def __init__(self, scored_len: int, max_draft_len: int, end_len: int) -> None:
        self.scored_len = scored_len
        self.pending: list[int] = []
        self._bases: deque[int] = deque()  # of pending commits: there a draft would have begun
        self._max_draft_len = max_draft_len
        self._end_len = end_len
        self._virtual: list[_Virtual] = []

    def commit(self, token_ids: Sequence[int]) -> None:
        self._bases.append(self.scored_len + len(self.pending))
        self.pending.extend(token_ids)

    @property
    def begins(self) -> bool:
        """Whether a draft would have begun at ``scored_len``."""
        return bool(self._bases) and self._bases[0] == self.scored_len

    @property
    def next_len(self) -> int:
        """Pending tokens up to where the next draft would have begun."""
        later = next((base for base in self._bases if base > self.scored_len), None)
        return len(self.pending) if later is None else later - self.scored_len

    def begin(self, token_ids: tuple[int, ...] | None = None) -> None:
        base_len = self._bases.popleft()
        limit = min(self._max_draft_len, self._end_len - base_len - 1)
        if limit > 0:
            self._virtual.append(_Virtual(base_len, limit, token_ids))

    def skip(self) -> list[int]:
        """Gives up scoring what is pending; returns it."""
        skipped, self.pending = self.pending, []
        self.scored_len += len(skipped)
        self._bases.clear()
        self._virtual.clear()
        return skipped

    def advance(self, chosen: int | None, confidence: float, stopping: Stopping) -> list[tuple[int, int, int]]:
        """The next pending token is scored: a drafter that goes token by token ``chosen`` there.

        Returns, of the drafts that this decides, base, right tokens, and positions reached.
        """
        token_id = self.pending.pop(0)
        position, self.scored_len = self.scored_len, self.scored_len + 1
        decided, left = [], []
        for draft in self._virtual:
            num_right = position - draft.base_len
            if draft.token_ids is not None:
                right = num_right < len(draft.token_ids) and draft.token_ids[num_right] == token_id
                sure = True
            else:
                right = chosen == token_id and confidence >= stopping.min_confidence
                draft.survival *= confidence
                sure = draft.survival >= stopping.min_survival
            if not right:
                decided.append((draft.base_len, num_right, num_right + 1))
            elif num_right + 1 == draft.limit:
                decided.append((draft.base_len, num_right + 1, num_right + 1))
            elif not sure:  # it would have said no more
                decided.append((draft.base_len, num_right + 1, num_right + 2))
            else:
                left.append(draft)
        self._virtual = left
        return decided
