"""Static pages, read once: the API's documentation at /docs, and the live page of the admin port.

Neither loads anything from elsewhere, so both work without the internet. Swagger UI's files are
those of the package `fastapi-offline`. The live page's files hold no data of the service.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi.openapi.docs import get_swagger_ui_html

from serve_app.http.call import Call, Handler, Headers

SWAGGER_FILES = {
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "swagger-ui.css": b"text/css; charset=utf-8",
    "favicon.png": b"image/png",
}
CACHED = [(b"cache-control", b"public, max-age=86400")]
FOLDER = Path(__file__).resolve().parent / "dashboard"
PROTECTED = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
FILES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    "/dashboard": ("index.html", b"text/html; charset=utf-8"),
    "/dashboard/": ("index.html", b"text/html; charset=utf-8"),
    "/dashboard/page.css": ("page.css", b"text/css; charset=utf-8"),
} | {
    f"/dashboard/{name}": (name, b"text/javascript; charset=utf-8")
    for name in ("view.js", "exits.js", "charts.js", "draw.js", "page.js")
}


def docs_pages(title: str) -> list[tuple[str, Handler]]:
    """Return paths and handlers of the documentation.

    Addresses on the page are relative, so that it also works below a path of a proxy.
    """
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
    folder = files("fastapi_offline") / "static"
    pages = [("/docs", _handler(bytes(page.body), b"text/html; charset=utf-8", []))]
    for name, content_type in SWAGGER_FILES.items():
        data = (folder / name).read_bytes()
        pages.append((f"/docs/{name}", _handler(data, content_type, CACHED)))
    return pages


def dashboard_pages() -> list[tuple[str, Handler]]:
    """Return paths and handlers of the live page."""
    return [
        (path, _handler((FOLDER / name).read_bytes(), content_type, PROTECTED))
        for path, (name, content_type) in FILES.items()
    ]


def _handler(data: bytes, content_type: bytes, headers: Headers) -> Handler:
    async def handler(call: Call) -> None:
        await call.answer(data, content_type=content_type, headers=headers)

    return handler
