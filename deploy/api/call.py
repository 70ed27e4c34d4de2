"""Runs one call: admission, generation of its choices at once, and sending the answer."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.client import EngineClient
from cluster.errors import LinkClosed, Overloaded, Unattainable
from cluster.logs import frames_of, without_messages
from cluster.types import Commit
from deploy.api.admission import Admission
from deploy.api.choice import Choice, Delta, EngineFailed
from deploy.api.dashboard import DashboardData
from deploy.api.errors import ApiError, ClientGone, as_api_error, internal_error, timed_out
from deploy.api.metrics import Metrics
from deploy.api.settings import ApiSettings
from deploy.api.tasks import ThreadShares, unless_disconnected
from deploy.api.tenants import NOBODY, Budgets, Tenant


class Generation:
    """Owns one task per choice within ``async with``; leaving early aborts the unfinished ones.

    The tasks absorb commits as they arrive. ``deltas`` yields the text since its last batch, so a slow client gets fewer
    and longer deltas, and memory is bounded by max_tokens. ``on_end`` is called when the last task has ended.
    """

    def __init__(self, client: EngineClient, choices: Sequence[Choice], on_end: Callable[[], None]) -> None:
        self._client = client
        self._choices = choices
        self._on_end = on_end
        self._num_running = len(choices)
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Generation":
        for choice in self._choices:
            task = asyncio.create_task(self._run(choice), name=choice.request.id)
            task.add_done_callback(self._one_ended)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            # ``deltas`` raised the first error; the others are only logged.
            if isinstance(outcome, Exception) and outcome is not error:
                _logger.warning("a choice failed after the answer had ended: %s", frames_of(outcome))

    async def deltas(self) -> AsyncIterator[list[tuple[Choice, Delta]]]:
        """Batches of new text, until all have finished. Raises the first error of ``generate`` or ``Choice.absorb``."""
        unfinished = dict(zip(self._choices, self._tasks, strict=True))
        while unfinished:
            await self._news.wait()
            self._news.clear()
            batch = []
            for choice, task in list(unfinished.items()):
                if task.done():
                    task.result()
                if (delta := choice.take()) is not None:
                    batch.append((choice, delta))
                    if delta.finish is not None:
                        del unfinished[choice]
            if batch:
                yield batch

    async def finished(self) -> None:
        """Waits until every choice has finished. Raises as ``deltas``."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in self._tasks:
            if task.done():
                task.result()

    def _one_ended(self, task: asyncio.Task[None]) -> None:
        self._num_running -= 1
        self._news.set()
        if self._num_running == 0:
            self._on_end()

    async def _run(self, choice: Choice) -> None:
        # The protocol promises that closing the iterator aborts, so it is an async generator.
        commits = cast("AsyncGenerator[Commit, None]", self._client.generate(choice.request))
        choice.is_sent = True
        try:
            async for commit in commits:
                choice.absorb(commit, time.monotonic())
                self._news.set()
                if choice.finish is not None:
                    return
            raise LinkClosed("the target went away during generation")
        except (Overloaded, LinkClosed):
            choice.is_refused = not choice.is_served
            raise
        finally:
            await commits.aclose()


_logger = logging.getLogger(__name__)
_logger.addFilter(without_messages)

_RESERVED_TOKENS = 2048  # for an answer without a limit

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # disables buffering in nginx
]

DONE = b"data: [DONE]\n\n"


class EventStream:
    """A streamed response; the status line is sent with the first events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes) -> None:
        """Returns when the connection has accepted the events: backpressure from a slow client."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Writes the last events and ends the response."""
        await self.write(events)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class AnswerWriter(Protocol):
    """The bytes of one answer. ``document`` is called once, or ``events`` for each batch, and ``closing``."""

    def document(self, deltas: Sequence[Delta]) -> bytes: ...

    def events(self, batch: Sequence[tuple[Choice, Delta]]) -> bytes: ...

    def closing(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""


@dataclass(frozen=True, slots=True)
class Call:
    """A validated call."""

    request_id: str  # of the HTTP request, for logs
    id: str  # of the answer
    model: str
    choices: Sequence[Choice]
    writer: AnswerWriter
    stream: bool
    domain: str  # for metrics
    is_limited: bool = True  # the caller says how long answers may be

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(choice.request.prompt_token_ids) for choice in self.choices if choice.counts_prompt)

    @property
    def num_reserved_tokens(self) -> int:
        """Of prompts and of the longest answers; an answer without a limit counts as ``_RESERVED_TOKENS``. In the end the
        tokens used are charged."""
        longest = [choice.request.sampling.max_tokens for choice in self.choices]
        most = max(longest) if self.is_limited else _RESERVED_TOKENS
        return self.num_prompt_tokens + sum(min(one, most) for one in longest)

    @property
    def num_used_prompt_tokens(self) -> int:
        """``num_prompt_tokens``, or 0 of a call that was not sent, or that targets refused."""
        is_refused = any(choice.is_refused for choice in self.choices)
        is_served = any(choice.is_served for choice in self.choices)
        is_used = is_served or (not is_refused and any(choice.is_sent for choice in self.choices))
        return self.num_prompt_tokens if is_used else 0

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def arrival_s(self) -> float:
        return self.choices[0].request.arrival_s


@dataclass(frozen=True, slots=True)
class Shared:
    """What the calls of a process share."""

    client: EngineClient
    admission: Admission
    budgets: Budgets
    metrics: Metrics
    dashboard: DashboardData
    settings: ApiSettings
    threads: ThreadShares


class CallResponse(Response):
    """Generates while it is sent. The status line is sent with the first token, so earlier errors have their own status."""

    def __init__(self, call: Call, shared: Shared) -> None:
        super().__init__()
        self._call, self._shared = call, shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        document: Response | None = None
        tenant: Tenant = scope["state"].get("tenant", NOBODY)
        num_reserved = self._call.num_reserved_tokens
        self._reserve(tenant, num_reserved, scope["state"])
        for choice in self._call.choices:
            self._shared.dashboard.timelines.begin(choice.request, tenant.name)
        remaining_s = self._call.arrival_s + self._shared.settings.request_timeout_s - time.monotonic()
        try:
            async with asyncio.timeout(remaining_s) as deadline, self._generation(tenant.name) as generation:
                if self._call.stream:
                    await self._send_events(stream, generation, tenant.name)
                else:
                    document = await self._document(generation, tenant.name)
        except ClientGone:
            raise
        except Exception as error:
            if isinstance(error, Unattainable):
                self._shared.metrics.record_shed(self._call.choices)
            answer = timed_out(self._shared.settings.request_timeout_s) if deadline.expired() else self._error_of(error)
            if not stream.started:
                raise answer from error
            scope["state"]["error"] = answer
            await _within(self._shared.settings.send_error_timeout_s, stream.end(self._call.writer.error(answer)))
        finally:
            num_prompt = self._call.num_used_prompt_tokens
            num_output = self._call.num_output_tokens
            self._shared.budgets.give_back(tenant, num_reserved - num_prompt - num_output)
            self._shared.metrics.prompt_tokens.inc(num_prompt)
            self._shared.metrics.record_tenant(tenant.name, num_prompt, num_output)
            for choice in self._call.choices:
                self._shared.metrics.record_choice(choice)
                self._shared.metrics.record_drafts(self._call.domain, choice.request.adapter, choice.counts)
                self._shared.dashboard.timelines.end(choice)
                self._shared.dashboard.history.answers.end(choice)
        if document is not None:  # after the admission ended: a slow client must not delay others
            await _within(self._shared.settings.body_timeout_s, document(scope, receive, send))

    def _reserve(self, tenant: Tenant, num_tokens: int, state: dict[str, Any]) -> None:
        """Raises ApiError: the tenant's budget has not as many."""
        now_s = time.monotonic()
        try:
            self._shared.budgets.reserve(tenant, num_tokens, now_s)
        finally:
            state["budget_headers"] = self._shared.budgets.headers(tenant, now_s)

    @asynccontextmanager
    async def _generation(self, tenant: str) -> AsyncIterator[Generation]:
        is_queued = self._shared.admission.is_busy(len(self._call.choices), tenant)
        num_prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in self._call.choices)
        async with self._shared.admission.admitted(len(self._call.choices), tenant, num_prompt_tokens) as release:

            def end() -> None:  # charges before the next call is chosen
                refund = 0 if self._call.num_used_prompt_tokens else num_prompt_tokens
                self._shared.admission.charge(tenant, self._call.num_output_tokens - refund)
                release()

            admitted_s = time.monotonic()
            for choice in self._call.choices:
                choice.admitted_s = admitted_s
            queue_s = admitted_s - self._call.arrival_s
            self._shared.metrics.queue_s.observe(queue_s)
            ttft_s = self._call.choices[0].request.slo.ttft_s
            if is_queued and self._shared.settings.slo.shed and ttft_s is not None and queue_s > ttft_s:
                end()
                message = f"the call waited {queue_s:.2f} s for its turn, its first token was due after {ttft_s:.2f} s"
                raise Unattainable(message, self._shared.settings.retry_after_s)

            async with Generation(self._shared.client, self._call.choices, end) as generation:
                yield generation

    async def _document(self, generation: Generation, tenant: str) -> Response:
        await generation.finished()
        deltas = [choice.take() or Delta("") for choice in self._call.choices]
        is_scored = any(choice.request.sampling.top_logprobs is not None for choice in self._call.choices)
        document = await self._written(partial(self._call.writer.document, deltas), tenant, is_long=is_scored)
        return Response(document, media_type="application/json")

    async def _send_events(self, stream: EventStream, generation: Generation, tenant: str) -> None:
        writer = self._call.writer
        async for batch in generation.deltas():
            await stream.write(await self._written(partial(writer.events, batch), tenant))
        await stream.end(writer.closing())

    async def _written(self, write: Callable[[], bytes], tenant: str, *, is_long: bool = False) -> bytes:
        """Log-probabilities of a long prompt or answer take seconds to write: on a thread."""
        if not is_long and all(choice.request.sampling.prompt_logprobs is None for choice in self._call.choices):
            return write()
        return await self._shared.threads.run(tenant, partial(asyncio.to_thread, write))

    def _error_of(self, error: Exception) -> ApiError:
        known = as_api_error(error, self._shared.settings.retry_after_s)
        if known is not None:
            return known
        if isinstance(error, EngineFailed):
            _logger.error("call %s failed: %s", self._call.request_id, error)
            failure = internal_error(str(error), self._call.request_id)
            failure.headers["x-should-retry"] = "false"  # OpenAI's clients would send what fails again
            return failure
        _logger.error("call %s failed", self._call.request_id, exc_info=error)
        return internal_error("the server failed", self._call.request_id)


async def _within(timeout_s: float, sending: Awaitable[None]) -> None:
    """Raises ClientGone if the client does not read in time; the server then closes the connection."""
    try:
        async with asyncio.timeout(timeout_s):
            await sending
    except TimeoutError as error:
        raise ClientGone from error
