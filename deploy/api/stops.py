"""Stop strings, found in text that comes in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until one of the stop strings is complete, and never lets a part of one through before it knows.

    The stop string whose last character comes first ends the text; of several that end there, the longest. So the result
    does not depend on how the text is cut into pieces. One Knuth-Morris-Pratt automaton per stop string: linear in the text.

        passed on   | held back: the longest end of the text that begins a stop string
        ------------+------------------------------------------------------------------
        "The answer"| "\\n\\nUs"     (with the stop string "\\n\\nUser:")
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include``: the stop string that ends the text is part of it."""
        self._include = include
        self._stops = tuple(stops)
        self._failures = tuple(_failure_table(stop) for stop in stops)
        self._states = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""
        self.matched = False

    def feed(self, text: str, *, armed: bool = True) -> str:
        """What of the text so far is certain to be output. ``armed`` False: a stop string that ends in ``text`` is none.

        After a match there is nothing more to come, and ``matched`` is true.
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
        """What was held back and has proved to be ordinary text."""
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
