"""Finds stop strings in streamed text."""

from collections.abc import Sequence


class StopMatcher:
    """Releases text until a stop string is complete; holds back the longest suffix that may begin one.

    The stop string that ends first ends the text; among several, the longest. The result does not depend on how the text is
    split. One Knuth-Morris-Pratt automaton per stop string: linear time.

        released    | held back
        ------------+------------------------------------------------------------------
        "The answer"| "\\n\\nUs"     (with the stop string "\\n\\nUser:")
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include``: keep the stop string in the text."""
        self._include = include
        self._stops = tuple(stops)
        self._failures = tuple(_failure_table(stop) for stop in stops)
        self._states = [0] * len(self._stops)  # length of each stop string's prefix that the text ends with
        self._held = ""
        self.matched = False

    def feed(self, text: str, *, armed: bool = True) -> str:
        """The released text; after a match ``matched`` is true and the text ends. ``armed`` False: ignores stop strings that
        end in ``text``.
        """
        if not self._stops:
            return text
        known = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            longest = 0
            for i, stop in enumerate(self._stops):
                failure, state = self._failures[i], self._states[i]
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    longest = max(longest, state if armed else 0)
                    state = failure[state - 1]
                self._states[i] = state
            if longest:
                self.matched, self._held = True, ""
                return known[: position if self._include else position - longest]
        num_held = max(self._states)
        self._held = known[len(known) - num_held :]
        return known[: len(known) - num_held]

    def flush(self) -> str:
        """The held-back text, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _failure_table(pattern: str) -> list[int]:
    """``table[i]``: the longest proper prefix of ``pattern`` that ``pattern[:i + 1]`` ends with."""
    table = [0] * len(pattern)
    state = 0
    for i in range(1, len(pattern)):
        while state and pattern[state] != pattern[i]:
            state = table[state - 1]
        if pattern[state] == pattern[i]:
            state += 1
        table[i] = state
    return table
