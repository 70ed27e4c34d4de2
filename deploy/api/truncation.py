"""``truncation: "auto"`` of the Responses API: the oldest messages give way until a conversation fits."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


async def fitting(messages: Messages, fits: Callable[[Messages], Awaitable[bool]]) -> Messages:
    """As many of the newest messages as fit, after the system messages at the beginning; all if nothing fits.

    A tool's result is not kept without the call before it. ``fits`` is asked a logarithmic number of times.
    """
    num_kept = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    firsts = [i for i in range(num_kept, len(messages)) if messages[i]["role"] != "tool"]

    def from_first(i: int) -> Messages:
        return [*messages[:num_kept], *messages[firsts[i] :]]

    low, high = 0, len(firsts)  # those before ``low`` are too long, those from ``high`` on fit
    while low < high:
        middle = (low + high) // 2
        if await fits(from_first(middle)):
            high = middle
        else:
            low = middle + 1
    return from_first(high) if high < len(firsts) else messages
