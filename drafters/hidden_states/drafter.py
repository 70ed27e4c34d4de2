"""The DSpark drafter: it caches the projected features of every open request, and drafts one block for each at once."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo
from drafters.cache_sharing import evict, parts_that_fit
from drafters.hidden_states.adapter import apply_adapter
from drafters.hidden_states.block_backbone import Backbone
from drafters.hidden_states.checkpoint import TargetRows, load_network
from drafters.hidden_states.features import Features
from drafters.hidden_states.sequential import Block, SequentialStage
from drafters.protocol import Capabilities, Demand, Draft
from engine.batch_layout import PackedSpan
from engine.device import to_device
from engine.factory import DTYPES, make_gumbel_argmax
from engine.kv_blocks import BlockLedger
from engine.sampling import Sampler, SamplingState
from engine.target import FeatureSpan
from profiler.calibration import Calibration, TemperatureScaling


@dataclass(slots=True)
class _DSparkSession:
    token_ids: list[int]  # committed
    state: SamplingState
    stop_ids: frozenset[int]
    scaling: TemperatureScaling
    margin_scaling: TemperatureScaling | None
    salt: str  # of the cache


@dataclass(frozen=True, slots=True)
class _BlockJob:
    demand: Demand
    anchor: int  # position of the last committed token
    num_tokens: int


class DSparkDrafter:
    """Not thread-safe.

    The cache holds positions 0 .. computed_len of each request's context, projected. A block writes its keys and values
    behind them and is rolled back. When blocks run out, the least recently drafted request loses its context, which is
    projected again when needed. A request whose features the target has not computed gets an empty draft.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        backbone: Backbone,
        sequential: SequentialStage,
        features: Features,
        calibration: Calibration | None = None,
        *,
        num_blocks: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._backbone = backbone
        self._sequential = sequential
        self._features = features
        self._calibration = calibration or Calibration()
        self._cache = backbone.new_cache(num_blocks)
        self._no_features = torch.zeros(1, backbone.config.feature_size, dtype=backbone.dtype, device=backbone.device)
        self._ledger = BlockLedger(num_blocks, self._cache.block_len)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sessions: OrderedDict[str, _DSparkSession] = OrderedDict()  # least recently drafted first
        self._config = config = backbone.config
        self._block_size = config.block_size
        self._masks = (config.mask_token_id,) * (config.block_size - 1)
        self._max_len = min(config.shape.max_len, num_blocks * self._cache.block_len)
        if self._max_len <= self._block_size:
            raise InvalidField("num_blocks", num_blocks, f"must hold more than a block of {self._block_size} tokens")

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.release(request_id)
        sampling = replace(sampling, top_logprobs=None)  # not needed for drafts
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_token_ids)
        state = SamplingState(sampling, token_ids, prompt_len)
        scalings = self._calibration.of(sampling.temperature), self._calibration.with_margins_of(sampling.temperature)
        self._sessions[request_id] = _DSparkSession(list(token_ids), state, stop_ids, *scalings, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        session = self._sessions[request_id]
        session.token_ids.extend(token_ids)
        session.state.extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = {demand.request_id: Draft(demand.request_id, (), ()) for demand in demands}
        jobs = [job for demand in demands if (job := self._job(demand)) is not None]
        for part in parts_that_fit(jobs, lambda job: job.anchor + self._block_size, self._ledger):
            drafts.update((draft.request_id, draft) for draft in self._draft(part))
        return [drafts[demand.request_id] for demand in demands]

    def release(self, request_id: str) -> None:
        if self._sessions.pop(request_id, None) is not None and request_id in self._ledger:
            self._ledger.release(request_id)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        for request_id, session in self._sessions.items():
            assert len(session.state) == len(session.token_ids), f"{request_id!r}: sampling state out of step"
            if request_id in self._ledger:
                computed_len = self._ledger.computed_len(request_id)
                assert computed_len < len(session.token_ids), f"{request_id!r}: features beyond the anchor"

    def _job(self, demand: Demand) -> _BlockJob | None:
        session = self._sessions[demand.request_id]
        anchor = len(session.token_ids) - 1
        num_tokens = min(demand.num_tokens, self._block_size - len(demand.ahead))
        ended = any(token_id in session.stop_ids for token_id in demand.ahead)
        if num_tokens <= 0 or ended or anchor + self._block_size > self._max_len:
            return None
        return _BlockJob(demand, anchor, num_tokens)

    def _draft(self, part: Sequence[_BlockJob]) -> list[Draft]:
        self._make_room(part)
        part, last_features = self._catch_up(part)
        if not part:
            return []
        sessions = [self._sessions[job.demand.request_id] for job in part]
        blocks = [
            Block(
                session.token_ids[job.anchor],
                session.state,
                job.demand.ahead,
                job.num_tokens,
                session.stop_ids,
                session.scaling,
                session.margin_scaling,
                least_survival=job.demand.terms.least_survival,
            )
            for job, session in zip(part, sessions, strict=True)
        ]
        self._sequential.draft(self._run(part, last_features), blocks)
        return [
            Draft(job.demand.request_id, tuple(block.token_ids), tuple(block.confidences))
            for job, block in zip(part, blocks, strict=True)
        ]

    def _catch_up(self, part: Sequence[_BlockJob]) -> tuple[list[_BlockJob], Tensor | None]:
        """Projects the missing parts of the contexts in one pass. Returns the jobs with a complete context, and the features
        before their anchors if the backbone reads them."""
        starts = [self._ledger.computed_len(job.demand.request_id) for job in part]
        # The last position is read again for the block's inputs, even if it is projected already.
        again = self._config.anchor_input
        wanted = [
            FeatureSpan(job.demand.request_id, min(start, max(0, job.anchor - 1)) if again else start, job.anchor)
            for start, job in zip(starts, part, strict=True)
        ]
        known = [span.start == span.stop for span in wanted]
        asked = [span for span, is_known in zip(wanted, known, strict=True) if not is_known]
        held, rows = self._features.read_hidden_states(asked) if asked else ([], self._no_features)
        answers = iter(held)
        is_ready = [is_known or next(answers) for is_known in known]  # else partly prefilled or preempted
        rows = torch.cat([self._no_features, rows.to(self._backbone.dtype)])  # row 0: of a request without context
        ready, spans, checkpoints, projected, last = [], [], [], [], []
        end = 1
        for job, start, span in compress(zip(part, starts, wanted, strict=True), is_ready):
            ready.append(job)
            begin, end = end, end + span.stop - span.start
            last.append(end - 1 if job.anchor else 0)
            if start < job.anchor:
                token_ids = self._sessions[span.request_id].token_ids[start : job.anchor]
                checkpoints.append(self._ledger.speculate(span.request_id, token_ids))
                spans.append(PackedSpan(start, token_ids, self._ledger.block_table(span.request_id)))
                projected.append(np.arange(begin + start - span.start, end))
        if spans:
            self._backbone.project(spans, rows[to_device(np.concatenate(projected), rows.device)], self._cache)
            for checkpoint in checkpoints:
                self._ledger.commit(checkpoint, len(checkpoint.token_ids))
        return ready, rows[to_device(np.array(last), rows.device)] if ready and self._config.anchor_input else None

    def _run(self, part: Sequence[_BlockJob], last_features: Tensor | None) -> Tensor:
        """h of all blocks. Their keys and values are in the cache only during the pass."""
        spans, checkpoints = [], []
        for job in part:
            request_id = job.demand.request_id
            token_ids = (self._sessions[request_id].token_ids[job.anchor], *self._masks)
            checkpoints.append(self._ledger.speculate(request_id, token_ids))
            spans.append(PackedSpan(job.anchor, token_ids, self._ledger.block_table(request_id)))
        try:
            return self._backbone.run(spans, last_features, self._cache)
        finally:
            for checkpoint in checkpoints:
                self._ledger.commit(checkpoint, 0)

    def _make_room(self, part: Sequence[_BlockJob]) -> None:
        """Opens every request of ``part`` in the ledger, and evicts others, least recently drafted first, until it fits."""
        needed = 0
        for job in part:
            request_id = job.demand.request_id
            self._sessions.move_to_end(request_id)
            if request_id not in self._ledger:
                session = self._sessions[request_id]
                self._ledger.open(request_id, session.token_ids, session.salt)
            missing = job.anchor + self._block_size - self._ledger.computed_len(request_id)
            needed += self._ledger.num_blocks_needed(request_id, missing)
        evict(self._ledger, self._sessions, needed, {job.demand.request_id for job in part})


def load_dspark(
    folder: Path,
    rows: TargetRows | None,
    dtype: str,
    target: ModelInfo,
    device: torch.device,
    features: Features,
    *,
    num_blocks: int,
    calibration: Calibration | None = None,
    min_survival: float = 0.0,
    adapter: Path | None = None,
) -> DSparkDrafter:
    """``rows`` as of ``load_network``; ``adapter``: merged into its weights.

    Raises as ``load_network`` and ``apply_adapter``, and InvalidField if the cache does not hold a block.
    """
    kind, int8 = DTYPES[dtype], dtype == "int8"
    network = load_network(folder, rows, kind if adapter is None else torch.float32)
    if adapter is not None:
        apply_adapter(adapter, network)
    kernel = make_gumbel_argmax(target.vocab_size, torch.float32, device) if device.type == "cuda" else None
    sampler = Sampler(target.vocab_size, target.eos_token_ids, kernel)
    return DSparkDrafter(
        Backbone(network, kind, device, int8=int8),
        SequentialStage(network, kind, device, sampler, min_survival, int8=int8),
        features,
        calibration,
        num_blocks=num_blocks,
        eos_token_ids=target.eos_token_ids,
    )
