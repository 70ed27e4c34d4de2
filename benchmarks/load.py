"""The same requests over HTTP and to an in-process cluster, with the times of each answer's pieces."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from benchmarks.timed_http import BrokenResponse, TimedResponse, post_json
from cluster.client import EngineClient
from cluster.errors import OutriderError
from cluster.sampling_params import SamplingParams
from cluster.types import Request

REQUEST_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, for either."""

    id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    drafting: str = "auto"  # the API's parameter; not used in process
    cache_salt: str = ""  # likewise; requests of other salts share neither a prefix nor what drafters learn of text


@dataclass(slots=True)
class TimedAnswer:
    """``pieces_s``: arrival of each piece, in seconds after the request was sent. A piece may hold several tokens."""

    sent_s: float
    pieces_s: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    error: str | None = None
    status: int | None = None  # of HTTP; None: no response
    retry_after: str | None = None  # the header
    is_lost: bool = False  # the error is a connection that failed or ended, not an answer of the server

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for one token."""
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def end_s(self) -> float:
        return self.sent_s + (self.pieces_s[-1] if self.pieces_s else 0.0)


Asker = Callable[[LoadRequest], Awaitable[TimedAnswer]]


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A server's address and model."""

    host: str
    port: int
    model: str

    def body(self, ask: LoadRequest) -> dict[str, Any]:
        """Of `/v1/completions`."""
        salt = {"cache_salt": ask.cache_salt} if ask.cache_salt else {}
        return salt | {
            "model": self.model,
            "prompt": list(ask.prompt_token_ids),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "ignore_eos": True,
            "drafting": ask.drafting,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def ask(self, ask: LoadRequest, on_piece: Callable[[int], None] = lambda number: None) -> TimedAnswer:
        """A streamed completion. Errors and broken streams are recorded in the answer. ``on_piece`` gets the number of
        pieces so far."""
        return await timed_answer(post_json(self.host, self.port, "/v1/completions", self.body(ask), on_piece))


async def timed_answer(call: Awaitable[TimedResponse]) -> TimedAnswer:
    """Of a streamed completion or chat that is sent when it is awaited. Errors are recorded in the answer."""
    answer = TimedAnswer(time.monotonic())
    try:
        response = await call
    except (OSError, BrokenResponse) as error:
        answer.error, answer.is_lost = f"{type(error).__name__}: {error}", True
        return answer
    answer.status, answer.retry_after = response.status, response.headers.get("retry-after")
    if response.status != HTTPStatus.OK:
        answer.error = f"{response.status} {response.body.decode(errors='replace')}"
        return answer
    for came_s, event in _events(response.chunks):
        _take(answer, came_s - answer.sent_s, event)
    if not response.whole and answer.error is None:
        answer.error, answer.is_lost = "the stream broke off", True
    return answer


def _events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of a stream, each with the arrival time of its end."""
    rest = b""
    for came_s, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data and data != b"[DONE]" and not data.startswith(b":"):  # a comment keeps a connection alive
                try:
                    yield came_s, json.loads(data)
                except json.JSONDecodeError:
                    yield came_s, {"error": {"message": f"not an event: {data[:300]!r}"}}


def _take(answer: TimedAnswer, came_s: float, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
        return
    text = "".join(_text(choice) for choice in event.get("choices", ()))
    if text:
        answer.text += text
        answer.pieces_s.append(came_s)
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
        details = event["usage"].get("completion_tokens_details") or {}  # other servers do not tell
        answer.num_accepted = details.get("accepted_prediction_tokens", 0)
        answer.num_proposed = details.get("rejected_prediction_tokens", 0) + answer.num_accepted


def _text(choice: dict[str, Any]) -> str:
    """Of a completion, or of a chat: its words, or the reasoning before them."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


async def ask_engine(client: EngineClient, ask: LoadRequest) -> TimedAnswer:
    """The same request to an in-process engine."""
    answer = TimedAnswer(time.monotonic())
    sampling = SamplingParams(ask.max_tokens, ask.temperature, seed=ask.seed, ignore_eos=True)
    async for commit in client.generate(Request(ask.id, ask.prompt_token_ids, sampling, time.monotonic())):
        if commit.token_ids:
            answer.pieces_s.append(time.monotonic() - answer.sent_s)
        answer.num_tokens += len(commit.token_ids)
        answer.num_proposed += commit.num_proposed
        answer.num_accepted += commit.num_accepted
        answer.error = commit.error
    return answer


async def run_streams(
    ask_one: Asker, asks: Sequence[LoadRequest], num_streams: int, deadline_s: float = REQUEST_DEADLINE_S
) -> list[TimedAnswer]:
    """Answers in the order of the requests, ``num_streams`` of which run at a time. One that takes longer than
    ``deadline_s`` has an error."""
    waiting = iter(enumerate(asks))
    answers: dict[int, TimedAnswer] = {}

    async def stream() -> None:
        for i, ask in waiting:
            sent_s = time.monotonic()
            try:
                async with asyncio.timeout(deadline_s):
                    answers[i] = await ask_one(ask)
            except TimeoutError:
                answers[i] = TimedAnswer(sent_s, error=f"no answer within {deadline_s:g} s")

    await asyncio.gather(*(stream() for _ in range(num_streams)))
    return [answers[i] for i in range(len(asks))]


async def run_arrivals(ask_one: Asker, arrivals: Sequence[tuple[float, LoadRequest]]) -> list[TimedAnswer]:
    """Answers in the order of the requests, each of which is sent at its second from now, whatever is under way."""
    start_s = time.monotonic()

    async def one(at_s: float, ask: LoadRequest) -> TimedAnswer:
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        return await ask_one(ask)

    return list(await asyncio.gather(*(one(*arrival) for arrival in arrivals)))


class BenchFailed(OutriderError):
    """A request was not answered, so there is nothing to compare."""


def checked(answers: list[TimedAnswer], what: str = "a request") -> list[TimedAnswer]:
    """The answers. Raises BenchFailed: one has no tokens."""
    for answer in answers:
        if answer.error is not None or not answer.pieces_s:
            raise BenchFailed(f"{what} was not answered: {answer.error or 'no token came'}")
    return answers


def sum_tokens(answers: Sequence[TimedAnswer]) -> int:
    return sum([answer.num_tokens for answer in answers])


def tokens_per_s(answers: Sequence[TimedAnswer]) -> float:
    """Over the time in which any of them ran."""
    elapsed_s = max(a.end_s for a in answers) - min(a.sent_s for a in answers)
    return sum_tokens(answers) / elapsed_s


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
