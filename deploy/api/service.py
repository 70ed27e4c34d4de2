"""The routes' implementation."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from cluster.client import LOST_S, ClusterStatus, EngineClient
from cluster.errors import LinkClosed
from cluster.sampling_params import Grammar
from cluster.types import Adapter, Commit, ModelInfo
from deploy.api.admission import Admission
from deploy.api.answer import Answer
from deploy.api.anthropic import AnthropicWriter, CountTokensRequest, MessagesRequest
from deploy.api.body import BodyReader, Strict
from deploy.api.call import AnswerWriter, Call, CallResponse, Shared
from deploy.api.choice import Choice, OutputOptions
from deploy.api.choice_writer import ChatWriter, CompletionWriter
from deploy.api.dashboard import DashboardData
from deploy.api.errors import ApiError, bad_request, overloaded, timed_out
from deploy.api.grammar_checker import GrammarChecker
from deploy.api.metrics import Metrics, MetricsPage, Peers
from deploy.api.operators import Operators, SwapAdapter, TryPolicy
from deploy.api.params import (
    Prompt,
    check_call,
    check_model,
    domain_of,
    is_limited,
    make_requests,
    parse_drafting,
    wants_prompt_only,
)
from deploy.api.prompts import Prompts
from deploy.api.responses import ResponsesRequest, ResponseWriter
from deploy.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from deploy.api.settings import ApiSettings
from deploy.api.structured import grammar_of
from deploy.api.tasks import Cached, ThreadShares, unless_disconnected
from deploy.api.tenants import NOBODY, Budgets, KeyFiles, Tenant
from deploy.api.tokenizer import Tokenizer
from deploy.api.tools import AnswerForm
from router.planning.fair_share import SharedLimit

T = TypeVar("T")
Translated = ResponsesRequest | MessagesRequest
_WRITERS: Mapping[type[Strict], Callable[[Any, Answer], AnswerWriter]] = {
    ChatRequest: ChatWriter,
    CompletionRequest: CompletionWriter,
    ResponsesRequest: ResponseWriter,
    MessagesRequest: AnthropicWriter,
}

_INLINE_BYTES = 2000  # of a body that takes too little time to be shared


class Service:
    """State shared by all calls. Methods may raise any error of ``errors.as_api_error``."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        settings: ApiSettings,
        try_policy: TryPolicy | None = None,
        peers: Peers | None = None,
        swap_adapter: SwapAdapter | None = None,
    ) -> None:
        self.metrics = Metrics(settings.request_timeout_s, None if peers is None else peers.own_name)
        self._client = client
        self._tokenizer = tokenizer
        self._settings = settings
        self._keys = KeyFiles(settings.api_keys_file, settings.operator_keys_file, settings.most, settings.keys_refresh_s)
        self._budgets = Budgets(self.metrics.record_over_budget)
        self.calls = SharedLimit(settings.max_calls)
        self._threads = ThreadShares()
        self._bodies = BodyReader(settings, self._threads)
        self._admission = Admission(settings)
        self._num_replicas = settings.num_replicas
        self._fewer_since_s: float | None = None  # since when fewer are reported
        self._grammars: GrammarChecker | None = None
        self._set_tenants()
        self._prompts = Prompts(tokenizer, self._in_share, settings.max_request_bytes)
        self._form = AnswerForm.of(tokenizer, settings)
        self._status = Cached(lambda: self._ask(self._client.status()), settings.status_ttl_s)
        self.operators = Operators(
            self._bodies, lambda: self._keys.operators, client, self.status, swap_adapter, try_policy, settings
        )
        self.dashboard = DashboardData(self.status, lambda: self._admission.num_queued, settings.num_replicas)
        shared = self._client, self._admission, self._budgets, self.metrics, self.dashboard, self._settings, self._threads
        self._shared = Shared(*shared)
        self.metrics_page = MetricsPage(self.metrics, self.status, peers, self.divide)
        self.metrics.queued.set_function(lambda: self._admission.num_queued)
        self._info: ModelInfo | None = None
        self._started_s = int(time.time())
        self.divide(settings.most)  # until it is known how many there are
        self._fewer_since_s = -LOST_S  # the first number that is reported counts at once

    async def check_key(self, request: Request) -> None:
        """Notes the tenant. Raises ApiError where keys are configured: 401 for an unknown one, 429 for too many calls."""
        if self._keys.refresh(request.state.arrival_s):
            self._set_tenants()
        if self._keys.callers is None:
            return
        headers = request.headers
        tenant = self._keys.callers.check(headers.get("authorization"), headers.get("x-api-key"))
        request.state.tenant = tenant
        self.calls.hold(tenant.name, 1)
        request.state.holder = tenant.name
        if self.calls.is_exceeded(tenant.name, least=1):
            raise overloaded(f"too many calls of {tenant.name} at once; try again later", self._settings.retry_after_s)
        if request.method == "POST":  # what is polled is cheap
            try:
                self._budgets.take_request(tenant, request.state.arrival_s)
            finally:
                request.state.budget_headers = self._budgets.headers(tenant, request.state.arrival_s)

    def divide(self, num_replicas: int) -> None:
        """So many replicas of the API are known to run, each of which gives its part. A fixed number stays."""
        num, now_s = min(max(num_replicas, self._settings.num_replicas), self._settings.most), time.monotonic()
        # A new supervisor knows of no replica until each has sent its metrics: limits must not grow by that.
        self._fewer_since_s = None if num >= self._num_replicas else self._fewer_since_s or now_s
        if num == self._num_replicas or (self._fewer_since_s is not None and now_s < self._fewer_since_s + LOST_S):
            return
        self._fewer_since_s = None
        self._num_replicas = self.dashboard.num_replicas = num
        self._admission.divide(num)
        self._set_tenants()

    def _set_tenants(self) -> None:
        tenants = {} if self._keys.callers is None else self._keys.callers.tenants
        self._budgets.set_tenants(tenants.values(), self._num_replicas, time.monotonic())
        self._admission.set_tenants(tenants)
        if self._grammars is not None:
            self._grammars.set_tenants(tenants)
        self.calls.is_shared = self._bodies.held.is_shared = self._threads.is_shared = len(tenants) > 1

    async def info(self) -> ModelInfo:
        """Description of the served model, whose adapters may change; the last one while the cluster does not answer."""
        try:
            self._info = await self._ask(self._client.model())
        except LinkClosed:
            if self._info is None:
                raise
        return self._info

    async def status(self) -> ClusterStatus:
        """State of the targets and drafters."""
        return await self._status.get()

    async def load(self) -> Mapping[str, object]:
        """The number of requests that run or wait."""
        at_targets = sum(target.num_running + target.num_waiting for target in (await self.status()).targets)
        return {"server_load": at_targets + self._admission.num_queued}

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        fields = await self._bodies.read(request, ChatRequest)
        return await self._chat(request, fields, fields)

    async def responses(self, request: Request) -> Response:
        """Answers a conversation in OpenAI's newer format. Nothing is stored."""
        return await self._translated(request, await self._bodies.read(request, ResponsesRequest))

    async def messages(self, request: Request) -> Response:
        """Answers a conversation in Anthropic's format."""
        return await self._translated(request, await self._bodies.read(request, MessagesRequest))

    async def count_tokens(self, request: Request) -> Response:
        """The number of tokens of a conversation in Anthropic's format."""
        fields = await self._bodies.read(request, CountTokensRequest)
        with fields.named_as_here():
            chat = fields.as_chat()
            info = await self.info()
            check_model(chat.model, info)
            token_ids = await self._prompts.token_ids(request, chat, info)
        return JSONResponse({"input_tokens": len(token_ids)})

    async def embeddings(self, request: Request) -> Response:
        """Not supported: the served model generates text."""
        message = f"{(await self.info()).name} generates text and has no embeddings; serve an embedding model elsewhere"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, param="model", code="unsupported_endpoint")

    async def _translated(self, request: Request, fields: Translated) -> Response:
        with fields.named_as_here():
            return await self._chat(request, fields.as_chat(), fields)

    async def _chat(self, request: Request, fields: ChatRequest, body: ChatRequest | Translated) -> Response:
        """``body``: as the caller wrote it."""
        info = await self.info()
        check_call(fields, 1, info, self._settings)
        use = self._form.use_of(fields)
        template = self._tokenizer.chat_template
        if fields.reasoning_effort is not None and not (template is not None and template.knows_effort):
            request.state.fields_without_effect += (body.own_names.get("reasoning_effort", "reasoning_effort"),)
        drops_oldest = isinstance(body, ResponsesRequest) and body.truncation == "auto"
        prompt = await self._prompts.of_chat(request, fields, info, drops_oldest=drops_oldest)
        predicted = await self._prompts.prediction(request, fields, len(prompt.token_ids), info)
        prompt = replace(prompt, prediction_token_ids=predicted)
        if isinstance(body, MessagesRequest):  # which stops where the context ends
            room = info.max_model_len - len(prompt.token_ids)
            fields = fields.model_copy(update={"max_completion_tokens": min(body.max_tokens, room)})
        opening = self._form.opening(self._tokenizer, prompt.token_ids)
        build = partial(self._form.grammar, use, opening, grammar_of(fields))
        # A short schema of a tool may take long to read: its parts can refer to each other many times.
        if (use.tools and self._form.reads_schemas) or request.state.body_len > _INLINE_BYTES:
            asked = await self._in_share(request, partial(asyncio.to_thread, build), is_brief=False)
        else:
            asked = build()
        new_parser = self._form.new_parser(use, opening)
        options = OutputOptions(
            new_parser=new_parser,
            shown=() if new_parser is None else self._form.shown,
            short_ids=self._form.calls is not None and self._form.calls.short_ids,
        )
        return await self._call(request, fields, body, [prompt], options, asked)

    async def completions(self, request: Request) -> Response:
        """Continues a text."""
        fields = await self._bodies.read(request, CompletionRequest)
        info = await self.info()
        check_call(fields, len(fields.prompts()), info, self._settings)
        prompts = await self._prompts.of_completion(request, fields, info)
        return await self._call(request, fields, fields, prompts, OutputOptions(), grammar_of(fields))

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        fields, info = await self._bodies.read(request, TokenizeRequest), await self.info()
        check_model(fields.model, info)
        return await self._prompts.tokenize(request, fields, info)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        fields, info = await self._bodies.read(request, DetokenizeRequest), await self.info()
        check_model(fields.model, info)
        return await self._prompts.detokenize(request, fields, info)

    async def _in_share(self, request: Request, work: Callable[[], Awaitable[T]], *, is_brief: bool = True) -> T:
        """As ``_in_time``, within the tenant's share of threads. ``is_brief``: what a short body asks for is awaited at
        once."""
        if is_brief and request.state.body_len <= _INLINE_BYTES:
            return await work()
        tenant: Tenant = getattr(request.state, "tenant", NOBODY)
        return await self._in_time(request, self._threads.run(tenant.name, work))

    async def _in_time(self, request: Request, work: Awaitable[T], advice: str = "send a shorter text") -> T:
        """Awaits ``work`` until the call's deadline or until its client disconnects."""
        timeout_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(request.state.arrival_s + timeout_s - time.monotonic()):
                return await unless_disconnected(request.receive, work)
        except TimeoutError as error:
            raise timed_out(timeout_s, advice) from error

    async def models(self) -> dict[str, object]:
        """The served model by each of its names, and its adapters."""
        info = await self.info()
        names = (info.name, *info.aliases, *(adapter.name for adapter in info.adapters))
        return {"object": "list", "data": [_card(name, info, self._started_s) for name in names]}

    async def model(self, name: str) -> dict[str, object]:
        """The served model, or an adapter."""
        return _card(name, await self.info(), self._started_s)

    async def health(self) -> dict[str, object]:
        """200 if a target is ready, else 503 with the reason."""
        status = await self.status()
        if not any(target.state == "ready" for target in status.targets):
            states = ", ".join(f"{target.name} is {target.state}" for target in status.targets)
            raise LinkClosed(states or "the cluster has no target")
        if not self._client.is_linked:
            raise LinkClosed("this server has no link to a target")
        return {
            "status": "ok",
            "model": status.model,
            "targets": {target.name: target.state for target in status.targets},
            "drafters": {drafter.name: drafter.state for drafter in status.drafters},
        }

    async def _call(
        self,
        request: Request,
        fields: ChatRequest | CompletionRequest,
        body: ChatRequest | CompletionRequest | Translated,
        prompts: Sequence[Prompt],
        options: OutputOptions,
        asked: tuple[str, Grammar] | None,
    ) -> Response:
        """``body``: as the caller wrote it. ``asked``: the grammar, and the field that asks for it."""
        info = await self.info()
        tenant: Tenant = getattr(request.state, "tenant", NOBODY)
        grammar = (
            None
            if asked is None
            else await self._in_time(request, self._checked(*asked, info, tenant.name), "use simpler grammars")
        )
        call_id = f"{body.id_prefix}{secrets.token_hex(16)}"
        requests = make_requests(
            fields,
            prompts,
            call_id=call_id,
            chain=await parse_drafting(fields.drafting, self.status),
            arrival_s=request.state.arrival_s,
            info=info,
            settings=self._settings,
            tenant=tenant.salt,
            trace=getattr(request.state, "trace", ""),
            derived={"grammar": grammar, **await self._prompts.sampling(request, fields)},
        )
        adapter = requests[0].adapter
        model = info.name if adapter is None else adapter.name
        options = replace(
            options,
            details=bool(fields.drafting_details) or requests[0].sampling.top_logprobs is not None,
            token_ids=bool(fields.return_token_ids),
            skip_special_tokens=fields.skip_special_tokens is not False,
            include_stop=bool(fields.include_stop_str_in_output),
            prompt_logprobs=fields.prompt_logprobs is not None,
            is_prompt_only=wants_prompt_only(fields),
        )
        n = fields.n or 1
        choices = [
            Choice(
                i,
                one,
                self._tokenizer,
                info,
                replace(options, echo=prompts[i // n].echo),
                counts_prompt=i % n == 0,
                on_tokens=self._on_tokens,
            )
            for i, one in enumerate(requests)
        ]
        answer = Answer(call_id, model, _fingerprint(info, adapter), choices, self._tokenizer)
        call = Call(
            request_id=request.state.request_id,
            id=call_id,
            model=model,
            choices=choices,
            writer=_WRITERS[type(body)](body, answer),
            stream=bool(fields.stream),
            domain=domain_of(fields, asked is not None),
            is_limited=is_limited(fields),
        )
        request.state.call = call
        return CallResponse(call, self._shared)

    def _on_tokens(self, commit: Commit, num_needed: int, gap_s: float | None) -> None:
        self.metrics.on_tokens(commit, num_needed, gap_s)
        self.dashboard.timelines.note(commit, num_needed)
        self.dashboard.history.answers.note(commit)

    async def _checked(self, field: str, grammar: Grammar, info: ModelInfo, tenant: str) -> Grammar:
        """Raises ApiError: 400 naming ``field`` for a grammar that cannot be enforced, 429 with too many to check."""
        if self._grammars is None:
            if self._tokenizer.folder is None:
                raise bad_request(field, "is not supported: the tokenizer was not loaded from a folder")
            self._grammars = GrammarChecker(self._tokenizer.folder, info, self._settings.retry_after_s)
            self._set_tenants()
        await self._grammars.check(field, grammar, tenant)
        return grammar

    async def _ask(self, question: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                return await question
        except TimeoutError as error:
            raise LinkClosed(f"the cluster did not answer within {self._settings.engine_timeout_s:g} seconds") from error


def _fingerprint(info: ModelInfo, adapter: Adapter | None) -> str:
    """Equal fingerprints and seeds give equal answers, independent of drafting, routing and load."""
    served = f"{info.name} {info.tokenizer_fingerprint}" + ("" if adapter is None else f" {adapter.key}")
    return "fp_" + hashlib.sha256(served.encode()).hexdigest()[:12]


def _card(name: str, info: ModelInfo, created_s: int) -> dict[str, object]:
    """Raises ApiError (404): there is no such model."""
    adapter = check_model(name, info)
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "outrider",
        "parent": None if adapter is None else info.name,
        "max_model_len": info.max_model_len,
    }
