"""Through Serve too: bursts of connections are answered, and every error has OpenAI's form."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import Counter
from itertools import product
from urllib.parse import urlsplit

import httpx
import pytest

from quadriga.observability.metrics import parse_exposition
from serve_app.cli.environment import haproxy_enabled
from serve_app.http.haproxy import HEAD_S
from serve_app.http.protocol import HEAD_TIMEOUT_S, allow_many_files
from tests.e2e.conftest import Service
from tests.waiting import wait_until

BURST = 3000
PATIENCE_S = 120.0


def _answer_on(connection: socket.socket, request: bytes = b"") -> bytes:
    """What comes back, also from who closes before it has read all; streams lose that."""
    got = b""
    with contextlib.suppress(ConnectionError):
        connection.sendall(request)
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            got += piece
    return got


def answer(service: Service, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send one request; return status, headers and body."""
    where = urlsplit(service.base_url)
    with socket.create_connection((where.hostname, where.port), PATIENCE_S) as connection:
        got = _answer_on(connection, data)
    head, _, body = got.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), dict(x.lower().split(b": ", 1) for x in lines), body


def test_a_burst_of_connections_is_answered_or_refused(service: Service) -> None:
    """All connections are there before the first request is sent; none may end without a word,
    but those whose request came so late that the server may have given them up."""
    allow_many_files()
    where = urlsplit(service.base_url)
    request = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with contextlib.ExitStack() as stack:
        burst, late = list[tuple[float, socket.socket]](), set[socket.socket]()
        for _ in range(BURST):
            one = socket.create_connection((where.hostname, where.port), PATIENCE_S)
            burst.append((time.monotonic(), stack.enter_context(one)))
        for began_s, one in burst:
            with contextlib.suppress(ConnectionError):
                one.sendall(request)
            if time.monotonic() - began_s >= min(HEAD_TIMEOUT_S, HEAD_S):
                late.add(one)
        found = [(_answer_on(one), one in late) for _, one in burst]
    statuses = Counter((int(got.split()[1]) if got else 0, is_late) for got, is_late in found)
    assert {status for status, is_late in statuses if not is_late} <= {200, 429, 503}, statuses
    assert {status for status, _ in statuses} <= {200, 429, 503, 0, 408}, statuses
    assert statuses[200, False], statuses


def test_headers_that_are_not_utf8(service: Service) -> None:
    for method, target, name in product(
        ("GET", "HEAD", "POST", "OPTIONS", "DELETE"),
        ("/v1/models", "/v1/completions", "/nowhere", "*"),
        ("x-request-id", "idempotency-key", "traceparent", "cookie"),
    ):
        head = f"{method} {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{name}: ".encode()
        status, headers, body = answer(service, head + b"\xff\xfe\r\n\r\n")
        assert status < 500
        if status >= 400:
            assert headers[b"content-type"] == b"application/json"
            if method != "HEAD":
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/9.9\r\nconnection: close\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", 404),
        (b"BREW / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (2 << 20), 431),
    ],
)
def test_what_serve_never_sees(service: Service, data: bytes, status: int) -> None:
    got, headers, body = answer(service, data)
    if haproxy_enabled() and not data.startswith((b"OPTIONS", b"BREW")):
        assert got in (400, 404), "HAProxy reads it in its own way, or answers with its own text"
        return
    assert got == status
    assert headers[b"content-type"] == b"application/json"
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_what_never_reached_the_application_is_counted(http: httpx.Client) -> None:
    name = "quadriga_http_server_errors_total"
    headers = {"x-request-id": b"\xff"}
    assert http.get("/live", headers=headers).status_code == 400  # type: ignore[arg-type]

    def count() -> float:
        page = parse_exposition(http.get("/metrics").text)
        return sum(v for k, v in page.items() if k.startswith(name) and 'code="400"' in k)

    wait_until(lambda: count() > 0, PATIENCE_S)  # they are sent every other second
