"""DSpark as a drafter: it keeps the projected features of every request it follows, and drafts a block for all at once."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from cluster.errors import InvalidField
from cluster.types import SamplingParams
from drafters.dspark.backbone import Backbone
from drafters.dspark.sequential import Block, SequentialStage
from drafters.protocol import Capabilities, Demand, Draft
from engine.layout import PackedSpan
from engine.ledger import Ledger
from engine.sampling import SamplingState


class Features(Protocol):
    """The target's hidden states after the drafter's layers, for requests by the drafter's names for them."""

    def read_hidden_states(self, request_id: str, start: int, stop: int) -> Tensor:
        """[stop - start, feature_size] of committed positions.

        Raises:
            LookupError: not all of them are computed, or the request is not held.
        """


@dataclass(slots=True)
class _DSparkSession:
    token_ids: list[int]  # committed
    state: SamplingState
    ends: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Job:
    """A demand as far as it can be met."""

    demand: Demand
    anchor: int  # position of the last committed token
    num_tokens: int


class DSparkDrafter:
    """Not thread-safe: its loop owns it, on the target's thread.

    Of a request the cache holds positions 0 .. computed_len of the context, projected. A block writes its own keys and
    values behind them and is rolled back. When blocks run out, the request that was asked about least recently loses its
    context, and projects it anew when it is asked about again: the target still has the features.

    A request whose features are not there, because the target has not computed them yet, gets an empty draft.

    Args:
        features: of the target.
        num_blocks: of the cache.
        eos_token_ids: the target's.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        backbone: Backbone,
        sequential: SequentialStage,
        features: Features,
        *,
        num_blocks: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._backbone = backbone
        self._sequential = sequential
        self._features = features
        self._cache = backbone.new_cache(num_blocks)
        self._ledger = Ledger(num_blocks, self._cache.block_len)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._followed: OrderedDict[str, _DSparkSession] = OrderedDict()  # least recently asked about first
        self._config = config = backbone.config
        self._block_size = config.block_size
        self._masks = (config.mask_token_id,) * (config.block_size - 1)
        self._max_len = min(config.shape.max_len, num_blocks * self._cache.block_len)
        if self._max_len <= self._block_size:
            raise InvalidField(
                "num_blocks", num_blocks, f"the cache must hold more than a block of {self._block_size} tokens"
            )

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self.release(request_id)
        sampling = replace(sampling, top_logprobs=None)  # which nobody would read
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_token_ids)
        self._followed[request_id] = _DSparkSession(list(token_ids), SamplingState(sampling, token_ids, prompt_len), ends)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        followed = self._followed[request_id]
        followed.token_ids.extend(token_ids)
        followed.state.extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = {demand.request_id: Draft(demand.request_id, (), ()) for demand in demands}
        jobs = [job for demand in demands if (job := self._job(demand)) is not None]
        for part in self._parts(jobs):
            for draft in self._draft(part):
                drafts[draft.request_id] = draft
        return [drafts[demand.request_id] for demand in demands]

    def release(self, request_id: str) -> None:
        if self._followed.pop(request_id, None) is not None and request_id in self._ledger:
            self._ledger.release(request_id)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        for request_id, followed in self._followed.items():
            assert len(followed.state) == len(followed.token_ids), f"{request_id!r}: sampling state out of step"
            if request_id in self._ledger:
                computed_len = self._ledger.computed_len(request_id)
                assert computed_len < len(followed.token_ids), f"{request_id!r}: features beyond the anchor"

    def _job(self, demand: Demand) -> _Job | None:
        """What can be drafted of a demand; None: nothing."""
        followed = self._followed[demand.request_id]
        anchor = len(followed.token_ids) - 1
        num_tokens = min(demand.num_tokens, self._block_size - len(demand.ahead))
        ended = any(token_id in followed.ends for token_id in demand.ahead)
        if num_tokens <= 0 or ended or anchor + self._block_size > self._max_len:
            return None
        return _Job(demand, anchor, num_tokens)

    def _parts(self, jobs: Sequence[_Job]) -> "Sequence[Sequence[_Job]]":
        """The jobs in parts that the cache holds at once."""
        parts: list[list[_Job]] = []
        num_left = 0
        for job in jobs:
            needed = -(-(job.anchor + self._block_size) // self._ledger.block_len)
            if not parts or needed > num_left:
                parts.append([])
                num_left = self._ledger.num_blocks
            parts[-1].append(job)
            num_left -= needed
        return parts

    def _draft(self, part: Sequence[_Job]) -> list[Draft]:
        self._make_room(part)
        part, last_features = self._catch_up(part)
        if not part:
            return []
        blocks = []
        for job in part:
            followed = self._followed[job.demand.request_id]
            anchor = followed.token_ids[job.anchor]
            blocks.append(Block(anchor, followed.state, job.demand.ahead, job.num_tokens, followed.ends))
        self._sequential.draft(self._run(part, last_features), blocks)
        return [
            Draft(job.demand.request_id, tuple(block.token_ids), tuple(block.confidences))
            for job, block in zip(part, blocks, strict=True)
        ]

    def _catch_up(self, part: Sequence[_Job]) -> tuple[list[_Job], Tensor | None]:
        """Projects what is missing of the contexts, in one pass.

        Returns the jobs whose context is whole now, and if the backbone reads them the features before their anchors.
        """
        ready, spans, checkpoints, features, last_features = [], [], [], [], []
        for job in part:
            request_id = job.demand.request_id
            start = self._ledger.computed_len(request_id)
            # The last of them may be known already, but is read again for the block's inputs.
            first = min(start, max(0, job.anchor - 1)) if self._config.anchor_input else start
            try:
                rows = self._read(request_id, first, job.anchor)
            except LookupError:
                continue  # prefilled in part, or preempted: the target decodes it plainly until it is computed
            ready.append(job)
            last_features.append(rows[-1:] if job.anchor else rows.new_zeros(1, self._config.feature_size))
            if start < job.anchor:
                token_ids = self._followed[request_id].token_ids[start : job.anchor]
                checkpoints.append(self._ledger.speculate(request_id, token_ids))
                spans.append(PackedSpan(start, token_ids, self._ledger.block_table(request_id)))
                features.append(rows[start - first :])
        if spans:
            self._backbone.project(spans, torch.cat(features), self._cache)
            for checkpoint in checkpoints:
                self._ledger.commit(checkpoint, len(checkpoint.token_ids))
        return ready, torch.cat(last_features) if ready and self._config.anchor_input else None

    def _read(self, request_id: str, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, self._config.feature_size, dtype=self._backbone.dtype, device=self._backbone.device)
        return self._features.read_hidden_states(request_id, start, stop).to(self._backbone.dtype)

    def _run(self, part: Sequence[_Job], last_features: Tensor | None) -> Tensor:
        """h of all blocks. Their keys and values lie behind the contexts only while they are computed."""
        spans, checkpoints = [], []
        for job in part:
            request_id = job.demand.request_id
            token_ids = (self._followed[request_id].token_ids[job.anchor], *self._masks)
            checkpoints.append(self._ledger.speculate(request_id, token_ids))
            spans.append(PackedSpan(job.anchor, token_ids, self._ledger.block_table(request_id)))
        try:
            return self._backbone.run(spans, last_features, self._cache)
        finally:
            for checkpoint in checkpoints:
                self._ledger.commit(checkpoint, 0)

    def _make_room(self, part: Sequence[_Job]) -> None:
        """Holds every request of ``part``, and evicts others, the least recently asked about first, until it fits."""
        needed = 0
        inside = {job.demand.request_id for job in part}
        for job in part:
            request_id = job.demand.request_id
            self._followed.move_to_end(request_id)
            if request_id not in self._ledger:
                self._ledger.open(request_id, self._followed[request_id].token_ids)
            missing = job.anchor + self._block_size - self._ledger.computed_len(request_id)
            needed += self._ledger.num_blocks_needed(request_id, missing)
        for request_id in self._followed:
            if needed <= self._ledger.num_free_blocks:
                break
            if request_id in self._ledger and request_id not in inside:
                self._ledger.release(request_id)
