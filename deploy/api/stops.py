"""Finds stop strings in streamed text."""

from collections.abc import Sequence


class StopMatcher:
    """Releases text until a stop string is complete; holds back the longest suffix that may begin one.

    The stop string that ends first ends the text; among several, the longest, however the text is split.

        released    | held back
        ------------+------------------------------------------------------------------
        "The answer"| "\\n\\nUs"     (with the stop string "\\n\\nUser:")
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include``: keep the stop string in the text."""
        self._include = include
        self._overlaps = dict.fromkeys(stops, 0)  # length of each stop string's proper prefix that the text ends with
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def feed(self, text: str, *, armed: bool = True) -> str:
        """The released text; after a match ``matched`` is set and the text ends. ``armed`` False: ignores stop strings that
        end in ``text``.
        """
        known = self._held + text
        if armed:
            starts = {stop: known.find(stop, max(0, len(self._held) + 1 - len(stop))) for stop in self._overlaps}
            matches = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
            if matches:
                end, start, self.matched = min(matches)
                self._held = ""
                return known[: end if self._include else start]
        for stop, overlap in self._overlaps.items():
            longest = min(len(stop) - 1, overlap + len(text))  # bounded by the last overlap: linear time
            self._overlaps[stop] = next(num for num in range(longest, -1, -1) if known.endswith(stop[:num]))
        num_released = len(known) - max(self._overlaps.values(), default=0)
        self._held = known[num_released:]
        return known[:num_released]

    def flush(self) -> str:
        """The held-back text, at the end of the answer."""
        held, self._held = self._held, ""
        return held
