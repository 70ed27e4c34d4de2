"""Processes of the real server are killed while it streams, the one that is missed most the last."""

import threading
from dataclasses import dataclass, field

import openai
import pytest

from deploy.bench.server import ServerProcess
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL = "smollm2-135m"
PROMPT = "The lighthouse keeper wrote the same line every day: the sea is calm and the lamp is lit. The lighthouse keeper"


@dataclass
class Streamed:
    """Completions on threads of their own, as they come."""

    url: str
    max_tokens: int
    texts: dict[int, str] = field(default_factory=dict)
    errors: dict[int, openai.OpenAIError] = field(default_factory=dict)
    flowing: list[threading.Event] = field(default_factory=list)

    def start(self, num_streams: int) -> None:
        self.flowing = [threading.Event() for _ in range(num_streams)]
        self.threads = [threading.Thread(target=self._stream, args=(i,)) for i in range(num_streams)]
        for thread in self.threads:
            thread.start()

    def wait_flowing(self) -> None:
        for event in self.flowing:
            assert event.wait(60), "a stream did not begin"

    def wait_end(self) -> None:
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive(), "a stream did not end"

    def _stream(self, i: int) -> None:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            try:
                stream = client.completions.create(
                    model=MODEL,
                    prompt=PROMPT,
                    max_tokens=self.max_tokens,
                    temperature=0.8 * (i % 2),
                    seed=i,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                pieces = []
                for chunk in stream:
                    pieces.append(chunk.choices[0].text if chunk.choices else "")
                    if len(pieces) == 5:
                        self.flowing[i].set()
                self.texts[i] = "".join(pieces)
            except openai.OpenAIError as error:
                self.errors[i] = error


def run(server: ServerProcess, kill: str | None, max_tokens: int = 80) -> Streamed:
    """Four streams; the process of an actor class dies once all of them flow."""
    streamed = Streamed(server.url, max_tokens)
    streamed.start(4)
    streamed.wait_flowing()
    if kill is not None:
        workers = server.workers(kill)
        assert workers, f"there is no process of {kill}"
        for worker in workers:
            worker.kill()
    streamed.wait_end()
    return streamed


def test_killed_drafters_change_no_token_and_come_back(server: ServerProcess) -> None:
    plain = run(server, kill=None)
    assert not plain.errors
    with server.client() as http:
        restarts = gauge(http, "outrider_drafter_restarts")
        disturbed = run(server, kill="DrafterActor")
        assert (disturbed.texts, disturbed.errors) == (plain.texts, {})
        eventually(lambda: gauge(http, "outrider_drafter_restarts") == restarts + 2)
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)
        proposed = gauge(http, "outrider_drafter_proposed", "ngram")
        assert run(server, kill=None).texts == plain.texts
        assert gauge(http, "outrider_drafter_proposed", "ngram") > proposed, "the new process does not draft"


def test_without_a_router_the_last_table_serves_and_another_takes_over(server: ServerProcess) -> None:
    plain = run(server, kill=None)
    with server.client() as http:
        killed = server.workers("RouterActor")[0].pid
        disturbed = run(server, kill="RouterActor")
        assert (disturbed.texts, disturbed.errors) == (plain.texts, {})
        version = gauge(http, "outrider_routing_table_version")
        eventually(lambda: [p.pid for p in server.workers("RouterActor")] not in ([], [killed]))
        # A restarted router is heard only if it goes on from the version that the targets have.
        streamed = Streamed(server.url, 200)
        streamed.start(2)
        eventually(lambda: gauge(http, "outrider_routing_table_version") > version)
        streamed.wait_end()
        assert not streamed.errors


def test_a_supervisor_that_is_killed_finds_its_members_again(server: ServerProcess) -> None:
    target, drafters = server.workers("TargetActor")[0].pid, [p.pid for p in server.workers("DrafterActor")]
    disturbed = run(server, kill="PoolSupervisor")
    assert not disturbed.errors
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_ready") == 1 and gauge(http, "outrider_drafter_ready") == 2)
    assert [p.pid for p in server.workers("TargetActor")] == [target]
    assert [p.pid for p in server.workers("DrafterActor")] == drafters
    server.workers("DrafterActor")[0].kill()
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_drafter_restarts") == 1)
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)


def test_a_killed_target_ends_its_streams_with_an_error_and_serves_again(server: ServerProcess) -> None:
    plain = run(server, kill=None)
    killed = run(server, kill="TargetActor", max_tokens=400)
    assert not killed.texts
    assert {type(error) for error in killed.errors.values()} == {openai.APIError}
    assert all("again" in str(error) for error in killed.errors.values()), killed.errors
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_ready") == 1)
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)

        def answers() -> bool:
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
            return http.post("/v1/completions", json=body).status_code == 200

        eventually(answers)
    assert run(server, kill=None).texts == plain.texts
