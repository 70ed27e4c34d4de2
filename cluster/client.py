"""The cluster as the API sees it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.counts import NO_DRAFTS, DraftingCounts, HistogramCounts, SloCounts
from cluster.types import Commit, ModelInfo, Request


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    name: str
    kind: str
    state: str  # starting, ready, down, draining, quarantined
    num_requests: int
    num_proposed: int  # draft tokens verified since the start
    num_accepted: int
    reply_ms: float | None  # running mean; None before the first reply
    num_restarts: int = 0
    reason: str | None = None  # why it is not ready, if known
    verifies: bool = False  # it can verify another's drafts
    proposers: tuple[str, ...] = ()  # drafters that may draft for it, smallest first
    device: str | None = None  # None: not loaded, or unknown
    num_bytes: int | None = None  # of its device's memory; None: not counted
    num_loads: int = 0
    num_evictions: int = 0
    num_fallbacks: int = 0  # loads on a CPU because its device was full
    num_unsound: int = 0  # messages from it with invalid parts
    counts: DraftingCounts = NO_DRAFTS  # of its drafts, over all targets
    num_cpus: float = 0.0  # reserved for one replica, loaded or not
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftsByLoad:
    """Drafts in passes that decoded at most ``max_sequences`` requests, and more than half as many."""

    max_sequences: int  # a power of two
    num_rounds: int  # one per request and pass, with drafts or without
    num_proposed: int  # draft tokens verified
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftingEffect:
    """What drafting saves and wastes, since the target's start. Rounds with prompts do not count in the times."""

    decode_s: float = 0.0  # measured, of whole rounds
    plain_s: float = 0.0  # predicted for the same tokens without drafts
    rejected_s: float = 0.0  # of decode_s, predicted for the rows of rejected draft tokens
    by_load: tuple[DraftsByLoad, ...] = ()  # ascending


@dataclass(frozen=True, slots=True)
class TargetStatus:
    name: str
    state: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    tokens_per_s: float
    step_ms: float  # running mean of a pass
    num_preempted: int = 0  # preemptions since the start
    num_prompt_tokens: int = 0  # since the start
    num_cached_tokens: int = 0  # of them, found in the prefix cache
    slo: tuple[SloCounts, ...] = ()  # by class, since the start
    riders: Mapping[str, int] = field(default_factory=dict)  # for how many of its requests each linked drafter drafts
    drafting: DraftingEffect = DraftingEffect()
    rounds_s: HistogramCounts | None = None  # seconds of a round
    rows: HistogramCounts | None = None  # of a pass
    batch: HistogramCounts | None = None  # requests with a commit in a round
    num_cpus: float = 0.0  # reserved for all its ranks
    num_gpus: float = 0.0
    num_failed_observations: int = 0  # of rounds, since the start


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """The wanted number of replicas changed."""

    at_s: float  # Unix time
    name: str  # "target", or the drafter's configured name
    num_before: int
    num_after: int
    reason: str  # for people


@dataclass(frozen=True, slots=True)
class ScaleCounts:
    """Changes since the supervisor's start."""

    name: str  # as of ScaleEvent
    num_up: int = 0
    num_down: int = 0


@dataclass(frozen=True, slots=True)
class ChainStatus:
    """A candidate chain, the drafter next to the target last, and its predicted time per token (SpecRouter's T_eff)."""

    chain: tuple[str, ...]
    per_token_ms: float
    scores: tuple[float | None, ...] = ()  # SimScore of neighbouring drafters, where their distributions were compared


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """Shown by ``outrider status`` and exported by ``/metrics``."""

    model: str
    policy: str
    table_version: int
    targets: tuple[TargetStatus, ...]
    drafters: tuple[DrafterStatus, ...]
    planned_by: tuple[str, ...] = ()  # the planner's policies of length, verification and overlap, and what else is on
    notes: tuple[str, ...] = ()  # problems, one line each
    trial_left_s: float | None = None  # until the policy of the file returns; None: ``policy`` is the file's
    chains: tuple[ChainStatus, ...] = ()  # the fastest of the candidates, whatever the policy
    scale_events: tuple[ScaleEvent, ...] = ()  # the newest, in order
    scale_counts: tuple[ScaleCounts, ...] = ()
    num_resumed: int = 0  # by this process of the API: how often another target continued a request whose target was lost
    num_supervisor_kills: int = 0  # by this process of the API: of supervisors that did not answer
    tls_not_after_s: float | None = None  # POSIX time at which a certificate of this machine's links expires; None: no TLS


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """What one replica of the API has counted, and what it learned of caches lately."""

    replica: str
    page: bytes  # in Prometheus' text format
    prefixes: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)  # as of `LinkClient.recent_prefixes`


class EngineClient(Protocol):
    """Access to the targets. Implementations: over links, and in process."""

    @property
    def is_linked(self) -> bool:
        """Whether a target is reachable now."""

    async def model(self) -> ModelInfo: ...

    def generate(self, request: Request) -> AsyncIterator[Commit]:
        """The request's commits in order; the last has a finish reason. Closing the iterator aborts the request. If its
        target is lost, another one continues it with the same tokens.

        Raises Overloaded if no target accepts requests now, Unattainable if none meets the request's objective, LinkClosed
        if none is reachable, or it is lost and no other one can continue it.
        """

    async def status(self) -> ClusterStatus:
        """Raises LinkClosed if the status is not available."""

    async def close(self) -> None: ...


LOST_S = 10.0  # a replica sends its metrics every two seconds


class MetricsExchange:
    """Keeps the newest metrics of each replica. Those of a replica that has sent none for LOST_S are dropped."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, ReplicaMetrics]] = {}

    def give(self, own: ReplicaMetrics, now_s: float) -> tuple[ReplicaMetrics, ...]:
        """Replaces the metrics of a replica, and returns those of the others."""
        self._newest[own.replica] = now_s, own
        self._newest = {name: kept for name, kept in self._newest.items() if now_s - kept[0] <= LOST_S}
        return tuple(one for _, one in self._newest.values() if one.replica != own.replica)
