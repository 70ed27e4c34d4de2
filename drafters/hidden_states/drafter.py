"""A drafter that reads hidden states: it caches what it computes of every open request's context, and drafts for all at
once."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from cluster.types import MAX_DRAFT_LEN, ModelInfo
from drafters.hidden_states.checkpoint import TargetRows, load_network
from drafters.hidden_states.families import make_stage
from drafters.hidden_states.features import Features
from drafters.hidden_states.sequential import Block, SequentialStage
from drafters.hidden_states.stage import BegunStates, DraftRows, Stage
from drafters.protocol import Capabilities, Demand, Draft
from engine.factory import DTYPES, make_gumbel_argmax
from engine.kv_blocks import BlockLedger, evict, parts_that_fit
from engine.kv_cache import KvCache
from engine.sampling import Sampler, SamplingState
from engine.target import FeatureSpan
from profiler.calibration import Calibration, TemperatureScaling

_MAX_ROWS = 2048  # of contexts, computed at once: what a pass takes of a GPU's memory is bounded


@dataclass(slots=True)
class _Session:
    token_ids: list[int]  # committed
    state: SamplingState
    stop_ids: frozenset[int]
    scaling: TemperatureScaling
    margin_scaling: TemperatureScaling | None
    salt: str  # of the cache


@dataclass(frozen=True, slots=True)
class _Job:
    demand: Demand
    last: int  # row of the last committed token, with which the draft begins
    num_tokens: int
    num_rows: int  # of the draft

    @property
    def request_id(self) -> str:
        return self.demand.request_id


class HiddenStateDrafter:
    """Not thread-safe.

    In the ledger a row is the token ``Stage.shift`` positions behind it. The cache holds the rows of each request's context
    up to that of its last committed token. A draft's rows lie behind them and are rolled back. When blocks run out, the
    least recently drafted request loses its context, which is computed again when needed. A request whose features the
    target has not computed gets an empty draft.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        stage: Stage,
        sequential: SequentialStage,
        features: Features,
        calibration: Calibration | None = None,
        *,
        num_blocks: int,
        eos_token_ids: Sequence[int],
        max_draft_len: int = MAX_DRAFT_LEN,
    ) -> None:
        self._stage = stage
        self._sequential = sequential
        self._features = features
        self._calibration = calibration or Calibration()
        self._cache = KvCache.allocate(stage.config.shape, num_blocks, *stage.placement)
        dtype, device = stage.placement
        self._no_features = torch.zeros(1, stage.config.feature_size, dtype=dtype, device=device)
        self._ledger = BlockLedger(num_blocks, self._cache.block_len)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # least recently drafted first
        self._max_len = min(stage.config.shape.max_len, num_blocks * self._cache.block_len)
        self._recorded_len = min(stage.max_len, max_draft_len)
        least = stage.num_rows(1)
        if self._max_len <= least:
            raise InvalidField("num_blocks", num_blocks, f"must hold more than a draft of {least} tokens")

    def warm_up(self) -> None:
        """On a GPU records all rounds of up to ``max_draft_len`` tokens in the lane of the calling thread; longer ones are
        launched. While no request is open. Raises OutriderError: the device refuses."""
        num_rows = self._stage.num_rows(1)
        table = np.arange(-(-(1 + num_rows) // self._cache.block_len), dtype=np.int32)
        draft = DraftRows(0, 1, (0, 0), num_rows, 0, table)
        features = self._no_features.expand(2, -1)
        self._sequential.record(lambda: self._stage.begin([draft], features, self._cache), self._recorded_len)

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.release(request_id)
        sampling = replace(sampling, top_logprobs=None)  # not needed for drafts
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_token_ids)
        state = SamplingState(sampling, token_ids, prompt_len)
        scalings = self._calibration.of(sampling.temperature), self._calibration.with_margins_of(sampling.temperature)
        self._sessions[request_id] = _Session(list(token_ids), state, stop_ids, *scalings, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        session = self._sessions[request_id]
        session.token_ids.extend(token_ids)
        session.state.extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = {demand.request_id: Draft(demand.request_id, (), ()) for demand in demands}
        jobs = [job for demand in demands if (job := self._job(demand)) is not None]
        for part in parts_that_fit(jobs, lambda job: job.last + job.num_rows, self._ledger):
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

    def _job(self, demand: Demand) -> _Job | None:
        session = self._sessions[demand.request_id]
        last = len(session.token_ids) - 1 - self._stage.shift
        num_tokens = min(demand.num_tokens, self._stage.max_len - len(demand.ahead))
        ended = any(token_id in session.stop_ids for token_id in demand.ahead)
        if num_tokens <= 0 or ended or last < 0:
            return None
        num_rows = self._stage.num_rows(len(demand.ahead) + num_tokens)
        return _Job(demand, last, num_tokens, num_rows) if last + num_rows <= self._max_len else None

    def _draft(self, part: Sequence[_Job]) -> list[Draft]:
        self._make_room(part)
        self._catch_up(part)
        with self._begun(part) as (ready, states):
            blocks = [self._block(job) for job in ready]
            if states is not None:
                self._sequential.draft(states, blocks)
        found = zip(ready, blocks, strict=True)
        return [Draft(job.request_id, tuple(block.token_ids), tuple(block.confidences)) for job, block in found]

    def _block(self, job: _Job) -> Block:
        session, demand = self._sessions[job.request_id], job.demand
        scalings = session.scaling, session.margin_scaling
        block = Block(session.token_ids[-1], session.state, demand.ahead, job.num_tokens, session.stop_ids, *scalings)
        block.least_survival = demand.terms.least_survival
        return block

    def _catch_up(self, part: Sequence[_Job]) -> None:
        """In passes of their own, while the contexts of all jobs are too long for the one that begins their drafts."""
        missing = [job.last - self._ledger.computed_len(job.request_id) for job in part]
        total = sum(missing)
        for job, num in zip(part, missing, strict=True):
            while num and total > _MAX_ROWS:
                rows = min(num, _MAX_ROWS)
                one = replace(job, last=job.last - num + rows, num_rows=self._stage.num_rows(1))
                with self._begun([one]) as (ready, _):
                    if not ready:
                        break
                num, total = num - rows, total - rows

    @contextmanager
    def _begun(self, part: Sequence[_Job]) -> Iterator[tuple[Sequence[_Job], BegunStates | None]]:
        """The jobs whose features are computed, and the first states of their drafts, if there are any. At the end keeps the
        rows of their contexts, and rolls back those of the drafts."""
        part, starts, rows, features = self._read_features(part)
        shift, checkpoints, drafts, num_kept = self._stage.shift, [], [], [0] * len(part)
        for job, start, row in zip(part, starts, rows, strict=True):
            token_ids = self._sessions[job.request_id].token_ids[start + shift : job.last + shift + 1]
            drafted = (0,) * (job.num_rows - 1)  # in the ledger only until they are rolled back
            checkpoints.append(self._ledger.speculate(job.request_id, (*token_ids, *drafted)))
            table = self._ledger.block_table(job.request_id)
            drafts.append(DraftRows(start, job.last, token_ids, job.num_rows, row, table))
        try:
            yield part, self._stage.begin(drafts, features, self._cache) if part else None
            num_kept = [draft.last - draft.start for draft in drafts]
        finally:
            for checkpoint, num in zip(checkpoints, num_kept, strict=True):
                self._ledger.commit(checkpoint, num)

    def _read_features(self, part: Sequence[_Job]) -> tuple[list[_Job], list[int], list[int], Tensor]:
        """In one gather. Returns the jobs whose features are computed (the others are partly prefilled or preempted), their
        first missing row, where its features lie, and the features, of which row 0 is zeros."""
        starts = [self._ledger.computed_len(job.request_id) for job in part]
        wanted = [
            FeatureSpan(job.request_id, *self._stage.feature_rows(start, job.last))
            for job, start in zip(part, starts, strict=True)
        ]
        is_known = [span.start == span.stop for span in wanted]
        asked = [span for span, known in zip(wanted, is_known, strict=True) if not known]
        held, features = self._features.read_hidden_states(asked) if asked else ([], self._no_features[:0])
        answers = iter(held)
        is_ready = [known or next(answers) for known in is_known]
        ready, first_rows, at, end = [], [], [], 1
        for job, start, span in compress(zip(part, starts, wanted, strict=True), is_ready):
            ready.append(job)
            first_rows.append(start)
            at.append(end + start - span.start)
            end += span.stop - span.start
        return ready, first_rows, at, torch.cat([self._no_features, features.to(self._no_features.dtype)])

    def _make_room(self, part: Sequence[_Job]) -> None:
        """Opens every request of ``part`` in the ledger, and evicts others, least recently drafted first, until it fits."""
        needed, shift = 0, self._stage.shift
        for job in part:
            self._sessions.move_to_end(job.request_id)
            if job.request_id not in self._ledger:
                session = self._sessions[job.request_id]
                # A row depends on all tokens up to its own, also on the first ones, which have none.
                salt = session.salt if not shift else f"{session.salt} {session.token_ids[:shift]}"
                self._ledger.open(job.request_id, session.token_ids[shift:], salt)
            missing = job.last + job.num_rows - self._ledger.computed_len(job.request_id)
            needed += self._ledger.num_blocks_needed(job.request_id, missing)
        evict(self._ledger, self._sessions, needed, {job.request_id for job in part})


def load_drafter(
    folder: Path,
    rows: TargetRows,
    dtype: str,
    target: ModelInfo,
    device: torch.device,
    features: Features,
    *,
    num_target_layers: int | None = None,
    num_blocks: int,
    calibration: Calibration | None = None,
    min_survival: float = 0.0,
    max_draft_len: int = MAX_DRAFT_LEN,
) -> HiddenStateDrafter:
    """``rows`` and ``num_target_layers`` as of ``load_network``. ``max_draft_len``: of rounds that are recorded.

    Raises as ``load_network`` and ``warm_up``, and InvalidField if the cache does not hold a block.
    """
    kind, int8 = DTYPES[dtype], dtype == "int8"
    network = load_network(folder, rows, kind, num_target_layers)
    kernel = make_gumbel_argmax(target.vocab_size, torch.float32, device) if device.type == "cuda" else None
    sampler = Sampler(target.vocab_size, target.eos_token_ids, kernel)
    drafter = HiddenStateDrafter(
        make_stage(network, kind, device, int8=int8),
        SequentialStage(network, kind, device, sampler, min_survival, int8=int8),
        features,
        calibration,
        num_blocks=num_blocks,
        eos_token_ids=target.eos_token_ids,
        max_draft_len=max_draft_len,
    )
    drafter.warm_up()
    return drafter
