"""What clients meet: HAProxy with the wrapper's configuration before the API, over raw sockets, without a Ray cluster."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.client import ClusterStatus
from cluster.types import Request
from tests.support import wire
from tests.support.api import MODEL, app_of, chat_body, finishing, listening, model_info, token_ids
from tests.support.haproxy import behind_haproxy
from tests.support.scripted import ScriptedClient, Step, spell
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
NEVER = 7  # the seed of a call that is never answered


class Cluster(ScriptedClient):
    """Answers, but for one seed; counts who asks for its status."""

    def __init__(self) -> None:
        super().__init__(model_info(), self._script)
        self.num_status = 0

    def _script(self, request: Request) -> Iterable[Step]:
        if request.sampling.seed == NEVER:
            yield from spell(request, token_ids("the answer")[:2])
            yield asyncio.Event()
        yield from finishing(request, token_ids("the answer"))

    async def status(self) -> ClusterStatus:
        self.num_status += 1
        return await super().status()


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster()


class Replica:
    """The API, and the names of the headers of each request that reached it, by path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.headers: dict[str, list[set[str]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.headers.setdefault(scope["path"], []).append({name.decode() for name, _ in scope["headers"]})
        await self._app(scope, receive, send)


@pytest.fixture(scope="module")
def replica(cluster: Cluster) -> Replica:
    return Replica(app_of(cluster, status_ttl_s=300.0))


@pytest.fixture(scope="module")
def front(replica: Replica) -> Iterator[str]:
    with listening(replica) as url, behind_haproxy(url) as front:
        yield front


def test_malformed_requests_are_refused_in_the_shape_of_errors(front: str) -> None:
    requests = wire.malformed(300, seed=1, model=MODEL)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: wire.exchange(front, request[1]), requests))
    for (kind, sent), answer in zip(requests, answers, strict=True):
        assert 400 <= answer.status < 500, (kind, sent[:200], answer)
        answer.error()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_segments", [1, 2])
def test_whoever_hangs_up_is_worked_for_no_longer(
    front: str, cluster: Cluster, num_segments: int, stream: bool, reset: bool
) -> None:
    num_aborted = len(cluster.aborted)
    head, body = wire.post(CHAT, json.dumps(chat_body(stream=stream, seed=NEVER)).encode())
    connection = wire.connect(front)
    if num_segments == 1:
        connection.sendall(head + body)
    else:
        connection.sendall(head)
        # HAProxy has read the headers when it has answered somebody who came later.
        assert wire.exchange(front, wire.get("/health")).status == 200
        connection.sendall(body)
    eventually(lambda: cluster.num_open == 1)
    if stream:
        assert connection.recv(10)
    wire.hang_up(connection, reset=reset)
    eventually(lambda: cluster.num_open == 0)
    assert len(cluster.aborted) == num_aborted + 1


def test_an_answer_behind_a_broken_request_stays_whole(front: str) -> None:
    """A good request, and bytes that cannot be parsed right behind it: both are answered."""
    with wire.connect(front) as connection:
        connection.sendall(wire.get("/health") + b"GARBAGE\r\n\r\n")
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b'"status":"ok"' in received
    assert b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n" in received
    assert received.endswith(b'"code": "bad_request"}}')


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["my-id.7:a_B"], True),
        (["a" * 128], True),
        (["a" * 129], False),
        (["two words"], False),
        (["a", "b"], False),
        (["<script>"], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/nope", "/-/routes"])
def test_a_response_has_one_request_id(front: str, path: str, given: list[str], kept: bool) -> None:
    answer = wire.exchange(front, wire.get(path, *(f"X-Request-Id: {value}" for value in given)))
    (request_id,) = answer.header("x-request-id")
    assert (request_id in given) is kept
    assert kept or request_id.startswith("req_")


def test_serve_s_own_switches_do_not_pass(front: str, replica: Replica) -> None:
    switches = {
        "X-Request-Disconnect-Disabled": "1",
        "X-Request-Timeout-Seconds": "0.001",
        "X-Session-Id": "a",
        "serve_multiplexed_model_id": "a",
        "Upgrade": "websocket",
    }
    given = [f"{name}: {value}" for name, value in switches.items()]
    handshake = ["Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
    answer = wire.exchange(front, wire.get("/version", "X-Other: 1", *handshake, *given))
    assert answer.status == 200
    (arrived,) = replica.headers["/version"]
    assert "x-other" in arrived
    assert not arrived & {name.lower() for name in switches}


def test_trailers_do_not_pass_for_headers(front: str, replica: Replica) -> None:
    """HAProxy 2.8 passes them on, by its rules that delete headers; uvicorn would append them to the headers."""
    trailers = [
        "X-Request-Timeout-Seconds: 1",
        "Serve_Multiplexed_Model_Id: a",
        "Authorization: Bearer a",
        "Content-Type: a/b",
    ]
    body = json.dumps(chat_body()).encode()
    sent = wire.chunked(CHAT, body, ["Content-Type: application/json"], trailers)
    num_calls = len(replica.headers.get(CHAT, ()))
    with wire.connect(front) as connection:
        for _ in range(2):  # the second request of the connection has headers again
            connection.sendall(sent)
            assert wire.receive(connection).status == 200
    for arrived in replica.headers[CHAT][num_calls:]:
        assert "content-type" in arrived
        assert not arrived & {"x-request-timeout-seconds", "serve_multiplexed_model_id", "authorization"}


def test_probes_and_scrapes_share_an_answer_of_the_cluster(front: str, cluster: Cluster) -> None:
    wire.exchange(front, wire.get("/health"))
    num_status = cluster.num_status
    with ThreadPoolExecutor(8) as pool:
        paths = ["/health", "/metrics"] * 10
        answers = list(pool.map(lambda path: wire.exchange(front, wire.get(path)), paths))
    assert {answer.status for answer in answers} == {200}
    assert cluster.num_status == num_status


def test_without_a_replica_there_is_a_503_in_the_shape_of_errors() -> None:
    with ExitStack() as replica:
        url = replica.enter_context(listening(app_of(Cluster())))
        with behind_haproxy(url) as front:
            replica.close()
            answer = wire.exchange(front, wire.get("/health"))
    assert (answer.status, answer.error()["code"], answer.header("retry-after")) == (503, "no_replica", ["1"])
