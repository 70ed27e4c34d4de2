"""What a drafter would have proposed for requests that others draft for, and how far that was right (DESIGN idea 5).

The drafter keeps in step with what is committed, in its spare time; the pass that computes the new tokens says what it would
have drafted before each of them, with the same noise. So its score is that of really having drafted, at no pass of its own.
"""

from collections.abc import Iterable, Sequence

from cluster.messages import Score
from drafters.following import Followed
from drafters.protocol import Demand, Drafter, Foreseeing
from drafters.shadow import NEVER

MAX_ROWS = 32  # of a pass in spare time: a draft that is wanted meanwhile waits for no more than that


class Scorer:
    """Spare work of a drafter, in small pieces. Not thread-safe: its loop owns it."""

    def __init__(self, drafter: Drafter, max_draft_len: int) -> None:
        self._drafter = drafter
        self._max_draft_len = max_draft_len

    def work(self, shadows: Iterable[Followed]) -> list[tuple[Followed, Score]] | None:
        """One piece: a pass of at most MAX_ROWS rows, or a batch of drafts. None: there was nothing to do."""
        waiting = [followed for followed in shadows if followed.shadow is not None and followed.shadow.pending]
        if not waiting:
            return None
        found: list[tuple[Followed, Score]] = []
        if isinstance(self._drafter, Foreseeing):
            self._foresee(self._drafter, waiting, found)
        else:
            self._propose(waiting, found)
        return found

    def _foresee(self, drafter: Foreseeing, waiting: Sequence[Followed], found: list[tuple[Followed, Score]]) -> None:
        """A drafter that goes token by token: its pass over what was committed says all."""
        asked, num_rows = [], 0
        for followed in waiting:
            assert followed.shadow is not None
            token_ids = tuple(followed.shadow.pending[: MAX_ROWS - num_rows])
            if token_ids:
                asked.append((followed, Demand(followed.key, len(token_ids), token_ids)))
                num_rows += len(token_ids)
        answers = drafter.foresee([demand for _, demand in asked], MAX_ROWS)
        for (followed, demand), answer in zip(asked, answers, strict=True):
            shadow = followed.shadow
            assert shadow is not None
            if answer is None:
                continue
            if len(answer.token_ids) < demand.num_tokens:  # it cannot say
                self._drafter.extend(followed.key, shadow.skip())
                continue
            for chosen, confidence in zip(answer.token_ids, answer.confidences, strict=True):
                if shadow.begins:
                    shadow.begin()
                self._note(followed, shadow.advance(chosen, confidence, drafter.stopping), found)
            self._drafter.extend(followed.key, demand.ahead)

    def _propose(self, waiting: Sequence[Followed], found: list[tuple[Followed, Score]]) -> None:
        """Any other really drafts, a commit of each request at a time."""
        shadows = [(followed, followed.shadow) for followed in waiting if followed.shadow is not None]
        beginning = [(followed, shadow) for followed, shadow in shadows if shadow.begins]
        demands = [Demand(followed.key, self._max_draft_len) for followed, _ in beginning]
        for (_, shadow), draft in zip(beginning, self._drafter.propose(demands) if demands else (), strict=True):
            shadow.begin(draft.token_ids)
        for followed, shadow in shadows:
            token_ids = shadow.pending[: shadow.next_len]
            for _ in token_ids:
                self._note(followed, shadow.advance(None, 1.0, NEVER), found)
            self._drafter.extend(followed.key, token_ids)

    @staticmethod
    def _note(followed: Followed, decided: Iterable[tuple[int, int, int]], found: list[tuple[Followed, Score]]) -> None:
        for base_len, num_matched, num_scored in decided:
            found.append((followed, Score(followed.request_id, base_len, num_matched, num_scored)))
