"""The dashboard: a page of static files (`pages`), and the data that it reads."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, astuple

from fastapi import Request
from starlette.responses import JSONResponse

from cluster.client import ClusterStatus
from cluster.errors import LinkClosed
from deploy.api.dashboard.history import INTERVAL_S, History, Timelines
from deploy.api.errors import bad_request, shorten
from deploy.api.tenants import NOBODY, Tenant

PATH = "/v1/outrider/dashboard"
_AFTER = re.compile(r"([0-9a-f]{16})\.([0-9]{1,18})\.([0-9]{1,18})")


class DashboardData:
    """One per process. It shows the caller's requests of this process, and the status of the whole cluster. The page merges
    the answers of the ``num_replicas`` of the API."""

    def __init__(
        self, status: Callable[[], Awaitable[ClusterStatus]], num_queued: Callable[[], int], num_replicas: int = 1
    ) -> None:
        self.timelines = Timelines()
        self.history = History(status, num_queued)
        self._status = status
        self._num_queued = num_queued
        self.num_replicas = num_replicas
        self._epoch = secrets.token_hex(8)  # versions count from the start of this process

    async def answer(self, request: Request) -> JSONResponse:
        """What changed since the answer of this process that a parameter ``after`` names, as EPOCH.VERSION.SAMPLE; without
        one, all. The caller names the last answer of each process."""
        after, sample = self._named(request)
        status: ClusterStatus | None = None
        fault: str | None = None
        try:
            status = await self._status()
        except LinkClosed as error:
            fault = str(error)
        timelines = self.timelines
        caller: Tenant = getattr(request.state, "tenant", NOBODY)
        tenant = None if caller.sees_all else caller.name
        answer = {
            "epoch": self._epoch,
            "num_replicas": self.num_replicas,
            "version": timelines.version,
            "now_s": time.monotonic(),
            "interval_s": INTERVAL_S,
            "status": None if status is None else asdict(status),
            "fault": fault,
            "num_queued": self._num_queued(),
            "requests": [asdict(one) for one in timelines.requests(after, tenant)],
            "rounds": [astuple(one) for one in timelines.rounds(after, tenant)],  # fields as in `Round`
            "drafts": timelines.drafts(),
            "samples": self.history.samples(sample),
        }
        return JSONResponse(answer, headers={"cache-control": "no-store"})

    def _named(self, request: Request) -> tuple[int, int]:
        """Raises ApiError (400)."""
        version, sample = 0, 0
        for given in request.query_params.getlist("after"):
            found = _AFTER.fullmatch(given)
            if found is None:
                raise bad_request("after", f"must be EPOCH.VERSION.SAMPLE of an answer, got {shorten(given)}")
            if found[1] == self._epoch:
                version, sample = int(found[2]), int(found[3])
        return version, sample
