"""Counterfactual acceptance: what a drafter would have had accepted for a request that another one drives (DESIGN, idea
5).

A drafter with spare time keeps in step with the committed tokens. The pass that computes them also yields what it would
have drafted, with the same noise, so a score costs no pass of its own and equals that of really drafting.

The virtual rounds are the drafter's own: after a draft at ``base`` with ``matched`` right tokens, the next begins at
``base + matched + 1``, as if the drafter drove the request. Virtual rounds that begin with the driver's rounds are
biased: with ``table`` driving, ``ngram`` scored 2.83 tokens a round; driving itself it had 1.71.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages import DraftScore
from drafters.protocol import NEVER, Demand, Drafter, Stopping, TokenByToken

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

    Args:
        key: the drafter's name for the request.
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
        """Begins a round at ``scored_len``.

        Args:
            token_ids: the draft; None: ``advance`` gets the drafter's choice for each token.
        """
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

    def advance(self, chosen: int | None, confidence: float, stopping: Stopping) -> DraftScore | None:
        """Consumes the next pending token, where a token-by-token drafter chose ``chosen``. Returns the score of a draft
        that ends here.

        A draft that ended early, by a wrong token or by itself, has one more position scored than matched.
        """
        token_id = self.pending.pop(0)
        position, self.scored_len = self.scored_len, self.scored_len + 1
        draft = self._draft
        if draft is None:
            return None
        num_matched = position - draft.base_len
        if draft.token_ids is not None:
            matches = num_matched < len(draft.token_ids) and draft.token_ids[num_matched] == token_id
            goes_on = True
        else:
            matches = chosen == token_id and confidence >= stopping.min_confidence
            draft.survival *= confidence
            goes_on = draft.survival >= stopping.min_survival
        if not matches:
            return self._decide(draft, num_matched, num_matched + 1)
        if num_matched + 1 == draft.limit:
            return self._decide(draft, num_matched + 1, num_matched + 1)
        if not goes_on:
            return self._decide(draft, num_matched + 1, num_matched + 2)
        return None

    def _decide(self, draft: _VirtualDraft, num_matched: int, num_scored: int) -> DraftScore:
        self._draft = None
        self._next_base_len = draft.base_len + num_matched + 1
        return DraftScore(self.request_id, draft.base_len, num_matched, num_scored)


class Scorer:
    """Scores shadows in spare time, in small pieces. Not thread-safe: its loop owns it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def work(self, waiting: Sequence[Shadow]) -> list[tuple[str, DraftScore]]:
        """One piece for shadows with unscored tokens: a pass of at most MAX_ROWS rows, or a batch of drafts.

        Returns:
            The scores by key.
        """
        token_by_token = self._drafter.capabilities.token_by_token
        return self._propose(waiting) if token_by_token is None else self._choose(token_by_token, waiting)

    def _choose(self, drafter: TokenByToken, waiting: Sequence[Shadow]) -> list[tuple[str, DraftScore]]:
        """For token-by-token drafters: one pass over the committed tokens yields the choice at each of them."""
        asked, num_rows = [], 0
        for shadow in waiting:
            token_ids = tuple(shadow.pending[: MAX_ROWS - num_rows])
            if token_ids:
                asked.append((shadow, Demand(shadow.key, len(token_ids), token_ids)))
                num_rows += len(token_ids)
        answers = drafter.choose_at_each([demand for _, demand in asked], MAX_ROWS)
        found: list[tuple[str, DraftScore]] = []
        for (shadow, demand), answer in zip(asked, answers, strict=True):
            if answer is None:
                continue
            if len(answer.token_ids) < demand.num_tokens:  # no answer is possible
                self._drafter.extend(shadow.key, shadow.skip())
                continue
            for chosen, confidence in zip(answer.token_ids, answer.confidences, strict=True):
                if shadow.begins:
                    shadow.begin()
                _note(shadow, shadow.advance(chosen, confidence, drafter.stopping), found)
            self._drafter.extend(shadow.key, demand.ahead)
        return found

    def _propose(self, waiting: Sequence[Shadow]) -> list[tuple[str, DraftScore]]:
        """For other drafters: real drafts, one virtual round of each request at a time."""
        beginning = [shadow for shadow in waiting if shadow.begins]
        demands = [Demand(shadow.key, shadow.limit, row_price=shadow.row_price) for shadow in beginning]
        for shadow, draft in zip(beginning, self._drafter.propose(demands) if demands else (), strict=True):
            shadow.begin(draft.token_ids)
        found: list[tuple[str, DraftScore]] = []
        for shadow in waiting:
            start_len, token_ids = shadow.scored_len, tuple(shadow.pending)
            while shadow.pending and not shadow.begins:
                _note(shadow, shadow.advance(None, 1.0, NEVER), found)
            self._drafter.extend(shadow.key, token_ids[: shadow.scored_len - start_len])
        return found


def _note(shadow: Shadow, score: DraftScore | None, found: list[tuple[str, DraftScore]]) -> None:
    if score is not None:
        found.append((shadow.key, score))
