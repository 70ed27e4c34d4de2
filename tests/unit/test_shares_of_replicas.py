"""Several replicas of the API: what each may give of the limits, and metrics of all of them by any of them."""

import json
import multiprocessing
import re
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import httpx
import pytest

from cluster.client import LOST_S, MetricsExchange, ReplicaMetrics
from cluster.config import ApiConfig
from cluster.errors import InvalidField, LinkClosed, OutriderError
from deploy.api.admission import Admission
from deploy.api.metrics import Peers
from deploy.api.middleware import AuditLog, Outcome
from deploy.api.settings import ApiSettings
from deploy.api.tenants import ApiKeys
from deploy.serve_app import replicas_of
from router.planning.token_budgets import Budget, Limits
from tests.support.api import app_of, chat_body, client_of, model_info, saying, serving
from tests.support.asgi import CHAT
from tests.support.scripted import ScriptedClient
from tests.support.waiting import DEADLINE_S
from tests.unit.test_api_metrics import Series, parsed, value


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_shares_of_the_server_s_limits_never_exceed_them(replicas: int) -> None:
    settings = ApiSettings.from_config(ApiConfig(replicas=replicas, max_concurrent_requests=100, max_queued_requests=50))
    for share, limit in ((settings.max_concurrent, 100), (settings.max_queued, 50)):
        assert limit - replicas < replicas * share <= limit
    assert settings.max_sequences <= settings.max_concurrent


@pytest.mark.parametrize(("replicas", "most", "limit"), [(3, 8, 256), (4, 5, 10), (10, 16, 16)])
def test_the_widest_call_runs_at_any_number_of_replicas(replicas: int, most: int, limit: int) -> None:
    config = ApiConfig(replicas=replicas, max_replicas=most, max_concurrent_requests=limit, max_queued_requests=limit)
    settings = ApiSettings.from_config(config)
    admission = Admission(settings)
    for num in range(replicas, most + 1):
        admission.divide(num)
        assert not admission.is_busy(settings.max_sequences)
        assert admission.is_busy(limit // num + 1), "all together have no more than the limit"


@pytest.mark.parametrize("limit", ["max_concurrent_requests", "max_queued_requests"])
def test_limits_that_leave_a_replica_nothing_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=rf"replicas \(3\) must be at most {limit} \(2\)"):
        ApiConfig.model_validate({"replicas": 3, limit: 2})


async def test_the_pages_of_other_replicas_are_read_beside_the_event_loop() -> None:
    threads = []

    class Pages(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            threads.append(threading.current_thread())
            return super().__iter__()

    async def exchange(own: bytes) -> Pages:
        return Pages([b""])

    app = app_of(ScriptedClient(model_info(), saying("the answer")), peers=Peers("first", exchange), num_replicas=2)
    async with client_of(app) as http:
        assert (await http.get("/metrics")).is_success
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(("per_minute", "burst", "replicas"), [(600, 1.0, 4), (601, 0.5, 3), (1, 1.0, 2), (5, 10.0, 7)])
def test_replicas_together_keep_to_a_budget(per_minute: int, burst: float, replicas: int) -> None:
    """In a burst, and in the ten minutes after it, each replica gives all that it has."""
    budgets = [Budget(Limits(per_minute, None, burst), replicas) for _ in range(replicas)]
    num_given = 0
    for second in range(601):
        for budget in budgets:
            assert budget.requests is not None
            while budget.requests.wait_s(1, float(second)) <= 0:
                budget.requests.take(1, float(second))
                num_given += 1
    at_once = max(replicas, per_minute * burst)
    assert 10 * per_minute - replicas <= num_given <= at_once + 10 * per_minute


async def test_a_tenant_s_sequences_are_divided_and_too_few_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("tenants:\n- {name: search, keys: [sk-one], max_concurrent_requests: 5}\n")
    admission = Admission(ApiSettings(max_replicas=5))  # that may join
    admission.set_tenants(ApiKeys.from_file(path, 5).tenants)
    for num, share in ((1, 5), (2, 2), (5, 1)):
        admission.divide(num)
        assert [admission.is_busy(share, "search"), admission.is_busy(share + 1, "search")] == [False, True]
        with pytest.raises(OutriderError, match="2 sequences exceed the 1 that a call of search may have"):
            async with admission.admitted(2, "search"):
                raise AssertionError
    with pytest.raises(
        InvalidField, match=r"max_concurrent_requests of search must be at least the most replicas of the API \(6\), got 5"
    ):
        ApiKeys.from_file(path, 6)


def test_a_budget_that_is_divided_anew_gives_no_more_than_before() -> None:
    """One replica has used half of its budget when a second joins, and what the second was given is lost when it leaves."""
    first, joining = Budget(Limits(600)), Budget(Limits(600), 4)
    assert first.requests is not None
    assert joining.requests is not None
    first.requests.take(300, 0.0)
    first.divide(2, 6.0)  # 60 more flowed in
    joining.divide(2, 6.0)
    assert (first.requests.level(6.0), joining.requests.level(6.0)) == (300, 150)
    assert first.requests.level(16.0) == 300
    assert joining.requests.level(16.0) == 200
    first.divide(1, 16.0)
    assert first.requests.level(26.0) == 400


async def test_limits_follow_the_number_of_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at least one and at most four: as many as the exchange knows of, after the first exchange."""
    path = tmp_path / "keys"
    path.write_text("tenants:\n- {name: search, keys: [sk-one], requests_per_minute: 400}\n")
    path.chmod(0o600)
    exchange = Exchange()
    settings = {"num_replicas": 1, "max_replicas": 4, "max_concurrent": 100, "max_queued": 100, "api_keys_file": path}
    headers = {"authorization": "Bearer sk-one"}

    async def until_full_s(http: httpx.AsyncClient) -> float:
        """Of the budget of 100 requests that it had at the start, after a call."""
        reset = (await http.post(CHAT, json=chat_body(), headers=headers)).headers["x-ratelimit-reset-requests"]
        return sum(float(num) * {"ms": 0.001, "s": 1}[unit] for num, unit in re.findall(r"([\d.]+)(ms|s)", reset))

    apps = [app_of(ScriptedClient(model_info(), saying("a")), peers=exchange.peers(name), **settings) for name in "ab"]
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(client_of(app)) for app in apps]
        assert await until_full_s(first) < 2  # it knows of no other yet, and there may be three
        await first.get("/metrics", headers=headers)
        assert 20 < await until_full_s(first) <= 46  # alone it has 400
        await second.get("/metrics", headers=headers)
        await first.get("/metrics", headers=headers)
        assert 10 < await until_full_s(first) <= 32  # a half of these
        exchange.restart()
        await first.get("/metrics", headers=headers)
        assert (await first.get("/v1/outrider/dashboard", headers=headers)).json()["num_replicas"] == 2, "it may be there"
        monkeypatch.setattr("deploy.api.service.LOST_S", 0.0)
        await first.get("/metrics", headers=headers)
        assert (await first.get("/v1/outrider/dashboard", headers=headers)).json()["num_replicas"] == 1


def test_the_number_of_replicas_follows_calls_within_its_bounds() -> None:
    fixed = replicas_of(ApiConfig(replicas=3), 2.0)
    assert fixed == {"num_replicas": 3, "graceful_shutdown_timeout_s": 2.0}
    scaling = replicas_of(ApiConfig(replicas=2, max_replicas=4, max_concurrent_requests=256, request_deadline_s=300), 2.0)
    bounds = scaling["autoscaling_config"]
    assert (bounds.min_replicas, bounds.max_replicas, bounds.target_ongoing_requests) == (2, 4, 32)
    assert scaling["graceful_shutdown_timeout_s"] == 300  # calls of one that leaves end


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"replicas": 3, "max_replicas": 2}, r"replicas \(3\) must be at most max_replicas \(2\)"),
        ({"max_replicas": 9, "max_queued_requests": 8}, r"max_replicas \(9\) must be at most max_queued_requests \(8\)"),
    ],
)
def test_bounds_that_leave_a_replica_nothing_are_refused(changes: dict[str, int], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ApiConfig.model_validate(changes)


class Exchange:
    """The supervisor's, for replicas of this process. ``is_away``: it does not answer."""

    def __init__(self) -> None:
        self.is_away = False
        self._kept = MetricsExchange()

    def restart(self) -> None:
        """As a supervisor that is replaced."""
        self._kept = MetricsExchange()

    def peers(self, name: str) -> Peers:
        async def exchange(page: bytes) -> Sequence[bytes]:
            if self.is_away:
                raise LinkClosed("the supervisor is away")
            return [one.page for one in self._kept.give(ReplicaMetrics(name, page), 0.0)]

        return Peers(name, exchange)


@asynccontextmanager
async def replicas(exchange: Exchange, *names: str) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        clients = []
        for name in names:
            cluster = ScriptedClient(model_info(), saying("the answer"))
            app = app_of(cluster, peers=exchange.peers(name), num_replicas=len(names))
            clients.append(await stack.enter_async_context(client_of(app)))
        yield clients


async def scraped(http: httpx.AsyncClient) -> Series:
    return parsed((await http.get("/metrics")).text)


def answered(series: Series) -> dict[str, float]:
    """Chats that were answered, by replica."""
    names = {dict(labels)["api_replica"] for name, labels in series if name == "outrider_requests_in_flight"}
    wanted = {name: {"api_replica": name, "endpoint": CHAT, "status": "200"} for name in names}
    found = {name: series.get(("outrider_requests_total", frozenset(labels.items()))) for name, labels in wanted.items()}
    return {name: count or 0.0 for name, count in found.items()}


async def test_any_replica_exports_the_metrics_of_all() -> None:
    exchange = Exchange()
    async with replicas(exchange, "one", "two") as (first, second):
        for http in (first, second, second):
            assert (await http.post(CHAT, json=chat_body())).status_code == 200
        await scraped(first)
        series = await scraped(second)
        assert answered(series) == {"one": 1, "two": 2}
        for name in ("outrider_completion_tokens_total", "outrider_ttft_seconds_count", "outrider_requests_resumed_total"):
            assert value(series, name, api_replica="one") <= value(series, name, api_replica="two"), name
        ours, vllm = "outrider_completion_tokens_total", "vllm:generation_tokens_total"
        assert value(series, vllm, model_name="scripted", api_replica="one") == value(series, ours, api_replica="one") > 0
        cluster_wide = [labels for name, labels in series if name == "outrider_target_ready"]
        assert [set(dict(labels)) for labels in cluster_wide] == [{"target"}], "of the cluster there is one series"


async def test_a_counter_never_falls_from_one_scrape_to_the_next() -> None:
    """Whichever replica answers: Prometheus would take a fall for a restart and count everything twice."""
    async with replicas(Exchange(), "one", "two") as clients:
        seen = {"one": 0.0, "two": 0.0}
        for i in range(12):
            await clients[i % 2].post(CHAT, json=chat_body())
            counts = answered(await scraped(clients[i // 2 % 2]))
            assert all(count >= seen[name] for name, count in counts.items()), (counts, seen)
            seen |= counts


async def test_without_the_supervisor_a_replica_exports_its_own_metrics() -> None:
    exchange = Exchange()
    async with replicas(exchange, "one", "two") as (first, second):
        await scraped(second)
        exchange.is_away = True
        assert answered(await scraped(first)) == {"one": 0}


async def test_the_only_replica_has_no_label() -> None:
    async with serving() as (http, _):
        assert not [labels for _, labels in await scraped(http) if "api_replica" in dict(labels)]


def test_the_metrics_of_a_lost_replica_are_dropped() -> None:
    exchange = MetricsExchange()
    one, two, later = (ReplicaMetrics(name, page) for name, page in (("one", b"1"), ("two", b"2"), ("two", b"3")))
    assert exchange.give(one, 0.0) == ()
    assert exchange.give(two, LOST_S) == (one,)
    assert exchange.give(later, LOST_S + 0.1) == ()
    assert exchange.give(one, LOST_S + 0.2) == (later,)


LEN, NUM_LINES = 10_000, 500


def write_audit(file: Path, name: str, together: Barrier) -> None:
    log = AuditLog(file)
    together.wait(DEADLINE_S)
    for _ in range(NUM_LINES):
        log.write(Outcome(name * LEN, "POST", CHAT, 200, 0.5, None, None, ""), 0.0)


@pytest.mark.slow
def test_audit_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    """Each line is longer than a page, and than a buffer of Python's."""
    file, spawn = tmp_path / "audit", multiprocessing.get_context("spawn")
    together = spawn.Barrier(3)
    writers = [spawn.Process(target=write_audit, args=(file, name, together)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(DEADLINE_S)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    ids = [json.loads(line)["request_id"] for line in file.read_text().splitlines()]
    assert sorted(ids) == sorted(name * LEN for name in "abc" for _ in range(NUM_LINES))
