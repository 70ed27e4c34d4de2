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


class ServerFailed(OutriderError):
    """The server could not be reached or returned an error; says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of the answer."""

    text: str
    drafter: str | None  # None: the target's own tokens


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

        Raises ServerFailed: no answer: the question is dropped; or the answer broke off: the received part is kept.
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
        first_token_s, finish = None, "stop"
        with closing(self._chunks(body)) as chunks:
            for chunk in chunks:
                elapsed_s = time.monotonic() - start_s
                first_token_s = first_token_s or elapsed_s
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
                    raise ServerFailed(error_message(response))
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if not data:
                        continue
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ServerFailed(chunk["error"]["message"])
                    yield chunk
        except httpx.HTTPError as error:
            raise ServerFailed(f"the connection failed: {error or type(error).__name__}") from error
        raise ServerFailed("the answer broke off")


def connect(url: str, api_key: str | None, timeout_s: float = READ_TIMEOUT_S) -> httpx.Client:
    """An HTTP client for the server at ``url``, with or without ``/v1``. The caller closes it."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)


def served_model(client: httpx.Client) -> str:
    """Name of the served model. Raises ServerFailed."""
    response = get(client, "/v1/models")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ServerFailed(f"{response.url}: is no list of models, so that this is no server with OpenAI's API") from error


def get(client: httpx.Client, path: str) -> httpx.Response:
    """A successful response. Raises ServerFailed."""
    url = f"{client.base_url}".rstrip("/") + path
    try:
        response = client.get(path)
        response.raise_for_status()
        return response
    except httpx.HTTPStatusError as error:
        raise ServerFailed(f"{url}: {error_message(error.response)}") from error
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ServerFailed(f"{url}: {reason}. Is the server running? `outrider serve` starts it") from error


def error_message(response: httpx.Response) -> str:
    """The status code, and the message of an error in OpenAI's shape or else the start of the response."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    return f"the server answered {response.status_code}: {message}"
