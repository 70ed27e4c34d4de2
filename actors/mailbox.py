"""Mailboxes that tell more: whether their reader still reads, and which links it has lost."""

import time
from collections.abc import Sequence

from actors.dialer import Dialer
from cluster.messages import Hello
from cluster.transport.base import Event, LinkDown, Mailbox
from engine.progress import PASSES


class WatchedMailbox(Mailbox):
    """Knows when it was last read. A loop that reads no mail hangs, though its process answers, unless a pass keeps it from
    reading: that gets further with each layer (`engine.progress`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._read_s = time.monotonic()

    def drain(self) -> list[Event]:
        self._read_s = time.monotonic()
        return super().drain()

    def unread_s(self) -> float:
        """Seconds since the last reading, or since a pass of this process last got further."""
        return min(time.monotonic() - self._read_s, PASSES.still_s())


class DialledMailbox(WatchedMailbox):
    """A mailbox whose every reading keeps the links, too: lost ones are noted, due ones dialled.

    So a loop that knows nothing of addresses keeps its links on its own thread, with no second one to lock against.
    """

    def __init__(self, hello: Hello) -> None:
        super().__init__()
        self._dialer = Dialer(self, hello)
        self._wanted: tuple[str, ...] = ()

    def want(self, addresses: Sequence[str]) -> None:
        """Where the targets are, from now on. From any thread."""
        self._wanted = tuple(addresses)
        self.wake()

    def drain(self) -> list[Event]:
        events = super().drain()
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, LinkDown):
                self._dialer.lost(event.link, now_s)
        self._dialer.want(self._wanted)
        self._dialer.tick(now_s)
        return events

    def close(self) -> None:
        self._dialer.close()
