"""``/metrics`` of all replicas of the API, whichever answers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family

from cluster.client import ClusterStatus
from cluster.errors import LinkClosed
from deploy.api.background import running
from deploy.api.metrics import Metrics, exposition

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
    shows older ones: a counter that falls would count as begun anew."""

    def __init__(self, metrics: Metrics, status: Callable[[], Awaitable[ClusterStatus]], peers: Peers | None) -> None:
        self._metrics = metrics
        self._status = status
        self._peers = peers
        self._turn = asyncio.Lock()  # an older page must not replace a newer one

    async def render(self) -> bytes:
        status = await self._status_if_known()
        if self._peers is None:
            return self._metrics.render(status)
        return self._metrics.render(status, *await self._exchanged(self._peers, status))

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
                    return own, await peers.exchange(exposition(own.values()))
            except (LinkClosed, TimeoutError) as error:
                logger.debug("the metrics of the other replicas are not known now: %s", error)
                return own, ()

    async def _status_if_known(self) -> ClusterStatus | None:
        try:
            return await self._status()
        except LinkClosed:
            return None
