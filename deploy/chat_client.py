"""The client of a running server, and a conversation with it."""

import json
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.errors import OutriderError

CONNECT_S = 5.0
READ_TIMEOUT_S = 120.0  # between two chunks of an answer


class ChatFailed(OutriderError):
    """The server could not be reached or returned an error; says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of the answer and its drafter; None for the target's own tokens."""

    text: str
    drafter: str | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of an answer from the server, and times measured by the client."""

    num_tokens: int
    first_token_s: float
    total_s: float
    acceptance: dict[str, Any]  # the server's ``acceptance`` object
    finish: str


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the settings of the next answer."""

    client: httpx.Client
    model: str
    system: str | None = None
    drafting: str = "auto"
    sampling: dict[str, Any] = field(default_factory=dict)  # additional fields of the request
    turns: list[dict[str, str]] = field(default_factory=list)
    last: Summary | None = None

    def reset(self) -> None:
        self.turns.clear()
        self.last = None

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """Streams the answer; ``last`` summarizes it. Closing the generator aborts it; the received part is kept.

        Raises:
            ChatFailed: no answer: the question is dropped; or the answer broke off: the received part is kept.
        """
        question = {"role": "user", "content": text}
        answer = ""
        try:
            with closing(self._stream(question)) as pieces:
                for piece in pieces:
                    answer += piece.text
                    yield piece
        finally:
            if answer:
                self.turns += [question, {"role": "assistant", "content": answer}]

    def _stream(self, question: dict[str, str]) -> Generator[Piece, None, None]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {
            "model": self.model,
            "messages": [*system, *self.turns, question],
            "stream": True,
            "stream_options": {"include_usage": True},
            "drafting": self.drafting,
            "drafting_details": True,
            **self.sampling,
        }
        start_s = time.monotonic()
        first_token_s = None
        finish = "stop"
        with closing(self._chunks(body)) as chunks:
            for chunk in chunks:
                elapsed_s = time.monotonic() - start_s
                first_token_s = elapsed_s if first_token_s is None else first_token_s
                if chunk["usage"] is None:
                    finish = chunk["choices"][0]["finish_reason"] or finish
                    for segment in chunk.get("outrider", {}).get("segments", ()):
                        yield Piece(segment["text"], segment["drafter"])
                else:
                    num_tokens, acceptance = chunk["usage"]["completion_tokens"], chunk["outrider"]["acceptance"]
                    self.last = Summary(num_tokens, first_token_s, elapsed_s, acceptance, finish)

    def _chunks(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ChatFailed(error_message(response))
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if not data:
                        continue
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ChatFailed(chunk["error"]["message"])
                    yield chunk
        except httpx.HTTPError as error:
            raise ChatFailed(f"the connection failed: {error or type(error).__name__}") from error
        raise ChatFailed("the answer broke off")


def connect(url: str, api_key: str | None, timeout_s: float = READ_TIMEOUT_S) -> httpx.Client:
    """An HTTP client for the server at ``url``, with or without ``/v1``. The caller closes it."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)


def served_model(client: httpx.Client) -> str:
    """Name of the served model. Raises ChatFailed if the server does not answer."""
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatFailed(f"no server answers at {client.base_url}; start one with `outrider serve`") from error
    if response.status_code != httpx.codes.OK:
        raise ChatFailed(error_message(response))
    return str(response.json()["data"][0]["id"])


def error_message(response: httpx.Response) -> str:
    """The status code, and the message of an error in OpenAI's shape or else the start of the response."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    return f"the server answered {response.status_code}: {message}"
