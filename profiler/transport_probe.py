"""Round trips between two processes over each transport: 1 KB, and a realistic round of 32 requests.

The time is that of the data plane: encoding, queue, kernel, decoding, and waking the owner's thread.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from cluster.errors import LinkClosed
from cluster.messages import DraftRound, Extend, Hello, Message, ProposalRound, Role
from cluster.transport.base import Link, LinkDown, LinkUp, Mailbox, Received
from cluster.transport.codec import encode
from cluster.transport.factory import connect, listen
from cluster.types import Proposal

TRIPS_PER_TURN = 200
WARM_UP_TRIPS = 100
DRAFT_LEN = 7
DEADLINE_S = 30.0

_TARGET = Hello(Role.TARGET, "target", 49152, "bench")


def down_round(num_requests: int) -> DraftRound:
    """A target's message after a round: its committed tokens."""
    extends = tuple(Extend(f"chatcmpl-{index:024x}-0", 700 + index, (284, 1093, 28, 20417)) for index in range(num_requests))
    return DraftRound(12, extends=extends)


def up_round(down: DraftRound) -> ProposalRound:
    """A drafter's answer: a proposal of DRAFT_LEN tokens per request."""
    token_ids, confidences = tuple(range(9000, 9000 + DRAFT_LEN)), (0.75,) * DRAFT_LEN
    proposals = [
        Proposal(extend.request_id, extend.base_len + len(extend.token_ids), token_ids, confidences, "model")
        for extend in down.extends
    ]
    return ProposalRound(down.table_version, tuple(proposals))


def one_kb() -> DraftRound:
    """A message of 1024 bytes on the wire."""
    overhead = len(encode(DraftRound(1, releases=("x" * 1000,)))) - 1000
    return DraftRound(1, releases=("x" * (1024 - overhead),))


def round_trips(num_turns: int) -> Mapping[str, list[float]]:
    """Seconds of every round trip, by transport and payload."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-"))
        mailbox = Mailbox()
        addresses: list[str] = []
        for address in (f"unix://{folder}/link", "grpc://127.0.0.1:0"):
            listener = listen(address, mailbox, _TARGET)
            stack.callback(listener.close)
            addresses.append(listener.address)
        drafter = stack.enter_context(subprocess.Popen([sys.executable, "-m", __name__, *addresses]))
        stack.callback(drafter.kill)
        trips: dict[str, Callable[[], float]] = {}
        for name, link in _links(mailbox, len(addresses)).items():
            for kind, message in (("1kb", one_kb()), ("round_32", down_round(32))):
                trips[f"{name}_{kind}"] = partial(_trip, link, mailbox, message)
        for trip in trips.values():
            for _ in range(WARM_UP_TRIPS):
                trip()
        times: dict[str, list[float]] = {name: [] for name in trips}
        for _ in range(num_turns):
            for name, trip in trips.items():
                times[name] += [trip() for _ in range(TRIPS_PER_TURN)]
        return times


def _links(mailbox: Mailbox, num_links: int) -> dict[str, Link]:
    """The drafter's links, by transport."""
    links: dict[str, Link] = {}
    until_s = time.monotonic() + DEADLINE_S
    while len(links) < num_links:
        if not mailbox.wait(until_s - time.monotonic()):
            raise LinkClosed(f"the other process opened {len(links)} of {num_links} links within {DEADLINE_S:g} s")
        links |= {event.link.peer.name: event.link for event in mailbox.drain() if isinstance(event, LinkUp)}
    return links


def _trip(link: Link, mailbox: Mailbox, message: Message) -> float:
    start_s = time.perf_counter()
    link.send(message)
    _await_answer(link, mailbox)
    return time.perf_counter() - start_s


def _await_answer(link: Link, mailbox: Mailbox) -> None:
    if not mailbox.wait(DEADLINE_S):
        raise LinkClosed(f"{link.peer.name} did not answer within {DEADLINE_S:g} s")
    for event in mailbox.drain():
        if isinstance(event, LinkDown):
            raise LinkClosed(event.reason)
        if isinstance(event, Received):
            return
    raise AssertionError("a mailbox with events held none")


def answer(addresses: list[str]) -> None:
    """Runs the other process: answers every round on the links until they are closed."""
    mailbox = Mailbox()
    for address in addresses:
        hello = replace(_TARGET, role=Role.DRAFTER, name=address.partition("://")[0])
        connect(address, mailbox, hello)
    num_links = len(addresses)
    while num_links:
        mailbox.wait(DEADLINE_S)
        for event in mailbox.drain():
            match event:
                case Received(link, DraftRound() as down):
                    link.send(up_round(down) if down.extends else down)
                case LinkDown():
                    num_links -= 1


if __name__ == "__main__":
    answer(sys.argv[1:])
