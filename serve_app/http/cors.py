"""Cross-origin requests: which web pages may call the API from a browser."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from quadriga.errors import InvalidRequest
from serve_app.openai.errors import error_response

EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-quadriga-ignored",
)
MAX_AGE_S = 600


class OpenAICors(CORSMiddleware):
    """Starlette's middleware; what it refuses has OpenAI's error form."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        reason = bytes(response.body).decode()
        error = InvalidRequest(
            f"{reason}; the server's setting ingress.cors_origins names the origins allowed",
            param="origin",
            code="cors_refused",
        )
        headers, body = error_response(error)
        kept = {k: v for k, v in response.headers.items() if k.startswith(("access-", "vary"))}
        own = {name.decode(): value.decode() for name, value in headers}
        return Response(body, response.status_code, headers=kept | own)


def cors_middleware(origins: tuple[str, ...]) -> list[Middleware]:
    """The middleware that allows these origins; none where there are none."""
    if not origins:
        return []
    return [
        Middleware(
            OpenAICors,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED_HEADERS),
            max_age=MAX_AGE_S,
        )
    ]
