"""Rank 0 of a tensor parallel target: it serves the round, and the other ranks follow."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch

from cluster.errors import RankLost
from cluster.messages import Open
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from engine.forward import CausalModel
from engine.grammar.compiling import Grammars
from engine.models.weights import open_weights
from engine.native import NativeLimits, NativeTarget, PassWatch
from engine.tensor_parallel.ranks import RankGroup
from engine.tensor_parallel.rounds import LeadingWatch, RankChange, RankRound, encode
from router.plan import Span


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
        grammars: Grammars | None = None,
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
