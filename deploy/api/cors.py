"""CORS: which web pages may read answers."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from deploy.api.budgets import BUDGET_HEADERS
from deploy.api.errors import ApiError
from deploy.api.middleware import WARNING_HEADER


class Cors(CORSMiddleware):
    """Starlette's middleware for this API's methods and headers, with errors in OpenAI's shape. Sends no cookies."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", WARNING_HEADER, *BUDGET_HEADERS),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < HTTPStatus.BAD_REQUEST:
            return response
        # The CORS headers let the browser read the error; content-length belongs to the replaced body.
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        message = f"Origin: {bytes(response.body).decode()}; api.cors_origins names the web pages that may call"
        return ApiError(HTTPStatus.BAD_REQUEST, message, param="Origin", headers=headers).response()
