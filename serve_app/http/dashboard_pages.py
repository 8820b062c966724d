"""The live page's files: static, without data, and without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from serve_app.http.call import Call

FOLDER = Path(__file__).resolve().parent / "dashboard"
HEADERS = [
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
    "/dashboard/page.css": ("page.css", b"text/css; charset=utf-8"),
} | {
    f"/dashboard/{name}": (name, b"text/javascript; charset=utf-8")
    for name in ("view.js", "exits.js", "charts.js", "draw.js", "page.js")
}


def dashboard_pages() -> list[tuple[str, Callable[[Call], Awaitable[None]]]]:
    """Return paths and their handlers; the files are read once, here."""
    return [
        (path, _handler((FOLDER / name).read_bytes(), content_type))
        for path, (name, content_type) in FILES.items()
    ]


def _handler(data: bytes, content_type: bytes) -> Callable[[Call], Awaitable[None]]:
    async def handler(call: Call) -> None:
        await call.answer(data, content_type=content_type, headers=HEADERS)

    return handler
