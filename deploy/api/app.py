"""The FastAPI app, served by uvicorn or Ray Serve."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from importlib.metadata import version as version_of
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Lifespan

from cluster.client import EngineClient
from deploy.api.cors import Cors
from deploy.api.errors import install_handlers
from deploy.api.middleware import Boundary
from deploy.api.openapi import body_of, describe, page
from deploy.api.params import unknown_model
from deploy.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deploy.api.service import Service
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer

VERSION = version_of("outrider")
_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def create_app(
    client: EngineClient, tokenizer: Tokenizer, settings: ApiSettings, lifespan: Lifespan[FastAPI] | None = None
) -> FastAPI:
    """The OpenAI-compatible app of ``client``. The caller closes ``client``, in ``lifespan`` or later.

    Raises:
        InvalidField: the key file cannot be used.
    """
    service = Service(client, tokenizer, settings)
    # FastAPI's own pages load scripts from the internet. Redirects of paths with a trailing slash would lose the body.
    app = FastAPI(
        title="Outrider",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.include_router(_open_routes(service))
    app.include_router(_routes(service))
    app.include_router(_descriptions(lambda: describe(app, _BODIES, asks_for_key=settings.api_keys_file is not None)))
    app.add_middleware(Boundary, metrics=service.metrics, settings=settings)
    if settings.cors_origins:  # outermost, so that pages can read the boundary's errors
        app.add_middleware(Cors, origins=settings.cors_origins)
    install_handlers(app, settings.retry_after_s)
    return app


def _routes(service: Service) -> APIRouter:
    """Routes that need an API key, if keys are configured."""
    router = APIRouter(dependencies=[Depends(service.check_key)])

    @router.post("/v1/chat/completions", response_model=None, openapi_extra=body_of(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answers a conversation."""
        return await service.chat(request)

    @router.post("/v1/completions", response_model=None, openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continues a text."""
        return await service.completions(request)

    @router.post("/tokenize", response_model=None, openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        return await service.tokenize(request)

    @router.post("/detokenize", response_model=None, openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return await service.detokenize(request)

    @router.get("/v1/models")
    async def models() -> JSONResponse:
        """The served model, as a list."""
        return JSONResponse(await service.models())

    @router.get("/v1/outrider/status")
    async def status() -> JSONResponse:
        """State of the targets and drafters."""
        return JSONResponse(asdict(await service.status()))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        """The served model."""
        info = await service.info()
        if name != info.name:
            raise unknown_model(name, info, "model")
        return JSONResponse(service.describe(info))

    return router


def _open_routes(service: Service) -> APIRouter:
    """Routes for probes and scrapers, which send no key."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 if a target is ready, else 503 with the reason."""
        return JSONResponse(await service.health())

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> JSONResponse:
        """Same as /health."""
        return JSONResponse(await service.health())

    @router.get("/version")
    async def version() -> JSONResponse:
        """The version of this server."""
        return JSONResponse({"version": VERSION})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await service.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _descriptions(make: Callable[[], dict[str, Any]]) -> APIRouter:
    """The API's documentation, built on first use."""
    router = APIRouter()
    document = cache(make)

    @router.get("/openapi.json")
    async def openapi() -> JSONResponse:
        """This documentation in OpenAPI format."""
        return JSONResponse(document())

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        """This documentation as a page."""
        return HTMLResponse(
            page(document()), headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )

    return router
