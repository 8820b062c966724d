"""The page of the API at /docs, with the files it needs: it works without the internet.

Swagger UI's files are those of the package `fastapi-offline`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi.openapi.docs import get_swagger_ui_html

from serve_app.http.call import Call

PACKAGE = "fastapi_offline"
FILES = {
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "swagger-ui.css": b"text/css; charset=utf-8",
    "favicon.png": b"image/png",
}
CACHED = [(b"cache-control", b"public, max-age=86400")]

PageHandler = Callable[[Call], Awaitable[None]]


def docs_pages(title: str) -> list[tuple[str, PageHandler]]:
    """Return paths and their handlers; the files are read once, here.

    Addresses on the page are relative, so that it also works below a path of a proxy.
    """
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
    folder = files(PACKAGE) / "static"
    pages = [("/docs", _handler(bytes(page.body), b"text/html; charset=utf-8", []))]
    for name, content_type in FILES.items():
        data = (folder / name).read_bytes()
        pages.append((f"/docs/{name}", _handler(data, content_type, CACHED)))
    return pages


def _handler(data: bytes, content_type: bytes, headers: list[tuple[bytes, bytes]]) -> PageHandler:
    async def handler(call: Call) -> None:
        await call.answer(data, content_type=content_type, headers=headers)

    return handler
