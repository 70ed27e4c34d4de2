"""The FastAPI app, served by uvicorn or Ray Serve."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Lifespan

from cluster.client import EngineClient
from cluster.config import ObservabilityConfig
from cluster.errors import InvalidField
from cluster.types import ModelInfo
from deploy.api import dashboard, operators
from deploy.api.anthropic_fields import CountTokensRequest, MessagesRequest
from deploy.api.dashboard.pages import PAGE, add_page
from deploy.api.errors import MESSAGES, install_handlers
from deploy.api.fields import Strict
from deploy.api.metrics import Peers
from deploy.api.middleware import Boundary, Cors
from deploy.api.openapi import body_of, describe, page
from deploy.api.operators import LoadAdapterRequest, PolicyTrialRequest, SwapAdapter, TryPolicy, UnloadAdapterRequest
from deploy.api.outcome import AuditLog
from deploy.api.response_fields import ResponsesRequest
from deploy.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deploy.api.service import Service
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from deploy.api.tracing import Tracing

VERSION = version_of("outrider")


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    settings: ApiSettings,
    lifespan: Lifespan[Any] | None = None,
    try_policy: TryPolicy | None = None,
    peers: Peers | None = None,
    swap_adapter: SwapAdapter | None = None,
) -> FastAPI:
    """The OpenAI-compatible app of ``client``, which the caller closes. ``peers`` None: it is the only replica of the API.

    Raises InvalidField: an unusable file.
    """
    service = Service(client, tokenizer, settings, try_policy, peers, swap_adapter)
    tracing = _tracing_of(settings.observability)
    audit_file = settings.observability.audit_log_file
    audit = None if audit_file is None else AuditLog(audit_file)

    @asynccontextmanager
    async def recording(app: FastAPI) -> AsyncIterator[None]:
        try:
            around = nullcontext() if lifespan is None else lifespan(app)
            async with service.dashboard.recording(), service.metrics_page.kept_known(), around:
                yield
        finally:
            if audit is not None:
                audit.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    # FastAPI's own pages load scripts from the internet. Redirects of paths with a trailing slash would lose the body.
    app = FastAPI(
        title="Outrider",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=recording,
        redirect_slashes=False,
    )
    asks_for_key = settings.api_keys_file is not None
    _add_open_routes(app, service)
    add_page(app, asks_for_key=asks_for_key, can_switch=settings.operator_keys_file is not None and try_policy is not None)
    bodies = _add_guarded_routes(app, service, settings)
    _add_descriptions(app, bodies, asks_for_key=asks_for_key, refuses_unknown=settings.unknown_fields == "refuse")
    app.add_middleware(
        Boundary, metrics=service.metrics, settings=settings, calls=service.calls, tracing=tracing, audit=audit
    )
    if settings.cors_origins:  # outermost, so that pages can read the boundary's errors
        app.add_middleware(Cors, origins=settings.cors_origins)
    install_handlers(app, settings.retry_after_s)
    return app


def check_tracing(config: ObservabilityConfig) -> None:
    """Raises InvalidField: traces are asked for, and their packages are not installed."""
    if config.otlp_endpoint is None:
        return
    try:
        import deploy.api.tracing  # noqa: F401
    except ModuleNotFoundError as error:
        remedy = f"needs {error.name}, which the extra installs: pip install 'outrider[tracing]'"
        raise InvalidField("observability.otlp_endpoint", config.otlp_endpoint, remedy) from error


def _tracing_of(config: ObservabilityConfig) -> "Tracing | None":
    check_tracing(config)
    if config.otlp_endpoint is None:
        return None
    from deploy.api.tracing import Tracing

    return Tracing(config.otlp_endpoint, config.sampled_share)


def _add_open_routes(app: FastAPI, service: Service) -> None:
    """Routes for probes and scrapers, which send no key."""
    app.get("/health", response_model=None)(service.health)

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> JSONResponse:
        """Same as /health."""
        return JSONResponse(await service.health())

    @app.get("/version")
    async def version() -> JSONResponse:
        """The version of this server."""
        return JSONResponse({"version": VERSION})

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        """Leads browsers to the dashboard, and tells others where everything is."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(PAGE)
        places = {"api": "/v1", "dashboard": PAGE, "docs": "/docs", "openapi": "/openapi.json", "metrics": "/metrics"}
        return JSONResponse({"server": "outrider", "version": VERSION, **places})

    @app.get("/load")
    async def load() -> JSONResponse:
        """The number of requests that run or wait."""
        return JSONResponse(await service.load())

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await service.metrics_page.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_guarded_routes(app: FastAPI, service: Service, settings: ApiSettings) -> Sequence[type[Strict]]:
    """Routes that need an API key, if keys are configured. Their bodies."""
    router = APIRouter(dependencies=[Depends(service.check_key)])
    posts: Sequence[tuple[str, Callable[..., Any], type[Strict]]] = (
        ("/v1/chat/completions", service.chat, ChatRequest),
        ("/v1/completions", service.completions, CompletionRequest),
        ("/v1/responses", service.responses, ResponsesRequest),
        (MESSAGES, service.messages, MessagesRequest),
        (f"{MESSAGES}/count_tokens", service.count_tokens, CountTokensRequest),
        ("/tokenize", service.tokenize, TokenizeRequest),
        ("/detokenize", service.detokenize, DetokenizeRequest),
        (operators.LOAD, service.operators.load, LoadAdapterRequest),
        (operators.UNLOAD, service.operators.unload, UnloadAdapterRequest),
        (operators.POLICY, service.operators.switch_policy, PolicyTrialRequest),
    )
    for path, answer, body in posts:
        router.add_api_route(path, answer, methods=["POST"], openapi_extra=body_of(body))
    router.add_api_route("/v1/embeddings", service.embeddings, methods=["POST"])
    router.get("/v1/models", response_model=None)(service.models)

    @router.get("/server_info")
    async def info() -> JSONResponse:
        """The served model, and the limits and defaults of calls."""
        return JSONResponse(_server_info(VERSION, await service.info(), settings))

    router.get("/v1/outrider/status", response_model=None)(service.status)
    router.get(dashboard.PATH, response_model=None)(service.dashboard.answer)
    router.get("/v1/models/{name:path}", response_model=None)(service.model)
    app.include_router(router)
    return [body for *_, body in posts]


def _add_descriptions(app: FastAPI, bodies: Sequence[type[Strict]], *, asks_for_key: bool, refuses_unknown: bool) -> None:
    """The API's documentation, built on first use."""
    document = cache(lambda: describe(app, bodies, asks_for_key=asks_for_key, refuses_unknown=refuses_unknown))

    @app.get("/openapi.json")
    async def openapi() -> JSONResponse:
        """This documentation in OpenAPI format."""
        return JSONResponse(document())

    @app.get("/docs", response_class=HTMLResponse)
    async def docs() -> HTMLResponse:
        """This documentation as a page."""
        return HTMLResponse(
            page(document()), headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )


def _server_info(version: str, info: ModelInfo, settings: ApiSettings) -> Mapping[str, object]:
    """What a client may want to know before it calls. It names no file of the server."""
    return {
        "version": version,
        "model": asdict(info) | {"adapters": [adapter.name for adapter in info.adapters]},
        "sampling_defaults": dict(settings.sampling_defaults),
        "max_n": settings.max_n,
        "max_sequences": settings.max_sequences,
        "max_request_bytes": settings.max_request_bytes,
        "request_timeout_s": settings.request_timeout_s,
        "tool_call_parser": settings.tool_call_parser,
        "reasoning_parser": settings.reasoning_parser,
        "slo_classes": sorted(settings.slo.classes),
    }
