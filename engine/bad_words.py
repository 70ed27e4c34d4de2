"""Sequences of tokens that an output must not hold."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """Which tokens would complete a bad word after the output so far. ``generated``: the output at first."""

    def __init__(self, words: Sequence[tuple[int, ...]], generated: Sequence[int]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._longer: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the last token but one
        for word in words:
            if len(word) > 1:
                self._longer[word[-2]].append(word)
        self._num_needed = max(map(len, words)) - 1  # of the output's end
        self._end: tuple[int, ...] = ()
        self.extend(generated)

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens = (*self._end, *token_ids)
        self._end = tokens[max(0, len(tokens) - self._num_needed) :]

    def completing(self, drafts: Sequence[int], num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows (K,) and the tokens (K,) that may not be chosen there. The last row follows all drafts, each earlier row one
        draft less."""
        tokens = (*self._end, *drafts)
        found = []
        for row in range(num_rows):
            end = len(tokens) - num_rows + 1 + row
            found += [(row, token_id) for token_id in self._always]
            for word in self._longer.get(tokens[end - 1], ()) if end else ():
                if tokens[max(0, end + 1 - len(word)) : end] == word[:-1]:
                    found.append((row, word[-1]))
        rows, token_ids = np.array(found, np.int64).reshape(-1, 2).T
        return rows, token_ids
