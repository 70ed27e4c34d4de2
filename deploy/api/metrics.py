"""``/metrics`` for Prometheus: the rows of ``metric_table``, under their own names and vLLM's."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cluster.client import ClusterStatus
from cluster.counts import OTHER, HistogramCounts, SloCounts
from cluster.errors import LinkClosed
from cluster.types import Adapter, Commit, FinishReason, Slo
from deploy.api.choice import Choice
from deploy.api.draft_counts import DraftingCounts
from deploy.api.metric_table import METRICS, Metric, Readings, objective_counts
from deploy.api.tasks import running

MAX_DOMAINS = 32
MAX_TENANTS = 256  # with series of their own
REPLICA = "api_replica"  # a label
_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_OWN: dict[str, Any] = {"namespace": "outrider", "registry": None}


class Metrics:
    """In no registry, so that a process can have several apps.

    Args:
        deadline_s: time limit of a call.
        replica: name of this replica of the API, a label of what only it knows; None: it is the only one.
    """

    def __init__(self, deadline_s: float, replica: str | None = None) -> None:
        self._label = {} if replica is None else {REPLICA: replica}
        self._held = {row.name: _made(row, deadline_s) for row in METRICS if row.read is None}  # what this process counts
        self.requests = self._held["requests"]
        self.in_flight = self._held["requests_in_flight"]
        self.queued = self._held["requests_queued"]
        self.prompt_tokens = self._held["prompt_tokens"]
        self.queue_s = self._held["queue_seconds"]
        self._domains: set[str] = set()
        self._adapters: set[str] = set()
        self._tenants: set[str] = set()
        # Cached, because looking up a labelled counter is slow.
        self._labelled = cache(lambda name, label: self._held[name].labels(label))
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR):
            self._held["choices_finished"].labels(reason.value)  # rates need an initial zero
        self._model: str | None = None  # label of vLLM's names; known after the first status

    def on_tokens(self, commit: Commit, num_needed: int, gap_s: float | None) -> None:
        """As ``deploy.api.choice.OnTokens``."""
        self._held["completion_tokens"].inc(num_needed)
        if gap_s is not None:
            self._observe("inter_token_seconds", gap_s)
        if commit.prefill is not None:
            self._held["prefix_cache_queries"].inc(commit.base_len)
            self._held["prefix_cache_hits"].inc(commit.prefill.num_cached_tokens)
        if not commit.num_proposed:
            return
        num_accepted = min(commit.num_accepted, num_needed)
        self._held["drafts_verified"].inc()
        for position in range(commit.num_proposed):
            self._labelled("draft_tokens_verified", position).inc()
            self._labelled("draft_tokens_accepted", position).inc(position < num_accepted)
        if commit.drafter is not None:
            self._labelled("prediction_tokens_accepted", commit.drafter).inc(num_accepted)
            self._labelled("prediction_tokens_rejected", commit.drafter).inc(commit.num_proposed - num_accepted)

    def record_choice(self, choice: Choice) -> None:
        """Counts a choice that ended."""
        if choice.is_counted:
            self._held["choices_finished"].labels(choice.outcome.value).inc()
        ttft_s, decode_s = choice.ttft_s, choice.decode_s
        if ttft_s is None or decode_s is None:
            return
        self._observe("ttft_seconds", ttft_s)
        if choice.tpot_s is not None:
            self._observe("tpot_seconds", choice.tpot_s)
        if choice.e2e_s is None:
            return
        self._record_objectives(choice.request.slo, ttft_s, choice.tpot_s)
        self._observe("e2e_seconds", choice.e2e_s)
        self._observe("decode_seconds", decode_s)
        self._observe("choice_prompt_tokens", len(choice.request.prompt_token_ids))
        self._observe("choice_completion_tokens", choice.num_tokens)
        self._observe("choice_max_tokens", choice.request.sampling.max_tokens)
        if choice.prefill is not None:
            prefill_s = choice.prefill.prefill_s
            self._observe("prefill_seconds", prefill_s)
            self._observe("inference_seconds", prefill_s + decode_s)
            self._observe("choice_queue_seconds", max(0.0, ttft_s - prefill_s))

    def _record_objectives(self, slo: Slo, ttft_s: float, tpot_s: float | None) -> None:
        if slo.name is None:
            return
        self._held["slo_ttft_seconds"].labels(slo.name).observe(ttft_s)
        if tpot_s is not None:
            self._held["slo_tpot_seconds"].labels(slo.name).observe(tpot_s)
        for labels, num in objective_counts(SloCounts.of_answer(slo, ttft_s, tpot_s)).items():
            self._held["slo_objectives"].labels(*labels).inc(num)

    def record_drafts(self, domain: str, adapter: Adapter | None, counts: DraftingCounts) -> None:
        """Counts those of a choice that ended. Domains and adapters beyond MAX_DOMAINS each are counted as OTHER."""
        labels = {"domain": _bounded(domain, self._domains, MAX_DOMAINS)}
        if adapter is not None:
            labels["adapter"] = _bounded(adapter.name, self._adapters, MAX_DOMAINS)
        for drafter, one in counts.by_drafter.items():
            for kind, label in labels.items():
                self._held[f"{kind}_tokens_verified"].labels(drafter, label).inc(one.num_proposed)
                self._held[f"{kind}_tokens_accepted"].labels(drafter, label).inc(one.num_accepted)

    def record_tenant(self, tenant: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Counts the tokens of a call that ended. Tenants beyond MAX_TENANTS are counted as OTHER; "": there are none."""
        if tenant:
            tenant = _bounded(tenant, self._tenants, MAX_TENANTS)
            self._held["tenant_tokens"].labels(tenant, "prompt").inc(num_prompt_tokens)
            self._held["tenant_tokens"].labels(tenant, "output").inc(num_tokens)

    def record_over_budget(self, tenant: str, budget: str) -> None:
        self._held["tenant_over_budget"].labels(_bounded(tenant, self._tenants, MAX_TENANTS), budget).inc()

    def record_shed(self, choices: Iterable[Choice]) -> None:
        """Counts the choices of a call that was refused because an objective could not be met."""
        for choice in choices:
            self._held["slo_shed"].labels(choice.request.slo.name or OTHER).inc()

    def own(self, status: ClusterStatus | None) -> Mapping[str, Family]:
        """What only this replica knows, as it is now, by the names of the table."""
        families = {}
        for row in METRICS:
            if row.read is None:
                (family,) = self._held[row.name].collect()
                # The client exports the time of creation as another series.
                kept = [sample for sample in family.samples if not sample.name.endswith("_created")]
            elif row.own and status is not None:
                family = _read(row, row.read(status))
                kept = family.samples
            else:
                continue
            family.samples = [sample._replace(labels={**sample.labels, **self._label}) for sample in kept]
            families[row.name] = family
        return families

    def render(
        self, status: ClusterStatus | None, own: Mapping[str, Family] | None = None, others: Iterable[bytes] = ()
    ) -> bytes:
        """Prometheus' text format.

        Args:
            status: None: the cluster does not answer, and its metrics are left out.
            own: of `own`; None: as it is now.
            others: what only other replicas know, each as ``exposition`` returns it.
        """
        if status is not None:
            self._model = status.model
        of_others: defaultdict[str, list[Sample]] = defaultdict(list)
        for one in others:
            for family in text_string_to_metric_families(one.decode()):
                of_others[family.name] += family.samples
        return exposition(self._exported(status, self.own(status) if own is None else own, of_others))

    def _exported(
        self, status: ClusterStatus | None, own: Mapping[str, Family], of_others: Mapping[str, Sequence[Sample]]
    ) -> Iterable[Family]:
        yield GaugeMetricFamily("outrider_cluster_up", "1 if the cluster answers, else 0.", value=status is not None)
        for row in METRICS:
            family = own.get(row.name)
            if family is None:
                if row.read is None or status is None:
                    continue
                family = _read(row, row.read(status))
            family.samples = [*family.samples, *of_others.get(family.name, ())]
            yield family
            if self._model is not None:
                yield from (_alias(family, row, name, kept, self._model) for name, kept in row.vllm.items())

    def _observe(self, name: str, value: float) -> None:
        self._held[name].observe(value)


def exposition(families: Iterable[Family]) -> bytes:
    """In Prometheus' text format."""
    return generate_latest(_Given(families))


class _Given(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _bounded(label: str, seen: set[str], most: int) -> str:
    """The label, or OTHER instead of more than ``most``."""
    if label not in seen and len(seen) >= most:
        return OTHER
    seen.add(label)
    return label


def _made(row: Metric, deadline_s: float) -> Any:
    if row.kind == "histogram":
        return Histogram(row.name, row.text, row.labels, buckets=_buckets(row, deadline_s), **_OWN)
    return (Counter if row.kind == "counter" else Gauge)(row.name, row.text, row.labels, **_OWN)


def _buckets(row: Metric, deadline_s: float) -> tuple[float, ...]:
    """The table's buckets; those of times reach at least the deadline."""
    is_time = row.name.endswith("_seconds")
    return (*row.buckets, deadline_s) if is_time and deadline_s > row.buckets[-1] else row.buckets


def _read(row: Metric, readings: Readings) -> Family:
    """The family of a row that is read from the status."""
    family: Any = _FAMILIES[row.kind](f"outrider_{row.name}", row.text, labels=row.labels)
    for labels, value in readings:
        if isinstance(value, HistogramCounts):
            bounds = [*map(str, value.bounds), "+Inf"]
            family.add_metric(labels, list(zip(bounds, value.cumulative(), strict=True)), value.total)
        else:
            family.add_metric(labels, value)
    made: Family = family
    return made


def _alias(family: Family, row: Metric, name: str, kept: tuple[str, ...], model: str) -> Family:
    """The family under another name, with the labels ``model_name`` and ``kept``, and REPLICA if it has one: a sum over
    replicas would fall when one ends."""
    alias = Family(f"vllm:{name}", row.text, family.type)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
    for sample in family.samples:
        labels = {label: value for label, value in sample.labels.items() if label in (*kept, REPLICA, "le")}
        suffix = sample.name.removeprefix(family.name)
        values.setdefault((suffix, tuple(labels.items())), []).append(sample.value)
    if not values and family.type == "counter" and not kept:
        values["_total", ()] = [0.0]  # rates need an initial zero count
    for (suffix, pairs), numbers in values.items():
        value = sum(numbers) / (len(numbers) if row.mean else 1)
        alias.add_sample(alias.name + suffix, {"model_name": model, **dict(pairs)}, value)
    return alias


logger = logging.getLogger(__name__)

PERIOD_S = 2.0
EXCHANGE_S = 2.0  # deadline


@dataclass(frozen=True, slots=True)
class Peers:
    """The other replicas of the API.

    Args:
        own_name: of this replica, other than that of any other, also of a replica that it replaces.
        exchange: takes this replica's own metrics, in Prometheus' text format, and returns the others'. Raises LinkClosed.
    """

    own_name: str
    exchange: Callable[[bytes], Awaitable[Sequence[bytes]]]


class MetricsPage:
    """A scrape hands this replica's metrics over before it is answered, so that a later scrape of another replica never
    shows older ones: a counter that falls would count as begun anew. ``on_number`` is told how many replicas are known."""

    def __init__(
        self,
        metrics: Metrics,
        status: Callable[[], Awaitable[ClusterStatus]],
        peers: Peers | None,
        on_number: Callable[[int], None] = lambda num_replicas: None,
    ) -> None:
        self._metrics = metrics
        self._on_number = on_number
        self._status = status
        self._peers = peers
        self._turn = asyncio.Lock()  # an older page must not replace a newer one

    async def render(self) -> bytes:
        status = await self._status_if_known()
        pages = (None, ()) if self._peers is None else await self._exchanged(self._peers, status)
        async with self._turn:  # one thread at most: anybody may ask
            return await asyncio.to_thread(self._metrics.render, status, *pages)

    @asynccontextmanager
    async def kept_known(self) -> AsyncIterator[None]:
        """Within the block the other replicas get this one's metrics."""
        if self._peers is None:
            yield
            return
        async with running(self._hand_over(self._peers), "hand over metrics"):
            yield

    async def _hand_over(self, peers: Peers) -> None:
        while True:
            try:
                await self._exchanged(peers, await self._status_if_known())
            except Exception:
                # No caller awaits this task, and without it the others would export nothing of this replica.
                logger.exception("this API process could not hand its metrics over")
            await asyncio.sleep(PERIOD_S)

    async def _exchanged(self, peers: Peers, status: ClusterStatus | None) -> tuple[Mapping[str, Family], Sequence[bytes]]:
        """This replica's own metrics, and those of the others."""
        async with self._turn:
            own = self._metrics.own(status)
            try:
                async with asyncio.timeout(EXCHANGE_S):
                    others = await peers.exchange(exposition(own.values()))
                self._on_number(1 + len(others))
                return own, others
            except (LinkClosed, TimeoutError) as error:
                logger.debug("the metrics of the other replicas are not known now: %s", error)
                return own, ()

    async def _status_if_known(self) -> ClusterStatus | None:
        try:
            return await self._status()
        except LinkClosed:
            return None
