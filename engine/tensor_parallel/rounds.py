"""What rank 0 sends to the other ranks before a pass: requests opened and released since the last one, and the spans; and
in a pass with early exit, which rows go on.

The ranks run the same ``NativeTarget`` on the same calls, so that ledgers, sampling states and chosen tokens agree.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cluster.errors import RankLost
from cluster.messages import Open
from cluster.transport import wire_pb2 as wire
from cluster.transport.codec import decoder_of, encoder_of
from cluster.types import Request
from engine.batch_layout import StayingRows
from engine.loop_status import PASSES
from engine.native import NativeTarget, PassWatch
from engine.sampling import SamplingState
from engine.tensor_parallel.ranks import RankGroup
from router.plan import Span


@dataclass(frozen=True, slots=True)
class RankChange:
    """A request is opened, or the one of that id is released."""

    open: Open | None = None
    release: str | None = None


@dataclass(frozen=True, slots=True)
class RankRound:
    """``changes`` in the order of the calls. ``depths``: where rank 0 tells which rows of the pass go on; `()`: all do.
    ``ends``: the last round."""

    changes: tuple[RankChange, ...] = ()
    spans: tuple[Span, ...] = ()
    depths: tuple[int, ...] = ()
    ends: bool = False


_ALL = b"all"  # rows go on
_SENT = ("request_id", "base_len", "token_ids", "num_drafts", "samples")  # of a span: no rank is told outcomes


def encode(message: RankRound) -> bytes:
    changes = map(encoder_of(RankChange), message.changes)
    spans = [wire.Span(**{name: getattr(span, name) for name in _SENT}) for span in message.spans]
    return wire.RankRound(
        changes=[wire.RankChange(**one) for one in changes], spans=spans, depths=message.depths, ends=message.ends
    ).SerializeToString()


def decode(data: bytes) -> RankRound:
    message = wire.RankRound.FromString(data)
    spans = [
        Span.bound(one.request_id, one.base_len, tuple(one.token_ids), one.num_drafts, one.samples) for one in message.spans
    ]
    return RankRound(tuple(map(decoder_of(RankChange), message.changes)), tuple(spans), tuple(message.depths), message.ends)


@dataclass(slots=True)
class LeadingWatch:
    """The watch of a pass on rank 0, which tells the others what it decides."""

    watch: PassWatch
    ranks: RankGroup

    @property
    def depths(self) -> Collection[int]:
        return self.watch.depths

    def look(self, depth: int, residual: Tensor, delta: Tensor | None) -> StayingRows | None:
        staying = self.watch.look(depth, residual, delta)
        self.ranks.send(_ALL if staying is None else staying.span_lens.tobytes())
        return staying

    def nums_drafts(self) -> list[int]:
        return self.watch.nums_drafts()

    def learn(self) -> None:
        self.watch.learn()


@dataclass(slots=True)
class FollowingWatch:
    """The watch and the ``Exits`` of one pass on a rank other than 0, which is told by rank 0 which rows go on."""

    ranks: RankGroup
    depths: tuple[int, ...]
    span_lens: NDArray[np.int64] = field(init=False)
    _nums_compute: NDArray[np.int64] = field(init=False)

    def watch(self, spans: Sequence[Span], states: Mapping[str, SamplingState]) -> Self:
        self.span_lens = np.array([len(span.token_ids) for span in spans])
        self._nums_compute = np.array([span.num_compute for span in spans])
        return self

    def look(self, depth: int, residual: Tensor, delta: Tensor | None) -> StayingRows | None:
        received = self.ranks.receive(in_pass=True)
        if received == _ALL:
            return None
        if len(received) != self.span_lens.nbytes:
            raise RankLost("rank 0 left the pass")
        span_lens = np.frombuffer(received, np.int64)
        starts, self.span_lens = np.cumsum(self.span_lens) - self.span_lens, span_lens
        return StayingRows.of(starts, span_lens, residual.device)

    def nums_drafts(self) -> list[int]:
        nums: list[int] = (self.span_lens - self._nums_compute).tolist()
        return nums

    def learn(self) -> None:
        """Rank 0 does."""


class Follower:
    """Computes every pass of rank 0 on another rank."""

    def __init__(self, engine: NativeTarget, ranks: RankGroup) -> None:
        self._engine = engine
        self._ranks = ranks
        self._is_waiting = True

    def run(self) -> None:
        """Returns when rank 0 ends the group. Raises RankLost: another rank was lost."""
        while True:
            received = decode(self._ranks.receive())
            PASSES.advanced()
            self._is_waiting = False
            for change in received.changes:
                if change.open is not None:
                    self._engine.open(_request(change.open), change.open.token_ids)
                if change.release is not None:
                    self._engine.release(change.release)
            if received.ends:
                return
            self._engine.exit_early(FollowingWatch(self._ranks, received.depths) if received.depths else None)
            self._engine.execute(received.spans)  # which has blocks for them: rank 0 has reserved as many
            self._is_waiting = True

    def stalled_s(self) -> float:
        """Seconds since the pass in progress last advanced. May be called from any thread."""
        return 0.0 if self._is_waiting else PASSES.still_s()


def _request(opened: Open) -> Request:
    prompt, salt = opened.token_ids[: opened.prompt_len], opened.cache_salt
    return Request(opened.request_id, prompt, opened.sampling, arrival_s=0.0, cache_salt=salt)
