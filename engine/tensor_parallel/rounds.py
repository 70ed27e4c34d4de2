"""What rank 0 sends to the other ranks before a pass: requests opened and released since the last one, and the spans.

The ranks run the same ``NativeTarget`` on the same calls, so that ledgers, sampling states and chosen tokens agree.
"""

from contextlib import suppress
from dataclasses import dataclass

from cluster.errors import OutOfBlocks
from cluster.messages import Open
from cluster.transport import wire_pb2 as wire
from cluster.transport.codec_fields import decoder_of, encoder_of
from cluster.types import Request
from engine.loop_status import PASSES
from engine.native import NativeTarget
from engine.tensor_parallel.ranks import RankGroup
from router.plan import Span


@dataclass(frozen=True, slots=True)
class RankChange:
    """A request is opened, or the one of that id is released."""

    open: Open | None = None
    release: str | None = None


@dataclass(frozen=True, slots=True)
class RankRound:
    """``changes`` in the order of the calls. ``ends``: the last round."""

    changes: tuple[RankChange, ...] = ()
    spans: tuple[Span, ...] = ()
    ends: bool = False


_SENT = ("request_id", "base_len", "token_ids", "num_drafts", "samples")  # of a span: no rank is told outcomes


def encode(message: RankRound) -> bytes:
    changes = map(encoder_of(RankChange), message.changes)
    spans = [wire.Span(**{name: getattr(span, name) for name in _SENT}) for span in message.spans]
    return wire.RankRound(
        changes=[wire.RankChange(**one) for one in changes], spans=spans, ends=message.ends
    ).SerializeToString()


def decode(data: bytes) -> RankRound:
    message = wire.RankRound.FromString(data)
    spans = [
        Span.bound(one.request_id, one.base_len, tuple(one.token_ids), one.num_drafts, one.samples) for one in message.spans
    ]
    return RankRound(tuple(map(decoder_of(RankChange), message.changes)), tuple(spans), message.ends)


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
            with suppress(OutOfBlocks):  # as on rank 0, which plans again
                self._engine.execute(received.spans)
            self._is_waiting = True

    def stalled_s(self) -> float:
        """Seconds since the pass in progress last advanced. May be called from any thread."""
        return 0.0 if self._is_waiting else PASSES.still_s()


def _request(opened: Open) -> Request:
    prompt, salt = opened.token_ids[: opened.prompt_len], opened.cache_salt
    return Request(opened.request_id, prompt, opened.sampling, arrival_s=0.0, cache_salt=salt)
