"""Mailboxes that report whether their owner's loop still runs, and that keep links to a set of addresses."""

import time
from collections.abc import Sequence

from cluster.config import TlsConfig
from cluster.messages import Hello
from cluster.transport.base import Event, Link, LinkDown, Mailbox
from cluster.transport.dialer import Dialer
from engine.loop_status import PASSES


class MonitoredMailbox(Mailbox):
    """Measures the time since its loop's last progress: a drain, or a finished layer of a pass (`engine.loop_status`)."""

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

    def __init__(self, hello: Hello, addresses: Sequence[str] = (), tls: TlsConfig | None = None) -> None:
        super().__init__()
        self._dialer = Dialer(self, hello, tls)
        self._addresses = tuple(addresses)
        self._dial_at_s: float | None = None

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
        self._dial_at_s = self._dialer.tick(now_s)
        return events

    def wait(self, timeout_s: float) -> bool:
        """Ends early when a dial is due."""
        due_s = timeout_s if self._dial_at_s is None else max(0.0, self._dial_at_s - time.monotonic())
        return super().wait(min(timeout_s, due_s))

    def drop(self, link: Link) -> None:
        """Closes a link, on the loop's thread; dials again later."""
        link.close()
        self._dialer.link_lost(link, time.monotonic())

    def close(self) -> None:
        self._dialer.close()
