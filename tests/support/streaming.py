"""Streams of a real server, some of whose processes are killed meanwhile."""

import threading
from dataclasses import dataclass, field

import httpx
import openai

from benchmarks.server import ServerProcess
from tests.support.waiting import DEADLINE_S, eventually, gauge

MODEL = "smollm2-135m"
PROMPT = "The lighthouse keeper wrote the same line every day: the sea is calm and the lamp is lit. The lighthouse keeper"


@dataclass
class Streamed:
    """Concurrent streamed completions."""

    url: str
    max_tokens: int
    drafting: str = "auto"
    model: str = MODEL
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
            assert event.wait(DEADLINE_S), "a stream did not begin"

    def wait_end(self) -> None:
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a stream did not end"

    def _stream(self, i: int) -> None:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            try:
                stream = client.completions.create(
                    model=self.model,
                    prompt=PROMPT,
                    max_tokens=self.max_tokens,
                    temperature=0.8 * (i % 2),
                    seed=i,
                    stream=True,
                    extra_body={"ignore_eos": True, "drafting": self.drafting},
                )
                pieces = []
                for chunk in stream:
                    pieces.append(chunk.choices[0].text if chunk.choices else "")
                    if len(pieces) == 5:
                        self.flowing[i].set()
                self.texts[i] = "".join(pieces)
            except openai.OpenAIError as error:
                self.errors[i] = error
            finally:
                self.flowing[i].set()  # also of one that ended sooner: with an error, or in fewer and longer pieces


def run(
    server: ServerProcess, kill: str | None = None, max_tokens: int = 48, drafting: str = "auto", model: str = MODEL
) -> Streamed:
    """Runs four streams and kills the process of an actor class once all of them flow."""
    streamed = Streamed(server.url, max_tokens, drafting, model)
    streamed.start(4)
    streamed.wait_flowing()
    if kill is not None:
        workers = server.workers(kill)
        assert workers, f"there is no process of {kill}"
        for worker in workers:
            worker.kill()
    streamed.wait_end()
    return streamed


def undrafted(server: ServerProcess, max_tokens: int = 48, model: str = MODEL) -> dict[int, str]:
    """The answers of the target alone."""
    streamed = run(server, max_tokens=max_tokens, drafting="off", model=model)
    assert not streamed.errors
    return streamed.texts


def another_takes_over(server: ServerProcess, actor: str, plain: dict[int, str]) -> None:
    """Kills a process of an actor class under load: tokens stay equal, and its successor's decisions take effect."""
    killed = server.workers(actor)[0].pid
    disturbed = run(server, kill=actor)
    assert (disturbed.texts, disturbed.errors) == (plain, {})
    with server.client() as http:
        version = gauge(http, "outrider_routing_table_version")
        eventually(lambda: [p.pid for p in server.workers(actor)] not in ([], [killed]))
        # A restarted one is heard only if it goes on from the version that the targets have.
        streamed = Streamed(server.url, 120)
        streamed.start(2)
        eventually(lambda: gauge(http, "outrider_routing_table_version") > version)
        streamed.wait_end()
        assert not streamed.errors


def answers(http: httpx.Client, model: str = MODEL) -> bool:
    """Whether a completion is answered now."""
    return http.post("/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 1}).status_code == 200
