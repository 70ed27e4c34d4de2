"""The mail of a target: links going up and down, requests of gateways, proposals of drafters."""

from collections.abc import Callable

from cluster.message_checks import Inspection, sound_part
from cluster.messages import ProposalRound, Role, SubmitRound
from cluster.transport.base import Link, LinkDown, LinkUp, Mailbox, Received
from cluster.types import Request
from engine.drafter_sessions import DrafterSessions
from engine.gateway_sessions import GatewaySessions


class TargetInbox:
    """Drops the unsound parts of messages, and closes the links of peers that send too many of them. ``submit``: called with
    each new request and the link that it came by."""

    def __init__(
        self,
        mailbox: Mailbox,
        vocab_size: int,
        gateways: GatewaySessions,
        drafters: DrafterSessions,
        submit: Callable[[Link, Request, float], None],
    ) -> None:
        self._mailbox = mailbox
        mailbox.check = lambda message: sound_part(message, vocab_size)
        self._gateways = gateways
        self._drafters = drafters
        self._submit = submit
        self._inspection = Inspection("the target")

    def read(self, now_s: float, after_pass: bool) -> None:
        """Args: ``after_pass``: mail may have waited for the end of a pass."""
        for event in self._mailbox.drain():
            match event:
                case Received():
                    self._receive(event, now_s, after_pass)
                case LinkUp(link) if link.peer.role is Role.GATEWAY:
                    self._gateways.link_up(link)
                case LinkUp(link):
                    self._drafters.link_up(link)
                case LinkDown(link, reason):
                    self._link_down(link, reason)
        self._drafters.learning.predict_survival()

    def _receive(self, received: Received, now_s: float, after_pass: bool) -> None:
        link, message = received.link, received.message
        if not (self._gateways.knows(link) or self._drafters.knows(link)):
            return  # it went down before its mail was read
        num_unsound = self._inspection.num_unsound
        if received.faults:
            self._inspection.note(link, received.faults)
        match message, link.peer.role:
            case SubmitRound(), Role.GATEWAY:
                for request in message.submits:
                    self._submit(link, request, now_s)
                for request_id in message.aborts:
                    self._gateways.abort(link, request_id)
            case ProposalRound(), Role.DRAFTER:
                faults = self._drafters.receive(link, message, received.arrived_s, after_pass)
                if faults:
                    self._inspection.note(link, faults)
                self._drafters.learning.unsound(link.peer.name, self._inspection.num_unsound - num_unsound)
            case _:
                self._close(link, f"it sent a {type(message).__name__}, which no {link.peer.role} sends to a target")
        if self._inspection.must_go(link):
            self._close(link, "it sent too many unsound messages")

    def _close(self, link: Link, reason: str) -> None:
        link.close()
        self._link_down(link, reason)

    def _link_down(self, link: Link, reason: str) -> None:
        self._inspection.forget(link)
        if link.peer.role is Role.GATEWAY:
            self._gateways.link_down(link)
        else:
            self._drafters.link_down(link, reason)
