"""Keeps links to a changing set of addresses: dials them, and redials lost links with exponential backoff."""

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster.config import TlsConfig
from cluster.errors import LinkClosed, OutriderError
from cluster.messages import Hello
from cluster.transport import connect
from cluster.transport.base import Link, LinkDown, Mailbox

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

    def back_off(self, now_s: float) -> None:
        self.link = None
        self.retry_at_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)


class Dialer:
    """Owned by the thread that drains the mailbox, which reports lost links (``link_lost``) and calls ``tick``.

    Dialling waits for the peer's Hello, so it runs on other threads; the new link arrives in the mailbox as a LinkUp.
    """

    def __init__(self, mailbox: Mailbox, hello: Hello, tls: TlsConfig | None = None) -> None:
        self._mailbox = mailbox
        self._hello = hello
        self._tls = tls
        self._peers: dict[str, _Peer] = {}
        self._lost_early: set[Link] = set()  # lost before their dial was collected
        self._threads = _new_executor()

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Addresses to keep links to. Links to other addresses are closed."""
        addresses = set(addresses)
        for address in self._peers.keys() - addresses:
            peer = self._peers.pop(address)
            if peer.link is not None:
                peer.link.close()  # which sends no LinkDown to this end
                self._mailbox.put(LinkDown(peer.link, "its address was removed"))
            if peer.dialling is not None:
                peer.dialling.add_done_callback(_close_dialled)
        for address in addresses - self._peers.keys():
            self._peers[address] = _Peer()

    def link_lost(self, link: Link, now_s: float) -> None:
        """Handles a LinkDown, which may come before ``tick`` has collected the link."""
        for peer in self._peers.values():
            if peer.link is link:
                if now_s - peer.linked_at_s > MAX_PAUSE_S:  # a link lost at once does not reset the backoff
                    peer.pause_s = FIRST_PAUSE_S
                peer.back_off(now_s)
                return
        if any(peer.dialling is not None for peer in self._peers.values()):
            self._lost_early.add(link)

    def tick(self, now_s: float) -> float | None:
        """Collects finished dials and starts those due. Returns when to call again; None: after the next event."""
        for address, peer in self._peers.items():
            if peer.dialling is not None and peer.dialling.done():
                self._collect(address, peer, now_s)
            if peer.link is None and peer.dialling is None and now_s >= peer.retry_at_s:
                self._dial(address, peer, now_s)
        if all(peer.dialling is None for peer in self._peers.values()):
            self._lost_early.clear()  # those left are of addresses that were removed
        idle = [peer.retry_at_s for peer in self._peers.values() if peer.link is None and peer.dialling is None]
        return min(idle, default=None)

    def close(self) -> None:
        self.set_addresses(())
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _dial(self, address: str, peer: _Peer, now_s: float) -> None:
        try:
            link = (address, self._mailbox, self._hello, DIAL_DEADLINE_S, None, self._tls)
            peer.dialling = self._threads.submit(connect, *link)
        except RuntimeError as error:
            # The executor has queued the dial before it failed to start a thread: a new one drops it.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = _new_executor()
            self._dial_failed(address, peer, error, now_s)
            return
        peer.dialling.add_done_callback(lambda _: self._mailbox.wake())

    def _collect(self, address: str, peer: _Peer, now_s: float) -> None:
        assert peer.dialling is not None
        dialled, peer.dialling = peer.dialling, None
        error = LinkClosed("the dial was cancelled") if dialled.cancelled() else dialled.exception()
        if error is not None:
            self._dial_failed(address, peer, error, now_s)
            return
        peer.link, peer.linked_at_s = dialled.result(), now_s
        if peer.link in self._lost_early:
            self._lost_early.discard(peer.link)
            peer.back_off(now_s)

    @staticmethod
    def _dial_failed(address: str, peer: _Peer, error: BaseException, now_s: float) -> None:
        """Handles every kind of error: it must not end the calling thread, which serves."""
        if isinstance(error, OutriderError):
            becomes_rare = peer.pause_s < MAX_PAUSE_S <= 2 * peer.pause_s  # once, after some seconds
            level = logging.WARNING if becomes_rare else logging.INFO
            logger.log(level, "no link to %s yet: %s; next try in %.2f s", address, error, peer.pause_s)
        else:
            logger.warning("no link to %s: next try in %.2f s", address, peer.pause_s, exc_info=error)
        peer.back_off(now_s)


def _new_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=4, thread_name_prefix="dialer")


def _close_dialled(dialled: Future[Link]) -> None:
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()
