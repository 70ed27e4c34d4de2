"""An in-memory network on a virtual clock that delays, reorders, drops, duplicates and cuts, from one seed.

Rounds, links and the ledger take time and messages as data, so one thread can step a whole cluster: equal seeds and
calls give equal runs, and a failing seed can be replayed."""

import heapq
import itertools
import random
import weakref
from collections import Counter
from dataclasses import dataclass

from cluster.errors import InvalidField, LinkFull
from cluster.messages import Message
from cluster.transport.codec import encode_message
from cluster.transport.memory import LocalNetwork, MemoryLink


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities are per message. Delays are uniform between the bounds, so links overtake each other.

    Real links do not drop, duplicate or reorder while they are up; the protocol above must tolerate it anyway."""

    min_delay_s: float = 0.0
    max_delay_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0  # the message may overtake those before it on its own link
    cut: float = 0.0  # the link breaks under this message

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_delay_s <= self.max_delay_s:
            raise InvalidField("min_delay_s", self.min_delay_s, f"must lie between 0 and max_delay_s ({self.max_delay_s})")
        for name in ("drop", "duplicate", "reorder", "cut"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidField(name, getattr(self, name), "must lie between 0 and 1")


class EncodingNetwork(LocalNetwork):
    """Refuses what a real link would."""

    def carry(self, to: MemoryLink, message: Message) -> None:
        encode_message(message, to.other.limits.max_message_bytes)
        super().carry(to, message)


class MemoryNetwork(LocalNetwork):
    """Delivers what is due when ``deliver_until`` moves the clock. Not thread-safe.

    ``faults`` may be replaced at any time, for instance to heal the network at the end of a run. Connecting takes no
    time."""

    def __init__(self, rng: random.Random, faults: Faults | None = None, now_s: float = 0.0) -> None:
        super().__init__()
        self.faults = faults or Faults()
        self.now_s = now_s
        self._rng = rng
        self._sequence = itertools.count()  # what is due at the same time arrives in the order of sending
        self._num_in_flight: Counter[MemoryLink] = Counter()
        self._under_way: list[tuple[float, int, MemoryLink, Message | str]] = []  # a heap; str: the link's end, and why
        self._last_due_s: weakref.WeakKeyDictionary[MemoryLink, float] = weakref.WeakKeyDictionary()
        self._broken: weakref.WeakSet[MemoryLink] = weakref.WeakSet()

    @property
    def next_due_s(self) -> float | None:
        """Time of the next delivery; None if nothing is in flight."""
        return self._under_way[0][0] if self._under_way else None

    def deliver_until(self, now_s: float) -> int:
        """Moves the clock to ``now_s`` (never back) and delivers what is due. Returns the number of deliveries."""
        num_delivered = 0
        while self._under_way and self._under_way[0][0] <= now_s:
            due_s, _, to, what = heapq.heappop(self._under_way)
            self.now_s = max(self.now_s, due_s)
            num_delivered += 1
            if isinstance(what, str):
                to.end(what)
            else:
                self._num_in_flight[to] -= 1
                if to not in self._broken:
                    to.arrive(what)
        self.now_s = max(self.now_s, now_s)
        return num_delivered

    def cut(self, link: MemoryLink) -> None:
        """Breaks a link: messages in flight are lost, and each end is told a delay later."""
        for end in (link, link.other):
            if end not in self._broken:
                self._broken.add(end)
                self._send_off(end, f"the link to {end.peer.role} {end.peer.name!r} was cut", overtakes=True)

    def carry(self, to: MemoryLink, message: Message) -> None:
        encode_message(message, to.other.limits.max_message_bytes)  # refuses what a real link would
        to.check_room(self._num_in_flight[to])
        faults, chance = self.faults, self._rng.random
        # Every message draws the same number of times, so that changing one probability leaves the other draws alone.
        is_cut, is_dropped = chance() < faults.cut, chance() < faults.drop
        is_doubled, overtakes = chance() < faults.duplicate, chance() < faults.reorder
        if is_cut:
            self.cut(to)
        if to in self._broken or is_dropped:
            return
        self._send_off(to, message, overtakes)
        if is_doubled:
            try:
                to.check_room(self._num_in_flight[to])
            except LinkFull:
                return  # no room for a second copy
            self._send_off(to, message, overtakes)

    def carry_end(self, to: MemoryLink, reason: str) -> None:
        if to not in self._broken:
            self._send_off(to, reason, overtakes=False)

    def _send_off(self, to: MemoryLink, what: Message | str, overtakes: bool) -> None:
        due_s = self.now_s + self._rng.uniform(self.faults.min_delay_s, self.faults.max_delay_s)
        if not overtakes:
            due_s = max(due_s, self._last_due_s.get(to, due_s))
            self._last_due_s[to] = due_s
        if not isinstance(what, str):
            self._num_in_flight[to] += 1
        heapq.heappush(self._under_way, (due_s, next(self._sequence), to, what))
