"""What Serve calls in each process before it opens an HTTP port there.

The environment names it:
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve_app.http.header_limits.guard`.
"""

from __future__ import annotations

import os

from starlette.middleware import Middleware
from uvicorn.protocols.http import auto

from quadriga.observability.logs import configure_logging, is_configured
from serve_app.cli.environment import LOG_FORMAT_VARIABLE
from serve_app.http.protocol import LimitedHttpProtocol, allow_many_files
from serve_app.http.proxy_errors import OpenAIErrors


def guard() -> list[Middleware]:
    """Limit and log every HTTP server that is started in this process from now on.

    Returns:
        Middlewares around Serve's own application.
    """
    auto.AutoHTTPProtocol = LimitedHttpProtocol
    allow_many_files()
    if not is_configured():  # an ingress replica did it by its configuration
        is_json = os.environ.get(LOG_FORMAT_VARIABLE) == "json"
        configure_logging("json" if is_json else "text", "info", process=f"http:{os.getpid()}")
    return [Middleware(OpenAIErrors)]
