"""The FastAPI app, served by uvicorn or Ray Serve, and its documentation: in OpenAPI format, and as an HTML page that loads
nothing from elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Lifespan

from cluster.client import EngineClient
from cluster.config import ObservabilityConfig
from cluster.errors import InvalidField
from cluster.types import ModelInfo
from deploy.api import dashboard, operators
from deploy.api.anthropic import CountTokensRequest, MessagesRequest
from deploy.api.body import Strict
from deploy.api.dashboard.pages import PAGE, add_page
from deploy.api.errors import MESSAGES, install_handlers, is_anthropic
from deploy.api.metrics import Peers
from deploy.api.middleware import AuditLog, Boundary, Cors
from deploy.api.operators import LoadAdapterRequest, PolicyTrialRequest, SwapAdapter, TryPolicy, UnloadAdapterRequest
from deploy.api.responses import ResponsesRequest
from deploy.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deploy.api.service import Service
from deploy.api.settings import ApiSettings
from deploy.api.tasks import running
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
            sampling = running(service.dashboard.history.run(), "dashboard history")
            async with sampling, service.metrics_page.kept_known(), around:
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

    app.get("/load", response_model=None)(service.load)

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


_REF = "#/components/schemas/"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.2rem .6rem;text-align:left;"
    "vertical-align:top}code{font-size:.95em}h2{margin-top:2.5rem}"
)


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _errors(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "An error", "content": {"application/json": {"schema": schema}}}


_TEXT = {"type": "string"}
_ERRORS = _errors(_object(error=_object(message=_TEXT, type=_TEXT, param={}, code={})))
_ANTHROPIC_ERRORS = _errors(_object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)))


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """FastAPI's ``openapi_extra`` of a route that reads its body itself."""
    schema = {"$ref": f"{_REF}{model.__name__}"}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if "stream" in model.model_fields:
        extra["responses"] = {"200": {"content": {"text/event-stream": {}}}}
    return extra


def describe(
    app: FastAPI, bodies: Sequence[type[BaseModel]], *, asks_for_key: bool, refuses_unknown: bool
) -> dict[str, Any]:
    """The OpenAPI document of the app's routes, with the schemas of ``bodies``."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    components = document.setdefault("components", {})
    components["schemas"] = schemas["$defs"]  # instead of FastAPI's error
    if not refuses_unknown:
        for schema in schemas["$defs"].values():
            schema.pop("additionalProperties", None)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # of FastAPI, which never answers with it here
            operation["responses"]["default"] = _ANTHROPIC_ERRORS if is_anthropic(path) else _ERRORS
    if asks_for_key:
        header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "header": header}
        document["security"] = [{"key": []}, {"header": []}]
    return document


def page(document: Mapping[str, Any]) -> str:
    """The document as an HTML page, without scripts, fonts or images."""
    title = escape(document["info"]["title"])
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{title} {escape(document['info']['version'])}</h1>")
    parts.append('<p>Also as <a href="openapi.json">openapi.json</a>. Errors are objects <code>error</code>.</p>')
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>")
            parts.extend(_body(operation, document))
    return "".join(parts)


def _body(operation: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" not in content:
        return
    schemas = document["components"]["schemas"]
    schema = schemas[content["application/json"]["schema"]["$ref"].removeprefix(_REF)]
    yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
    for name, field in schema["properties"].items():
        needed = "required" if name in schema.get("required", ()) else ""
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td><td>{needed}</td></tr>"
    yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """A short name of the schema's type."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REF)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        names = [_type(one) for one in alternatives if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "enum" in schema or "const" in schema:
        return " or ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "not supported yet"))
