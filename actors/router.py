"""The router's process: every slot it reads the targets' reports, decides, and publishes a routing table.

It is off the data path: while it is down, targets keep serving with the last table.
"""

import threading
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Protocol

from actors.router_memory import RouterMemory
from actors.worker import LoopActor, LoopThread
from cluster.config import Config
from cluster.state import open_store
from cluster.types import RoutingTable
from router.router import Router, SlotReport


class Targets(Protocol):
    """The router's access to the targets."""

    def reports(self, deadline_s: float) -> list[SlotReport]:
        """Reports of the targets that answer within the deadline."""

    def publish(self, table: RoutingTable) -> None:
        """Sends the table to all targets without waiting."""


class RouterActor(LoopActor):
    """Runs a Router against the targets, slot by slot. ``remembers``: the configured state store keeps what it learns."""

    def __init__(self, config: Config, router: Router, targets: Targets, remembers: bool = False) -> None:
        super().__init__()
        self._config = config
        self._router = deepcopy(router)  # arrays that Ray hands over are read-only, and a policy learns in place
        self._remembers = remembers
        self._memory: RouterMemory | None = None
        self._targets = targets
        self._slot_s = config.router.slot_ms / 1e3
        self._wake = threading.Event()
        self._slot_began_s = time.monotonic()

    def _start_loop(self) -> LoopThread:
        if self._remembers:
            state = self._config.cluster
            self._memory = RouterMemory(open_store(state.state, state.namespace), self._config)
        return LoopThread("router", partial(self.run, clock=time.monotonic), self._wake.set, on_end=self._close_memory)

    def run(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        if self._memory is not None:
            self._memory.recall(self._router.policy)
        while not stop.is_set():
            start_s = self._slot_began_s = clock()
            table = self._router.slot(self._targets.reports(deadline_s=self._slot_s))
            if table is not None:
                self._targets.publish(table)
            if self._memory is not None:
                self._memory.save(self._router.policy, clock())
            self._wake.wait(max(0.0, start_s + self._slot_s - clock()))
            self._wake.clear()

    def stalled_s(self) -> float:
        """Seconds since the last slot began."""
        return time.monotonic() - self._slot_began_s

    def set_draining(self, names: frozenset[str]) -> None:
        """Drafters that get no requests. Takes effect with the next slot, which begins now."""
        self._router.set_draining(names)
        self._wake.set()

    def set_offered(self, names: frozenset[str], on_fallback: frozenset[str]) -> None:
        """As `router.router.Router.set_offered`."""
        self._router.set_offered(names, on_fallback)

    def notes(self) -> tuple[str, ...]:
        """Faults to show to users."""
        fault = self._memory.fault if self._memory is not None else None
        return () if fault is None else (fault,)

    def load_demand(self) -> dict[str, int]:
        """How many requests the last slot would have given to each drafter that is not in memory."""
        return dict(self._router.load_demand)

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()


class ModelChainScheduler(RouterActor):
    """The router of the policy `chain`; its process has a name of its own."""
