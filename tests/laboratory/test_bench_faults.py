"""What the fault and soak benchmarks conclude from answers and samples, and the injuries themselves."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.disturbed import Disturbed, FaultBenchFailed, Metrics
from benchmarks.fault_rows import MAX_SERVERS, FaultRows, Measured, Row, RowResult, measure
from benchmarks.injections import NUM_HOSTILE, hostile_clients, stopped, without_disk
from benchmarks.load import HttpTarget, LoadRequest, TimedAnswer, run_streams
from benchmarks.soak import NUM_HOST_STREAMS, NUM_STREAMS, growth, injure, num_at_once, saturated, with_faults
from tests.support.waiting import eventually


def answer(text: str = "", error: str | None = None, sent_s: float = 0.0, took_s: float = 1.0) -> TimedAnswer:
    return TimedAnswer(sent_s, [took_s], text, num_tokens=5, error=error)


def judged(run: TimedAnswer, ends_streams: bool = False) -> tuple[int, int, int]:
    row = RowResult("row", ends_streams)
    row.add(Disturbed(0.0, [run]), [answer("abcde")], 0, [])
    arrival = RowResult("row", ends_streams)
    arrival.add(Disturbed(0.0, [answer("abcde")], arrived=[run]), [answer("abcde")], 0, [])
    assert (arrival.num_wrong_tokens, arrival.num_lost) == (row.num_wrong_tokens, row.num_lost)
    return row.num_wrong_tokens, row.num_lost, len(row.complaints)


def test_a_row_counts_wrong_tokens_and_lost_streams() -> None:
    assert judged(answer("abcde")) == (0, 0, 0)
    assert judged(answer("abcdx")) == (5, 0, 1)
    assert judged(answer("abc")) == (5, 0, 1), "a stream without an error that ends early is wrong"
    assert judged(answer("abc", "the target is gone")) == (0, 1, 1)
    assert judged(answer("abc", "the target is gone"), ends_streams=True) == (0, 0, 0)
    assert judged(answer("abx", "the target is gone"), ends_streams=True) == (5, 0, 1)


def test_a_request_that_comes_with_a_fault_may_be_refused_clearly() -> None:
    refused, failed = (TimedAnswer(0.0, error=f"{status} later", status=status) for status in (503, 500))
    row = RowResult("row")
    row.add(Disturbed(0.0, [answer("abcde")] * 2, arrived=[refused, failed]), [answer("abcde")] * 2, 0, [])
    assert (row.num_wrong_tokens, row.num_lost, row.complaints) == (0, 1, ["a stream ended: 500 later"])


def test_recovery_has_percentiles() -> None:
    row = RowResult("row", False, [Disturbed(0.0, [], seconds) for seconds in (1.0, 2.0, 3.0)])
    assert (row.recovery_s(50), row.recovery_s(100)) == (2.0, 3.0)


def test_growth_is_the_rise_of_a_line_over_its_start() -> None:
    assert growth([(float(t), 100.0 + t) for t in range(11)]) == pytest.approx(0.1)
    assert growth([(float(t), 100.0 + 3 * (t % 2)) for t in range(101)]) == pytest.approx(0.0, abs=1e-3)


def test_an_interrupt_ends_the_saturation_with_its_answers() -> None:
    num_asked = 0

    async def ask(number: int) -> TimedAnswer:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2 * NUM_STREAMS:
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        return answer()

    answers = asyncio.run(saturated(os.getpid(), ask, 3600.0, []))
    assert len(answers) == num_asked >= 2 * NUM_STREAMS


def test_faults_of_a_soak_end_no_streams_and_the_first_that_does_not_pass_is_the_last() -> None:
    rows = [Row("passes", lambda: None), Row("ends streams", lambda: 1 / 0, ends_streams=True)]
    rows.append(Row("stays", partial(psutil.Process(os.getpid()).wait, timeout=0)))
    injured, result, ended = Counter[str](), RowResult("soak"), threading.Event()
    injure(rows, ended, injured, result, period_s=0.0)
    assert injured == {"passes": 1}
    assert result.num_lost > 0
    assert "stays" in result.complaints[0]

    async def ask(number: int) -> TimedAnswer:
        await asyncio.sleep(0)
        return answer()

    assert ended.is_set()
    assert asyncio.run(saturated(os.getpid(), ask, 3600.0, [], stopped=ended)) == []


async def test_a_stream_that_does_not_end_in_time_has_an_error_and_the_others_their_answers() -> None:
    async def ask_one(ask: LoadRequest) -> TimedAnswer:
        if ask.id == "hangs":
            await asyncio.Event().wait()
        return TimedAnswer(0.0, num_tokens=ask.max_tokens)

    asks = [LoadRequest(name, (1,), 3) for name in ("hangs", "ends")]
    hanging, ended = await run_streams(ask_one, asks, 2, deadline_s=0.01)
    assert hanging.error == "no answer within 0.01 s"
    assert ended.error is None
    assert ended.num_tokens == 3


def test_streams_at_once_are_those_that_overlap_and_end_well() -> None:
    answers = [answer(sent_s=0.0), answer(sent_s=0.5), answer(sent_s=2.0), answer(error="lost", sent_s=0.5)]
    assert num_at_once(answers) == 2
    assert num_at_once([]) == 0


def test_a_process_without_disk_cannot_write(tmp_path: Path) -> None:
    writer = "import sys; sys.stdin.readline(); file = open(sys.argv[1], 'w'); file.write('x'); file.flush()"
    with (
        subprocess.Popen(
            [sys.executable, "-c", writer, tmp_path / "file"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child,
        without_disk(psutil.Process(child.pid)),
    ):
        _, words = child.communicate(b"\n", 30.0)
    assert b"File too large" in words
    assert child.returncode == 1


def test_a_stopped_process_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        with stopped(process):
            eventually(lambda: process.status() == psutil.STATUS_STOPPED, 30.0)
        child.communicate(b"\n", 30.0)
    assert child.returncode == 0


def test_hostile_clients_come_and_go() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_HOSTILE) as listener, ThreadPoolExecutor(1) as executor:
        server = HttpTarget("127.0.0.1", listener.getsockname()[1], "m")
        coming = executor.submit(hostile_clients, server, 0.3)
        clients = [listener.accept()[0] for _ in range(NUM_HOSTILE)]
        assert {client.recv(8) for client in clients} == {b"POST /v1", b"\x16\x03\x01" * 2 + b"\x16\x03"}
        coming.result(30.0)
        for client in clients:
            with client, suppress(ConnectionResetError):
                while client.recv(4096):
                    pass  # its end comes


class EndedProcess:
    pid = 7

    def is_running(self) -> bool:
        return False


class Rows(FaultRows):
    """On a server that is always well. ``injured``: the rows that it measured."""

    def __init__(self, injure: Callable[["Rows", str], object] = lambda rows, name: None) -> None:
        self.num_calls = 0
        self.status: dict[str, Any] = {"num_resumed": 0, "targets": [], "drafters": []}
        answers = {"/v1/models": {"data": [{"id": "model"}]}, "/v1/outrider/status": self.status}

        def respond(asked: httpx.Request) -> httpx.Response:
            if asked.url.path == "/metrics":
                return httpx.Response(200, text=f"outrider_requests_in_flight {self.num_calls}\n")
            return httpx.Response(200, json=answers[asked.url.path])

        transport = httpx.MockTransport(respond)
        self._workers: dict[str, list[Any]] = {}
        self._words = ["router is down: its loop has been stalled for 4.0 s; next start in 0.0 s"]
        server: Any = SimpleNamespace(
            target=lambda: None,
            client=lambda: httpx.Client(base_url="http://server", transport=transport),
            workers=lambda actor: self._workers.get(actor, []),
            last_words=lambda: "its last words",
            num_words=lambda: 0,
            words_with=lambda text, since: [line for line in self._words[since:] if text in line],
        )
        super().__init__(server)
        self.injured: list[str] = []
        self._injure = injure

    def table(self) -> list[Row]:
        return [Row(name, partial(self._injured, name)) for name in ("first", "second")]

    def lose(self, actor: str) -> None:
        """A process that ends by itself in the row that is measured."""
        self._workers[actor] = [EndedProcess()]

    def _injured(self, name: str) -> None:
        self.injured.append(name)
        self._injure(self, name)

    async def undisturbed(self, asks: Sequence[LoadRequest]) -> list[TimedAnswer]:
        return [answer("abcde")]

    async def disturbed(
        self,
        asks: Sequence[LoadRequest],
        injure: Callable[[], object],
        recovered: Callable[[Metrics], bool],
        arriving: Sequence[LoadRequest] = (),
    ) -> Disturbed:
        injure()
        return Disturbed(0.0, [answer("abcde")], recovery_s=2.0)


ASKS = [LoadRequest("r", (1,), 9)] * 3


def test_what_is_left_on_an_idle_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fault_rows.STATUS_AGE_S", 0.0)
    monkeypatch.setattr("benchmarks.fault_rows.STALL_S", 0.1)
    rows = Rows()
    assert rows._leaked() == []
    idle = {"num_blocks": 9, "num_free_blocks": 9, "num_running": 0, "num_waiting": 0, "state": "ready"}
    rows.status["targets"] = [
        {**idle, "name": "well"},
        {**idle, "name": "gone", "state": "silent"},
        {**idle, "name": "full", "num_free_blocks": 7},
    ]
    rows.status["drafters"] = [{"name": "ngram", "num_requests": 2}]
    rows.num_calls = 1
    assert [line.split()[0] for line in rows._leaked()] == ["gone", "full", "ngram", "the"]


def measured(num_times: int, *servers: Rows) -> Measured:
    """Of these servers, one after the other."""
    return measure(lambda stack, number: servers[number], num_times, ASKS)


def test_rows_are_repeated_in_turn() -> None:
    rows = Rows()
    found = measured(3, rows)
    assert rows.injured == ["first", "second"] * 3
    assert [(row.name, len(row.runs), row.num_lost) for row in found.rows] == [("first", 3, 0), ("second", 3, 0)]
    assert found.rows[0].recovery_s(50) == 2.0


def test_an_interrupt_lets_the_row_under_way_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(rows: Rows, name: str) -> None:
        if rows.injured == ["first", "second", "first"]:
            assert waits.wait(30.0)
            os.kill(os.getpid(), signal.SIGINT)
            assert told.wait(30.0)

    def wait_and_tell(futures: list[Future[None]]) -> None:
        waits.set()
        wait(futures)

    told, waits = threading.Event(), threading.Event()
    rows = Rows(interrupt)
    monkeypatch.setattr("benchmarks.fault_rows.wait", wait_and_tell)
    monkeypatch.setattr(rows.console, "print", lambda line, **_: told.set() if "interrupted" in line else None)
    found = measured(10**4, rows)
    assert [len(row.runs) for row in found.rows] == [2, 1]
    assert found.interrupted
    assert sum(row.num_lost for row in found.rows) == 0


def test_a_server_that_does_not_recover_has_lost_its_streams_and_another_goes_on() -> None:
    def fail(rows: Rows, name: str) -> None:
        if name == "second":
            raise TimeoutError

    failing, well = Rows(fail), Rows()
    first, second = measured(3, failing, well).rows
    assert (failing.injured, well.injured) == (["first", "second"], ["first", "second"] * 2)
    assert (len(first.runs), len(second.runs)) == (3, 2)
    assert (first.num_lost, second.num_lost) == (0, 3)
    assert "its last words" in second.complaints[0]


def test_servers_that_do_not_recover_are_replaced_so_often() -> None:
    def fail(rows: Rows, name: str) -> None:
        raise TimeoutError

    failing = [Rows(fail) for _ in range(MAX_SERVERS)]
    found = measured(3, *failing)
    assert [rows.injured for rows in failing] == [["first"], ["second"], ["first"]]
    assert [len(row.runs) for row in found.rows] == [0, 0]


def test_servers_that_do_not_start_or_end_lose_nothing_that_was_measured() -> None:
    def start(stack: ExitStack, number: int) -> Rows:
        if number == 0:
            raise FaultBenchFailed("it does not start")
        stack.callback(partial(fail, "it does not end"))
        return Rows()

    def fail(reason: str) -> None:
        raise FaultBenchFailed(reason)

    found = measure(start, 2, ASKS)
    assert [len(row.runs) for row in found.rows] == [2, 2]
    assert [line.rpartition(": ")[2] for line in found.lost] == ["it does not start", "it does not end"]


def test_an_error_of_the_benchmark_itself_is_raised() -> None:
    def fail(rows: Rows, name: str) -> None:
        raise ConnectionResetError("while asking")

    failing, next_one = Rows(fail), Rows()
    with pytest.raises(ConnectionResetError):
        measured(10**4, failing, next_one)
    assert (failing.injured, next_one.injured) == (["first"], [])


class SoakedRows(Rows):
    """``left``: what is left behind; None: the server does not recover."""

    def __init__(self, injure: Callable[[Rows, str], object], left: list[str] | None) -> None:
        super().__init__(injure)
        self._left_behind, self.asked = left, threading.Event()
        self.target: Any = SimpleNamespace(ask=self._ask)

    async def undisturbed(self, asks: Sequence[LoadRequest]) -> list[TimedAnswer]:
        return [answer("abcde")] * len(asks)

    def left_behind(self) -> list[str]:
        if self._left_behind is None:
            raise FaultBenchFailed("it has not recovered")
        return self._left_behind

    async def _ask(self, ask: LoadRequest) -> TimedAnswer:
        self.asked.set()
        await asyncio.sleep(0)
        return answer("abcde")


def test_a_soak_whose_server_recovers_from_its_faults_goes_on_to_its_end() -> None:
    def injure(rows: Rows, name: str) -> None:
        assert isinstance(rows, SoakedRows)
        assert rows.asked.wait(30.0)
        if len(rows.injured) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    closed: list[str] = []
    rows, server = SoakedRows(injure, ["a block"]), ExitStack()
    server.callback(closed.append, "closed")
    found = with_faults(rows, server, 3600.0, period_s=0.0)
    assert found.figures["num_faults"] == len(rows.injured) >= 5
    assert [found.figures[name] for name in ("num_lost", "num_wrong_tokens", "num_leaked")] == [0, 0, 1]
    assert (closed, found.notes) == (["closed"], ("a block",))


def test_a_soak_whose_server_does_not_recover_ends_with_its_figures() -> None:
    """From its first fault, nor when the callers are gone; nor does it end."""

    def fail(*_: object) -> None:
        raise FaultBenchFailed("it does not end")

    def injure(rows: Rows, name: str) -> None:
        raise TimeoutError

    server = ExitStack()
    server.callback(fail)
    found = with_faults(SoakedRows(injure, None), server, 3600.0, period_s=0.0)
    assert found.figures["num_faults"] == 0
    assert found.figures["num_lost"] == 3 * NUM_HOST_STREAMS
    assert [line for line in ("first", "not recovered", "not end") if not any(line in note for note in found.notes)] == []


def test_a_process_that_ended_by_itself_is_named_with_the_row_and_the_reason() -> None:
    rows = Rows()
    rows.lose("RouterActor")
    with rows.phase("first"):
        pass
    (lost,) = rows.lost
    assert lost.startswith("RouterActor 7 (first; the log: ")
    assert "stalled for 4.0 s" in lost
