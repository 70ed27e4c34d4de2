"""Nested repetitions, whose cost multiplies: found in a regular expression or in EBNF before it is compiled."""

import re

MAX_REPEATS = 16384  # of the innermost of nested repetitions

# A class without an end takes all that follows: to look for its end again at each of its brackets takes quadratic time.
CLASS = r"\[\^?(?:\](?:\\.|[^\]\\])*+\]|(?:\\.|[^\]\\])*+(?:\]|\\?\Z))"
# A class, an escape, a bracket, or a repetition; in EBNF also a quoted text.
_OF_REGEX = rf"{CLASS}|\\.|[()]|\{{(\d+)(,(\d*))?\}}"
_REGEX = re.compile(_OF_REGEX, re.DOTALL)
_EBNF = re.compile(rf'"(?:\\.|[^"\\])*"|{_OF_REGEX}', re.DOTALL)


def repeats_fault(source: str, *, is_regex: bool) -> str | None:
    """Why a source is refused; None: it is not."""
    inner = [1]  # the most repeats within each open group
    last, end = 1, 0  # within the last group, and where it ends
    for found in (_REGEX if is_regex else _EBNF).finditer(source):
        if found[0] == "(":
            inner.append(1)
        elif found[0] == ")":
            last, end = inner.pop() if len(inner) > 1 else 1, found.end()
            inner[-1] = max(inner[-1], last)
        elif found[1] is not None:
            is_group = not source[end : found.start()].strip()
            repeats = (last if is_group else 1) * max(1, int(found[3] or found[1]))
            if repeats > MAX_REPEATS:
                return f"repeats a part up to {repeats} times by nested repetitions, at most {MAX_REPEATS} are possible"
            inner[-1] = max(inner[-1], repeats)
    return None
