"""Rank 0 of a tensor parallel target, which serves the round, and the other ranks, which follow it. Before a pass it sends
them the requests opened and released since the last one, and the spans; in a pass with early exit also which rows go on.

The ranks run the same ``NativeTarget`` on the same calls, so that ledgers, sampling states and chosen tokens agree.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.errors import RankLost
from cluster.messages import Open
from cluster.sampling_params import SamplingParams
from cluster.transport import wire_pb2 as wire
from cluster.transport.codec import decoder_of, encoder_of
from cluster.types import Request
from engine.batch_layout import StayingRows
from engine.forward import CausalModel
from engine.loop_status import PASSES
from engine.models.weights import open_weights
from engine.native import NativeLimits, NativeTarget, PassWatch
from engine.sampling import SamplingState
from engine.tensor_parallel.ranks import RankGroup
from router.plan import Span

if TYPE_CHECKING:
    from engine.grammar.compiling import Grammars


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


class LeadingTarget(NativeTarget):
    """A ``NativeTarget`` whose every pass is computed by all ranks. Hidden states are whole on every rank, since they are
    sums; this one keeps them for drafters in its process.

    ``execute`` raises RankLost: another rank ended or hangs. Nothing can be computed from then on.

    Args:
        folder: of the model.
        end_ranks: ends the processes of the other ranks, if this process started them.
    """

    def __init__(
        self,
        model: CausalModel,
        limits: NativeLimits,
        folder: Path,
        ranks: RankGroup,
        feature_layers: Sequence[int] = (),
        end_ranks: Callable[[], None] = lambda: None,
        grammars: "Grammars | None" = None,
    ) -> None:
        super().__init__(model, limits, feature_layers=feature_layers, grammars=grammars)
        self._folder = folder
        self._ranks = ranks
        self._end_ranks = end_ranks
        self._changes: list[RankChange] = []  # since the last pass

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        computed_len = super().open(request, token_ids)
        prompt_len, salt = len(request.prompt_token_ids), request.cache_salt
        # The others gather the logits of prompts, and are told what rank 0 chooses.
        sampling = SamplingParams(1, prompt_logprobs=request.sampling.prompt_logprobs)
        opened = Open(request.id, tuple(token_ids), prompt_len, sampling, cache_salt=salt)
        self._changes.append(RankChange(open=opened))
        return computed_len

    def release(self, request_id: str) -> None:
        if request_id in self._states:
            self._changes.append(RankChange(release=request_id))
        super().release(request_id)

    @cached_property
    def embedding(self) -> torch.Tensor:
        """The whole table, read again: [vocab, hidden]."""
        model = self.model
        with open_weights(self._folder, model.config, model.dtype) as weights:
            return weights.embedding().to(model.device, copy=True)

    def close(self) -> None:
        """Ends the other ranks."""
        with suppress(RankLost):
            self._send(RankRound(ends=True))
        self._end_ranks()

    def _watch(self, spans: Sequence[Span]) -> PassWatch | None:
        watch = super()._watch(spans)
        self._send(RankRound(tuple(self._changes), tuple(spans), () if watch is None else tuple(watch.depths)))
        return None if watch is None else LeadingWatch(watch, self._ranks)

    def _send(self, message: RankRound) -> None:
        self._ranks.send(encode(message))
        self._changes.clear()
