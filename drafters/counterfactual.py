"""Counterfactual acceptance: what a drafter would have had accepted for a request that another drives.

The pass that computes the committed tokens also yields what the drafter would have drafted, with the same noise, so a score
costs no pass of its own and equals that of really drafting. After a draft at ``base`` with ``matched`` right tokens the next
virtual round begins at ``base + matched + 1``, as if the drafter drove the request; rounds that begin with the driver's are
biased (``ngram`` scored 2.83 tokens a round with ``table`` driving, and had 1.71 itself).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages import DraftScore
from cluster.types import PRICE_SHARE, DraftTerms
from drafters.protocol import Demand, Drafter, TokenByToken

MAX_ROWS = 32  # per pass in spare time, for which a draft may have to wait


@dataclass(slots=True)
class _VirtualDraft:
    """A virtual draft, of at most ``limit`` tokens. ``token_ids`` None: the drafter drafts token by token."""

    base_len: int
    limit: int
    token_ids: tuple[int, ...] | None
    survival: float = 1.0


class Shadow:
    """A request that another drafter drives: its unscored committed tokens, and its virtual rounds. Pure.

    0 ......... scored_len ......... committed_len
    | the drafter knows | pending                  |
    """

    def __init__(self, key: str, request_id: str, scored_len: int, max_draft_len: int, end_len: int) -> None:
        self.key = key
        self.request_id = request_id
        self.scored_len = scored_len
        self.pending: list[int] = []
        self.row_price = 0.0  # of the target, as of the last budget that it sent
        self._next_base_len = scored_len
        self._max_draft_len = max_draft_len
        self._end_len = end_len
        self._draft: _VirtualDraft | None = None

    def commit(self, token_ids: Sequence[int]) -> None:
        self.pending.extend(token_ids)

    @property
    def begins(self) -> bool:
        """Whether a virtual round begins at ``scored_len``."""
        return self._draft is None and self._next_base_len == self.scored_len

    @property
    def limit(self) -> int:
        """Draft tokens of a round that begins at ``scored_len``; the last token of a request needs no draft."""
        return max(0, min(self._max_draft_len, self._end_len - self.scored_len - 1))

    def begin(self, token_ids: tuple[int, ...] | None = None) -> None:
        """Begins a round at ``scored_len`` with a draft; None: ``advance`` gets the drafter's choice for each token."""
        if self.limit:
            self._draft = _VirtualDraft(self.scored_len, self.limit, token_ids)
        else:
            self._next_base_len = self.scored_len + 1

    def skip(self) -> list[int]:
        """Returns the pending tokens, which stay unscored; the next round begins behind them."""
        skipped, self.pending = self.pending, []
        self.scored_len += len(skipped)
        self._next_base_len = self.scored_len
        self._draft = None
        return skipped

    def advance(self, chosen: int | None = None, confidence: float = 1.0, min_survival: float = 0.0) -> DraftScore | None:
        """Consumes the next pending token, where a token-by-token drafter chose ``chosen``. Returns the score of a draft
        that ends here; one that ended early has one more position scored than matched.
        """
        token_id = self.pending.pop(0)
        position, self.scored_len = self.scored_len, self.scored_len + 1
        draft = self._draft
        if draft is None:
            return None
        num_matched = position - draft.base_len
        if draft.token_ids is not None:
            chosen = draft.token_ids[num_matched] if num_matched < len(draft.token_ids) else None
        draft.survival *= confidence
        if chosen != token_id:
            num_scored = num_matched + 1
        else:
            num_matched += 1
            is_whole = num_matched == draft.limit
            if not is_whole and draft.survival >= min_survival:
                return None
            num_scored = num_matched + (not is_whole)
        self._draft = None
        self._next_base_len = draft.base_len + num_matched + 1
        return DraftScore(self.request_id, draft.base_len, num_matched, num_scored)


def score_shadows(drafter: Drafter, waiting: Sequence[Shadow]) -> list[tuple[str, DraftScore]]:
    """Scores shadows with unscored tokens: a pass of at most MAX_ROWS rows, or a batch of drafts. Returns scores by key."""
    token_by_token = drafter.capabilities.token_by_token
    if token_by_token is None:
        return _score_drafts(drafter, waiting)
    return _score_choices(drafter, token_by_token, waiting)


def _score_choices(
    drafter: Drafter, token_by_token: TokenByToken, waiting: Sequence[Shadow]
) -> list[tuple[str, DraftScore]]:
    """One pass over the committed tokens yields the choice at each of them."""
    queried, num_rows = [], 0
    for shadow in waiting:
        token_ids = tuple(shadow.pending[: MAX_ROWS - num_rows])
        if token_ids:
            queried.append((shadow, Demand(shadow.key, len(token_ids), token_ids)))
            num_rows += len(token_ids)
    answers = token_by_token.choose_at_each([demand for _, demand in queried], MAX_ROWS)
    found: list[tuple[str, DraftScore]] = []
    for (shadow, demand), answer in zip(queried, answers, strict=True):
        if answer is None:
            continue
        if len(answer.token_ids) < demand.num_tokens:  # no answer is possible
            drafter.extend(shadow.key, shadow.skip())
            continue
        for chosen, confidence in zip(answer.token_ids, answer.confidences, strict=True):
            if shadow.begins:
                shadow.begin()
            least = max(token_by_token.min_survival, PRICE_SHARE * shadow.row_price)
            if (score := shadow.advance(chosen, confidence, least)) is not None:
                found.append((shadow.key, score))
        drafter.extend(shadow.key, demand.ahead)
    return found


def _score_drafts(drafter: Drafter, waiting: Sequence[Shadow]) -> list[tuple[str, DraftScore]]:
    """Real drafts, one virtual round of each request at a time."""
    beginning = [shadow for shadow in waiting if shadow.begins]
    demands = [Demand(shadow.key, shadow.limit, terms=DraftTerms(row_price=shadow.row_price)) for shadow in beginning]
    for shadow, draft in zip(beginning, drafter.propose(demands) if demands else (), strict=True):
        shadow.begin(draft.token_ids)
    found: list[tuple[str, DraftScore]] = []
    for shadow in waiting:
        start_len, token_ids = shadow.scored_len, tuple(shadow.pending)
        while shadow.pending and not shadow.begins:
            if (score := shadow.advance()) is not None:
                found.append((shadow.key, score))
        drafter.extend(shadow.key, token_ids[: shadow.scored_len - start_len])
    return found
