"""A suffix automaton that grows token by token: every substring of the texts read so far, and how often each occurred.

A. Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; extended to several texts by starting
each anew at the root. A state stands for the substrings that end at the same places; its suffix link leads to the longest
suffix of them that also ends elsewhere.

    state      0 is the root, the empty string. Texts with different roots have no state in common
    len        of its longest substring; that of its link is one less than the length of its shortest
    count      places where its substrings end"""

from array import array
from collections.abc import Iterable, Iterator

ROOT = 0
_NONE = -1  # inside the arrays only: no link (a root's), no transition

# Counting walks the suffix links of every new place, of which a text in a tight loop has as many as it is long. There the
# counts of short contexts hardly matter.
_MAX_COUNTED_LINKS = 64


class SuffixAutomaton:
    """At most 2 states and 3 transitions per token (Blumer et al.). Only states with several transitions have a dict: that
    makes about 140 bytes per token of natural text, and at most 450."""

    def __init__(self) -> None:
        self._len = array("i")
        self._link = array("i")
        self._count = array("i")
        self._token = array("i")  # of the first transition
        self._next = array("i")
        self._more: dict[int, dict[int, int]] = {}  # the others
        self._num_roots = 0
        self.num_tokens = 0
        self.begin(self.add_root())

    def add_root(self) -> int:
        """For texts that have no substring in common with those of other roots; ``ROOT`` is the first."""
        root = self._add(0)
        self._link[root] = _NONE
        self._num_roots += 1
        return root

    def begin(self, root: int = ROOT) -> None:
        self._root = root
        self.last = root  # the state of the whole text since ``begin``

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._append(token_id)

    def step(self, state: int, token_id: int) -> int | None:
        """The state of the same substring extended by ``token_id``; None if that never occurred."""
        if self._token[state] == token_id:
            return self._next[state]
        more = self._more.get(state)
        return None if more is None else more.get(token_id)

    def suffix(self, state: int) -> int | None:
        """The state of the longest suffix that occurs in more places; None for a root."""
        link = self._link[state]
        return None if link == _NONE else link

    def substring_len(self, state: int) -> int:
        return self._len[state]

    def count(self, state: int) -> int:
        """How often the substrings of a state occurred."""
        return self._count[state]

    def followers(self, state: int) -> Iterator[tuple[int, int]]:
        """(token, state) of every transition."""
        if self._token[state] != _NONE:
            yield self._token[state], self._next[state]
            yield from self._more.get(state, {}).items()

    def walk(self, state: int, match_len: int, token_ids: Iterable[int]) -> tuple[int, int]:
        """The state and length of the longest suffix that occurs of a text, from those before its last ``token_ids``."""
        for token_id in token_ids:
            while (follower := self.step(state, token_id)) is None and self._link[state] != _NONE:
                state = self._link[state]
                match_len = self._len[state]
            if follower is not None:
                state, match_len = follower, match_len + 1
        return state, match_len

    def likeliest(self, state: int) -> tuple[int, int, int, int]:
        """The most frequent next token, of equals the newest: (token, its state, its count, count of all next tokens). The
        last is 0 if there is none."""
        best_id, best, most, total = _NONE, _NONE, 0, 0
        for token_id, follower in self.followers(state):
            num = self._count[follower]
            total += num
            if num >= most:
                most, best_id, best = num, token_id, follower
        return best_id, best, most, total

    def check_integrity(self) -> None:
        assert len(self._len) <= max(2, 2 * self.num_tokens) + self._num_roots, (
            "more states than a suffix automaton may have"
        )
        for state, link in enumerate(self._link):
            if link != _NONE:
                assert self._len[link] < self._len[state], f"state {state} links to {link}, which is not shorter"
                assert self._count[link] >= 1, f"state {link} is reached and never occurred"
            for token_id, follower in self.followers(state):
                assert self._len[follower] > self._len[state], f"{state} -{token_id}-> {follower} does not grow"

    def _append(self, token_id: int) -> None:
        """Blumer's step. The state may exist if the text repeats an earlier one from its start."""
        self.num_tokens += 1
        last = self.last
        known = self.step(last, token_id)
        if known is not None:
            self.last = known if self._len[known] == self._len[last] + 1 else self._split(last, token_id, known)
        else:
            self.last = current = self._add(self._len[last] + 1)
            walker = last
            while walker != _NONE and (follower := self.step(walker, token_id)) is None:
                self._set(walker, token_id, current)
                walker = self._link[walker]
            if walker == _NONE:
                self._link[current] = self._root
            else:
                assert follower is not None
                exact = self._len[follower] == self._len[walker] + 1
                self._link[current] = follower if exact else self._split(walker, token_id, follower)
        self._count_place(self.last)

    def _split(self, state: int, token_id: int, follower: int) -> int:
        """Splits ``follower``: the substrings of ``state`` extended by a token, and their suffixes, also end elsewhere."""
        clone = self._add(self._len[state] + 1)
        for column in (self._link, self._count, self._token, self._next):
            column[clone] = column[follower]
        if follower in self._more:
            self._more[clone] = dict(self._more[follower])
        self._link[follower] = clone
        while state != _NONE and self.step(state, token_id) == follower:
            self._set(state, token_id, clone)
            state = self._link[state]
        return clone

    def _add(self, length: int) -> int:
        columns = (self._len, self._link, self._count, self._token, self._next)
        for column, value in zip(columns, (length, ROOT, 0, _NONE, _NONE), strict=True):
            column.append(value)
        return len(self._len) - 1

    def _set(self, state: int, token_id: int, follower: int) -> None:
        if self._token[state] in (_NONE, token_id):
            self._token[state] = token_id
            self._next[state] = follower
        else:
            self._more.setdefault(state, {})[token_id] = follower

    def _count_place(self, state: int) -> None:
        for _ in range(_MAX_COUNTED_LINKS):
            if self._link[state] == _NONE:
                break
            self._count[state] += 1
            state = self._link[state]
        self._count[self._root] += 1
