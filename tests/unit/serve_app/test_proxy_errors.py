"""Around Serve's own application every error has OpenAI's form, and every 5xx a log line."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from serve_app.http import server_metrics as http_server_metrics
from serve_app.http.proxy_errors import OpenAIErrors, serve_routes
from serve_app.http.server_metrics import HTTP_SERVER

App = Callable[[Any, Any, Any], Awaitable[None]]
PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]


@pytest.fixture(autouse=True)
def every_line_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server_metrics, "LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(HTTP_SERVER, "is_pushed", True)


def serve(status: int, text: bytes = b"of Serve's", *, routes: dict[str, str] | None = None) -> App:
    """An application that answers as Serve's proxy does where it has no better answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/-/routes":
            known = {"/": "quadriga"} if routes is None else routes
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(known).encode()})
            return
        await send({"type": "http.response.start", "status": status, "headers": PLAIN})
        await send({"type": "http.response.body", "body": text[:4], "more_body": True})
        await send({"type": "http.response.body", "body": text[4:]})

    return app


async def ask(app: App, method: str = "GET", **named: Any) -> httpx.Response:
    transport = httpx.ASGITransport(OpenAIErrors(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.request(method, "/v1/models", **named)


def check(reply: httpx.Response, status: int, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "of Serve's" not in error["message"]
    if status >= 500:
        assert f"answered {status}: GET /v1/models" in caplog.text
    return error


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_value"),
        (404, "not_found"),
        (405, "method_not_allowed"),
        (408, "request_timeout"),
        (418, "invalid_value"),
        (429, "overloaded"),
        (500, "internal_error"),
        (503, "unavailable"),
        (507, "internal_error"),
    ],
)
async def test_serves_own_errors(status: int, code: str, caplog: pytest.LogCaptureFixture) -> None:
    error = check(await ask(serve(status)), status, caplog)
    assert error["code"] == code


async def test_without_an_application_it_is_503_and_not_404(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients give up on 404."""
    reply = await ask(serve(404, routes={}))
    assert check(reply, 503, caplog)["code"] == "unavailable"
    assert reply.headers["retry-after"] == "1"


async def test_answers_of_the_application_pass_as_they_are() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"x-own", b"1")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": 1}'})

    reply = await ask(app)
    assert (reply.status_code, reply.content) == (404, b'{"error": 1}')
    assert reply.headers["x-own"] == "1"
    assert (await ask(serve(200))).text == "of Serve's"


@pytest.mark.parametrize("name", ["x-request-id", "idempotency-key", "traceparent", "tracestate"])
@pytest.mark.parametrize("value", [b"\xff\xfe", "ö".encode(), b"a\tb"])
async def test_headers_that_serve_cannot_decode(
    name: str, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reply = await ask(serve(200), headers={name: value})
    error = check(reply, 400, caplog)
    assert error["param"] == name
    assert "printable ASCII" in error["message"]


async def test_headers_that_control_serve_are_dropped() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(name for name, _ in scope["headers"])
        await serve(200)(scope, receive, send)

    await ask(
        app,
        headers={
            "x-request-timeout-seconds": "0.001",
            "x-request-disconnect-disabled": "?1",
            "serve_multiplexed_model_id": b"\xff",
            "x-other": "kept",
        },
    )
    assert b"x-other" in seen
    assert not [name for name in seen if b"serve" in name or b"x-request" in name]


async def test_an_exception_is_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "secret")

    error = check(await ask(app), 500, caplog)
    assert "secret" not in error["message"]
    assert "unexpected failure in Serve" in caplog.text


async def test_no_answer_at_all_is_503(caplog: pytest.LogCaptureFixture) -> None:
    """Serve returns without a word where a replica dies before its first."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        return

    assert check(await ask(app), 503, caplog)["code"] == "unavailable"


async def test_a_stream_that_ends_early_has_an_error_frame(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})

    with caplog.at_level(logging.WARNING):
        frames = (await ask(app)).text.split("\n\n")
    assert frames[0] == "data: {}"
    assert json.loads(frames[1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert "in its stream" in caplog.text


async def test_own_answers_are_counted() -> None:
    before = HTTP_SERVER.answers.labels("503")._value.get()
    await ask(serve(503))
    assert HTTP_SERVER.answers.labels("503")._value.get() == before + 1


async def test_routes_are_read_from_serves_own_page() -> None:
    assert await serve_routes(serve(404)) == {"/": "quadriga"}
    assert await serve_routes(serve(404, routes={})) == {}
