"""Keeps links to a changing set of addresses: dials, and dials again with a growing pause when a link is lost."""

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster.errors import LinkClosed, OutriderError
from cluster.messages import Hello
from cluster.transport.base import Link, LinkDown, Mailbox
from cluster.transport.factory import connect

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
DIAL_DEADLINE_S = 5.0


@dataclass(slots=True)
class _Peer:
    link: Link | None = None
    dialling: Future[Link] | None = None
    linked_at_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    retry_at_s: float = 0.0

    def failed(self, now_s: float) -> None:
        """To be dialled again after a pause, the next one longer."""
        self.link = None
        self.retry_at_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)


class Dialer:
    """Owned by the thread that drains the mailbox: it tells of lost links (``lost``) and calls ``tick``.

    Dialling itself happens on a thread of its own, since it waits for the other end's Hello; the link then comes as a
    LinkUp to the mailbox like any other.
    """

    def __init__(self, mailbox: Mailbox, hello: Hello) -> None:
        self._mailbox = mailbox
        self._hello = hello
        self._peers: dict[str, _Peer] = {}
        self._lost_early: set[Link] = set()
        self._threads = _new_executor()

    def want(self, addresses: Iterable[str]) -> None:
        """The addresses to keep links to, from now on. Links to others are closed."""
        wanted = set(addresses)
        for address in set(self._peers) - wanted:
            peer = self._peers.pop(address)
            if peer.link is not None:
                peer.link.close()  # its own end hears nothing of that
                self._mailbox.put(LinkDown(peer.link, "its address is not wanted any more"))
            if peer.dialling is not None:
                peer.dialling.add_done_callback(_hang_up)
        for address in wanted - set(self._peers):
            self._peers[address] = _Peer()

    def lost(self, link: Link, now_s: float) -> None:
        """A LinkDown was read. It may come before the link itself was taken up."""
        for peer in self._peers.values():
            if peer.link is link:
                if now_s - peer.linked_at_s > MAX_PAUSE_S:  # one that is lost at once is no success
                    peer.pause_s = FIRST_PAUSE_S
                peer.failed(now_s)
                return
        if any(peer.dialling is not None for peer in self._peers.values()):
            self._lost_early.add(link)

    def tick(self, now_s: float) -> float | None:
        """Dials what is due and takes up what has been answered. Returns when to call again; None: after the next event."""
        next_s: float | None = None
        for address, peer in self._peers.items():
            if peer.dialling is not None and peer.dialling.done():
                self._take_up(address, peer, now_s)
            if peer.link is None and peer.dialling is None and now_s >= peer.retry_at_s:
                self._dial(address, peer, now_s)
            if peer.link is None and peer.dialling is None:
                next_s = peer.retry_at_s if next_s is None else min(next_s, peer.retry_at_s)
        return next_s

    def close(self) -> None:
        self.want(())
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _dial(self, address: str, peer: _Peer, now_s: float) -> None:
        try:
            peer.dialling = self._threads.submit(connect, address, self._mailbox, self._hello, DIAL_DEADLINE_S)
        except RuntimeError as error:
            # The executor queues a dial before it starts a thread, and would run this one with the next.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = _new_executor()
            self._failed(address, peer, error, now_s)
            return
        peer.dialling.add_done_callback(lambda _: self._mailbox.wake())

    def _take_up(self, address: str, peer: _Peer, now_s: float) -> None:
        assert peer.dialling is not None
        dialled, peer.dialling = peer.dialling, None
        error = LinkClosed("the dial was cancelled") if dialled.cancelled() else dialled.exception()
        if error is None:
            peer.link, peer.linked_at_s = dialled.result(), now_s
            if peer.link in self._lost_early:
                self._lost_early.discard(peer.link)
                peer.failed(now_s)
            return
        self._failed(address, peer, error, now_s)

    @staticmethod
    def _failed(address: str, peer: _Peer, error: BaseException, now_s: float) -> None:
        """Whatever the reason: this runs on the thread that serves, which must not end by a failed dial."""
        if isinstance(error, OutriderError):
            logger.info("no link to %s yet: %s; next try in %.2f s", address, error, peer.pause_s)
        else:
            logger.warning("no link to %s: next try in %.2f s", address, peer.pause_s, exc_info=error)
        peer.failed(now_s)


def _new_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=4, thread_name_prefix="dialer")


def _hang_up(dialled: Future[Link]) -> None:
    """The link of a call that nobody wants any more."""
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()
