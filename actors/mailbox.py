"""Mailboxes that report whether their owner's loop still runs, and that keep links to a set of addresses."""

import time
from collections.abc import Sequence

from actors.dialer import Dialer
from cluster.messages import Hello
from cluster.transport.base import Event, LinkDown, Mailbox
from engine.liveness import PASSES


class MonitoredMailbox(Mailbox):
    """Measures the time since its loop last made progress, so that a hung loop is found although its process answers.

    Progress is a drain, or a finished layer of the pass in progress (`engine.liveness`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._drained_s = time.monotonic()

    def drain(self) -> list[Event]:
        self._drained_s = time.monotonic()
        return super().drain()

    def stalled_s(self) -> float:
        """Seconds since the last progress."""
        return min(time.monotonic() - self._drained_s, PASSES.still_s())


class DialingMailbox(MonitoredMailbox):
    """A mailbox that also keeps links: each drain notes lost links and dials those due, on the loop's own thread."""

    def __init__(self, hello: Hello) -> None:
        super().__init__()
        self._dialer = Dialer(self, hello)
        self._addresses: tuple[str, ...] = ()

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Addresses of the targets. May be called from any thread."""
        self._addresses = tuple(addresses)
        self.wake()

    def drain(self) -> list[Event]:
        events = super().drain()
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, LinkDown):
                self._dialer.link_lost(event.link, now_s)
        self._dialer.set_addresses(self._addresses)
        self._dialer.tick(now_s)
        return events

    def close(self) -> None:
        self._dialer.close()
