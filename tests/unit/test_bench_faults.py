"""What the fault and soak benchmarks conclude from answers and samples, and the injuries themselves."""

import asyncio
import math
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.disturbed import NUM_PIECES, Disturbed, DisturbedServer, FaultBenchFailed
from benchmarks.fault_rows import FaultRows, Row, RowResult
from benchmarks.injections import NUM_HOSTILE, hostile_clients, stopped, without_disk
from benchmarks.load import HttpTarget, LoadRequest, TimedAnswer
from benchmarks.recovery import Metrics
from benchmarks.soak import growth, num_at_once
from tests.support.waiting import eventually


def answer(text: str = "", error: str | None = None, sent_s: float = 0.0, took_s: float = 1.0) -> TimedAnswer:
    return TimedAnswer(sent_s, [took_s], text, num_tokens=5, error=error)


def judged(run: TimedAnswer, ends_streams: bool = False) -> tuple[int, int, int]:
    row = RowResult("row", ends_streams, [Disturbed(0.0, [run])])
    row.judge([answer("abcde")])
    return row.num_wrong_tokens, row.num_lost, len(row.complaints)


def test_a_row_counts_wrong_tokens_and_lost_streams() -> None:
    assert judged(answer("abcde")) == (0, 0, 0)
    assert judged(answer("abcdx")) == (5, 0, 1)
    assert judged(answer("abc")) == (5, 0, 1), "a stream without an error that ends early is wrong"
    assert judged(answer("abc", "the target is gone")) == (0, 1, 1)
    assert judged(answer("abc", "the target is gone"), ends_streams=True) == (0, 0, 0)
    assert judged(answer("abx", "the target is gone"), ends_streams=True) == (5, 0, 1)


def test_recovery_has_percentiles() -> None:
    row = RowResult("row", False, [Disturbed(0.0, [], seconds) for seconds in (1.0, 2.0, 3.0)])
    assert (row.recovery(50), row.recovery(100)) == (2.0, 3.0)


def test_growth_is_the_rise_of_a_line_over_its_start() -> None:
    assert growth([(float(t), 100.0 + t) for t in range(11)]) == pytest.approx(0.1)
    assert growth([(float(t), 100.0 + 3 * (t % 2)) for t in range(101)]) == pytest.approx(0.0, abs=1e-3)


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


class Rows(FaultRows):
    """On a server that is always well."""

    def __init__(self) -> None:
        answers = {
            "/v1/models": {"data": [{"id": "model"}]},
            "/v1/outrider/status": {"num_resumed": 0, "targets": []},
        }
        transport = httpx.MockTransport(lambda asked: httpx.Response(200, json=answers[asked.url.path]))
        server: Any = SimpleNamespace(
            config=SimpleNamespace(api=SimpleNamespace(host="127.0.0.1", port=1)),
            client=lambda: httpx.Client(base_url="http://server", transport=transport),
            workers=lambda actor: [],
            last_words=lambda: "its last words",
        )
        super().__init__(server)

    async def undisturbed(self, asks: Sequence[LoadRequest]) -> list[TimedAnswer]:
        return [answer("abcde")]

    async def disturbed(
        self, asks: Sequence[LoadRequest], injure: Callable[[], object], recovered: Callable[[Metrics], bool]
    ) -> Disturbed:
        injure()
        return Disturbed(0.0, [answer("abcde")], recovery_s=2.0)


def rows_until(error: BaseException) -> tuple[list[str], list[RowResult]]:
    """Injuries and results if the second one of the second row raises."""
    injured: list[str] = []

    def second() -> None:
        injured.append("second")
        if injured.count("second") == 2:
            raise error

    table = [Row("first", lambda: injured.append("first")), Row("second", second)]
    return injured, Rows().measure(table, [LoadRequest("r", (1,), 9)] * 3, 4)


def test_all_rows_are_repeated_in_turn_until_an_interrupt() -> None:
    injured, (first, second) = rows_until(KeyboardInterrupt())
    assert injured == ["first", "second", "first", "second"]
    assert (len(first.runs), len(second.runs)) == (2, 1)
    assert (second.num_lost, second.complaints) == (0, [])
    assert first.recovery(50) == 2.0


def test_a_server_that_does_not_recover_has_lost_its_streams() -> None:
    injured, (first, second) = rows_until(TimeoutError())
    assert injured == ["first", "second", "first", "second"]
    assert second.num_lost == 3
    assert "its last words" in second.complaints[0]
    assert (first.num_lost, len(second.runs)) == (0, 1)


def test_a_row_from_which_the_server_never_recovered_is_shown() -> None:
    assert RowResult("row", num_lost=4).cells() == ("row", 0, 0, 4, 0, 0, "-", math.inf, math.inf)


class EndlessServer(DisturbedServer):
    """Whose streams flow and never end. ``num_cancelled``: of them."""

    def __init__(self) -> None:
        self.server: Any = SimpleNamespace(url="http://127.0.0.1:1")
        self.target: Any = self
        self.num_cancelled = 0

    async def ask(self, ask: LoadRequest, on_piece: Callable[[int], None] = lambda number: None) -> TimedAnswer:
        on_piece(NUM_PIECES)
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1
        raise AssertionError


async def test_streams_end_with_a_run_that_fails() -> None:
    def injure() -> None:
        raise FaultBenchFailed("there is no process to kill")

    server = EndlessServer()
    with pytest.raises(FaultBenchFailed, match="no process"):
        await server.disturbed([LoadRequest(f"r{i}", (1,), 9) for i in range(3)], injure, lambda _: True)
    assert server.num_cancelled == 3
