"""The FastAPI app: under uvicorn or mounted by Ray Serve."""

from dataclasses import asdict

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Lifespan

from cluster.client import EngineClient
from deploy.api.boundary import Boundary
from deploy.api.errors import install_handlers
from deploy.api.params import unknown_model
from deploy.api.service import Service
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer


def create_app(
    client: EngineClient, tokenizer: Tokenizer, settings: ApiSettings, lifespan: Lifespan[FastAPI] | None = None
) -> FastAPI:
    """Serve ``client`` in OpenAI's protocol. Closing ``client`` remains the caller's business, in ``lifespan`` or after.

    Raises:
        InvalidField: the key file cannot be used.
    """
    service = Service(client, tokenizer, settings)
    # Without FastAPI's pages: the bodies are read by hand, so a schema made from the routes would not show them.
    # A path with a slash too many is an unknown one: a redirect would not be in the error shape, and lose a body.
    app = FastAPI(
        title="Outrider", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.include_router(_open_routes(service))
    app.include_router(_routes(service))
    app.add_middleware(Boundary, metrics=service.metrics, settings=settings)
    install_handlers(app, settings.retry_after_s)
    return app


def _routes(service: Service) -> APIRouter:
    """What a key is needed for, where there are keys."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(_Key(service))])

    @router.post("/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        return await service.chat(request)

    @router.post("/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await service.completions(request)

    @router.get("/models")
    async def models() -> JSONResponse:
        return JSONResponse(await service.models())

    @router.get("/outrider/status")
    async def status() -> JSONResponse:
        return JSONResponse(asdict(await service.status()))

    @router.get("/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        info = await service.info()
        if name != info.name:
            raise unknown_model(name, info, "model")
        return JSONResponse(service.describe(info))

    return router


def _open_routes(service: Service) -> APIRouter:
    """For probes and scrapers, which have no key."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse(await service.health())

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


class _Key:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, request: Request) -> None:
        self._service.check_key(request)
