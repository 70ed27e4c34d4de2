"""A drafter as a process: its loop on a thread, and links to every target replica, redialled when lost."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from actors.mailbox import DialledMailbox
from actors.threads import set_threads
from actors.worker import LoopThread
from cluster.config import DrafterConfig
from cluster.messages import Hello, Role
from cluster.types import ModelInfo
from drafters.loop import DrafterLoop, LoopTelemetry
from drafters.roster import RosterLimits


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    name: str
    pid: int


class DrafterActor:
    """Owns a drafter and its DrafterLoop. Every method may be called from any thread.

    Lookup drafters import no torch, so that such a process stays small.

    Raises:
        OutriderError: the drafter cannot be made, or its tokenizer is not the target's; says why.
    """

    def __init__(self, config: DrafterConfig, name: str, target: ModelInfo, addresses: Sequence[str], token: str) -> None:
        if config.has_model:
            set_threads(config.resources.threads)
        from drafters.registry import make_drafter

        self._name = name
        hello = Hello(Role.DRAFTER, name, target.vocab_size, target.tokenizer_fingerprint, token)
        mailbox = self._mailbox = DialledMailbox(hello)
        mailbox.want(addresses)
        limits = RosterLimits(capacity=config.capacity, max_draft_len=config.max_draft_len)
        self._loop = DrafterLoop(name, make_drafter(config, target), mailbox, limits, ahead_len=config.ahead_len)
        self._thread = LoopThread(f"drafter {name}", self._loop, mailbox.wake, on_end=mailbox.close)

    def info(self) -> DrafterInfo:
        return DrafterInfo(self._name, os.getpid())

    def wait_end(self) -> str:
        return self._thread.wait_end()

    def unread_s(self) -> float:
        return self._mailbox.unread_s()

    def want(self, addresses: Sequence[str]) -> None:
        """The targets have moved."""
        self._mailbox.want(addresses)

    def telemetry(self) -> LoopTelemetry:
        return self._loop.telemetry()

    def stop(self) -> None:
        """Its targets decode plainly from then on."""
        self._thread.stop()
