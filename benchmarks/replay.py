"""Chats sent to an OpenAI-compatible server at given times, whatever is under way (open loop)."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from benchmarks.load import TimedAnswer, timed_answer
from benchmarks.timed_http import post_json
from cluster.errors import InvalidField

PREFLIGHT_S = 10.0


@dataclass(frozen=True, slots=True)
class Chat:
    """One request of a replay, ``arrival_s`` after its start."""

    arrival_s: float
    domain: str
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times count from the arrival, so that a request that was sent late is not seen as fast."""

    chat: Chat
    late_s: float  # from the arrival until the request was sent, or until its deadline where it never was
    was_held: bool  # the bound on requests under way was reached when it arrived
    end_s: float  # after the start of the replay, as is the arrival
    answer: TimedAnswer

    @property
    def is_whole(self) -> bool:
        return self.answer.error is None

    @property
    def ttft_s(self) -> float:
        return self.late_s + self.answer.ttft_s

    @property
    def e2e_s(self) -> float:
        return self.late_s + self.answer.pieces_s[-1]

    def meets(self, ttft_s: float, tpot_s: float) -> bool:
        """Its objectives. An answer of one token has no time per token."""
        return self.is_whole and self.ttft_s <= ttft_s and (self.answer.tpot_s or 0.0) <= tpot_s


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where chats are sent. The repr does not hold the key."""

    host: str
    port: int
    path: str  # ends in /v1
    tls: bool
    headers: "_Headers"

    @classmethod
    def parse(cls, url: str, key: str | None) -> "Endpoint":
        """Of ``http(s)://HOST[:PORT][/PATH][/v1]``. Raises InvalidField."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidField("--url", url, str(error)) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidField("--url", url, "must be http://HOST:PORT or https://HOST")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidField("OPENAI_API_KEY", "...", "must be printable ASCII")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        headers = _Headers({} if key is None else {"authorization": f"Bearer {key}"})
        return cls(parts.hostname, port or (443 if tls else 80), path, tls, headers)

    def served_model(self, wanted: str | None) -> str:
        """``wanted``, or the first model without it. Raises InvalidField: no answer, a refusal, or no such model."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        url = f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}/models"
        try:
            response = httpx.get(url, headers=self.headers, timeout=PREFLIGHT_S, trust_env=False).raise_for_status()
            names = [str(model["id"]) for model in response.json()["data"]]
        except httpx.HTTPError as error:
            raise InvalidField("--url", url, f"does not answer ({error})") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidField("--url", url, "is no list of models") from error
        if wanted is None and names:
            return names[0]
        if wanted is None or wanted not in names:
            raise InvalidField("--model", str(wanted), f"is not served; there are: {', '.join(names) or 'none'}")
        return wanted

    async def ask(self, model: str, chat: Chat) -> TimedAnswer:
        """Streamed, greedy. Uses no field that is not in OpenAI's interface."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": chat.prompt}],
            "max_tokens": chat.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = f"{self.path}/chat/completions"
        answer = await timed_answer(post_json(self.host, self.port, path, body, headers=self.headers, tls=self.tls))
        if answer.error is None and not (answer.pieces_s and answer.num_tokens):
            answer.error = "an empty answer" if not answer.pieces_s else "no usage in the stream, so no number of tokens"
        return answer


class _Headers(dict[str, str]):
    """Not shown, since one may be a key."""

    def __repr__(self) -> str:
        return f"{len(self)} headers"


async def replay(
    endpoint: Endpoint,
    model: str,
    chats: Sequence[Chat],
    *,
    max_under_way: int,
    deadline_s: float,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Outcomes in order of arrival. A chat that arrives when ``max_under_way`` are open waits until one ends.

    Each ends at most ``deadline_s`` after its arrival; it is lost then.
    """
    room = asyncio.Semaphore(max_under_way)
    start_s = time.monotonic()

    async def one(chat: Chat) -> Outcome:
        due_s, was_held = start_s + chat.arrival_s, room.locked()
        sent_s: float | None = None
        try:
            async with asyncio.timeout(due_s + deadline_s - time.monotonic()), room:
                sent_s = time.monotonic()
                answer = await endpoint.ask(model, chat)
        except TimeoutError:
            answer = TimedAnswer(sent_s or time.monotonic(), error=f"no answer within {deadline_s:g} s", is_lost=True)
        end_s = time.monotonic()
        outcome = Outcome(chat, (sent_s or end_s) - due_s, was_held, end_s - start_s, answer)
        on_end(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for chat in chats:
            await asyncio.sleep(max(0.0, start_s + chat.arrival_s - time.monotonic()))
            tasks.append(group.create_task(one(chat)))
    return [task.result() for task in tasks]
