"""Whatever bytes come, the answer is HTTP, and every error has OpenAI's form and its log line.

The whole way is there but for Serve: uvicorn, the protocol, the middleware, and the application
over a cluster that is a fake.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import product
from unittest.mock import AsyncMock, Mock

import pytest
import pytest_asyncio
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from serve_app.http import protocol as http_protocol
from serve_app.http import server_metrics as http_server_metrics
from serve_app.http.protocol import LimitedHttpProtocol
from serve_app.http.proxy_errors import OpenAIErrors
from serve_app.http.server import HttpServer
from serve_app.http.server_metrics import HTTP_SERVER
from tests.hostile import broken, tried
from tests.unit.serve_app.conftest import MakeStand
from tests.waiting import until

PATIENCE_S = 60.0
METHODS = (
    *(b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT"),
    *(b"PRI", b"BREW", b"get", b"PROPFIND"),
)
TARGETS = (
    *(b"/", b"/health", b"/ping", b"/live", b"/version", b"/load", b"/metrics", b"/docs"),
    *(b"/docs/swagger-ui.css", b"/openapi.json", b"/v1", b"/v1/models", b"/v1/models/quadriga-s"),
    *(b"/v1/models/", b"/v1/models/%ff", b"/v1/completions", b"/v1/completions/"),
    *(b"/v1/chat/completions", b"/tokenize", b"/detokenize", b"/nowhere", b"*", b"//", b"/%00"),
    *(b"http://a/live", b"/live?x=%ff", b"/live#x", b"live", b"/\xff", b"/" + b"a" * 5000),
)
NAMES = (
    *(b"x-request-id", b"idempotency-key", b"x-resume-index", b"authorization", b"content-type"),
    *(b"content-length", b"content-encoding", b"transfer-encoding", b"expect", b"origin"),
    *(b"access-control-request-method", b"traceparent", b"accept", b"range", b"if-none-match"),
    *(b"upgrade", b"connection", b"cookie", b"host", b"x-request-timeout-seconds"),
)
VALUES = st.one_of(
    st.sampled_from(
        [
            *(b"", b"0", b"-1", b"7", b"99999999999999999999", b"chunked", b"gzip", b"?1"),
            *(b"\xff\xfe", "ö".encode(), b"application/json", b"100-continue", b"websocket"),
            *(b"upgrade", b"close", b"Bearer \xff", b"bytes=0-1", b"https://a.example", b"POST"),
        ]
    ),
    st.binary(max_size=8),
)
BODIES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"{",
            b'{"prompt": "a", "max_tokens": 1}',
            b'{"prompt": "a", "max_tokens": 1, "stream": true}',
            b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}',
            b'{"tokens": [1]}',
        ]
    ),
    st.binary(max_size=20),
)


@dataclass
class Server:
    port: int
    lines: list[str] = field(default_factory=list)

    async def ask(self, data: bytes) -> bytes:
        """Send bytes and read until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            got = b""
            try:
                writer.write(data)
                while piece := await reader.read(1 << 20):
                    got += piece
            except ConnectionResetError:
                pass
            finally:
                writer.close()
            return got


@pytest_asyncio.fixture
async def server(make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_server_metrics, "LOG_INTERVAL_S", 0.0)
    stand = await make_stand(
        config={"ingress.body_timeout_s": 0.1, "ingress.cors_origins": ["https://b.example"]}
    )
    app = OpenAIErrors(HttpServer(stand.engine).application())
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        lifespan="off",
        log_config=None,
        http=LimitedHttpProtocol,
        timeout_keep_alive=1,
    )
    running = uvicorn.Server(config)
    running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(running.serve())
    await until(lambda: running.started, within_s=PATIENCE_S)
    made = Server(running.servers[0].sockets[0].getsockname()[1])
    handler = logging.Handler()
    handler.emit = lambda record: made.lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("quadriga.http").addHandler(handler)
    monkeypatch.setattr(HTTP_SERVER, "is_pushed", True)
    yield made
    logging.getLogger("quadriga.http").removeHandler(handler)
    running.should_exit = True
    await asyncio.wait_for(task, PATIENCE_S)


def check(answer: bytes, lines: list[str], *, is_head: bool) -> int:
    """Check one answer; returns its status."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), answer
    status = int(head.split()[1])
    if status == 100:
        return check(body, lines, is_head=is_head)
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if status >= 400:
        assert headers[b"content-type"] == b"application/json", answer
        if not is_head:
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
    if status >= 500:
        assert any(f"answered {status}" in line for line in lines), lines
    return status


@tried(200)
@given(
    method=st.sampled_from(METHODS),
    target=st.sampled_from(TARGETS),
    headers=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=3),
    body=BODIES,
    is_sized=st.booleans(),
)
async def test_every_request_is_answered_in_a_documented_form(
    server: Server,
    method: bytes,
    target: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    is_sized: bool,
) -> None:
    server.lines.clear()
    lines = [method + b" " + target + b" HTTP/1.1", b"host: a", b"connection: close"]
    lines += [name + b": " + value for name, value in headers]
    if is_sized:
        lines.append(b"content-length: " + str(len(body)).encode())
    data = b"\r\n".join([*lines, b"", body])
    answer = await server.ask(data)
    while not answer and any("no request within" in line for line in server.lines):
        server.lines.clear()  # this process stood still between connecting and sending
        answer = await server.ask(data)
    check(answer, server.lines, is_head=method == b"HEAD")


@tried(100)
@given(
    data=broken(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"x-request-id: abc\r\nidempotency-key: k\r\ncontent-length: 32\r\nconnection: close\r\n"
        b'\r\n{"prompt": "a", "max_tokens": 1}'
    )
)
async def test_broken_bytes_are_answered_or_the_reason_is_logged(
    server: Server, data: bytes
) -> None:
    server.lines.clear()
    answer = await server.ask(data)
    if answer:
        check(answer, server.lines, is_head=data.lstrip().startswith(b"HEAD"))
    else:
        assert any("closed the connection of" in line for line in server.lines)


async def test_a_stream_to_an_old_client_has_no_chunks(server: Server) -> None:
    """nginx asks in HTTP/1.0 unless it is told otherwise."""
    body = b'{"prompt": "a", "max_tokens": 3, "stream": true}'
    head = b"POST /v1/completions HTTP/1.%d\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    for version in (0, 1):
        answer = await server.ask(head % (version, len(body)) + body)
        headers, _, events = answer.partition(b"\r\n\r\n")
        assert headers.startswith(b"HTTP/1.1 200")
        assert (b"chunked" in headers) is (version == 1)
        assert events.endswith(b"data: [DONE]\n\n") is (version == 0)
    assert b'\r\n\r\n{"status": "alive"}' in await server.ask(b"GET /live HTTP/1.0\r\n\r\n")


async def test_an_old_client_of_an_application_that_fails_gets_uvicorns_own_answer() -> None:
    """It has a length: held to what an application announces, the client would wait for ever."""
    cycle, app = Mock(response_started=False), AsyncMock(side_effect=KeyError)
    with pytest.raises(KeyError):
        await http_protocol._unchunked(cycle, app)({}, None, None)
    assert cycle.chunked_encoding is None


async def test_headers_that_are_not_utf8(server: Server) -> None:
    for method, name, target in product(
        ("GET", "HEAD", "POST", "OPTIONS", "DELETE", "BREW"),
        ("x-request-id", "idempotency-key", "authorization", "cookie"),
        ("/v1/models", "/v1/completions", "/nowhere", "*"),
    ):
        data = f"{method} {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{name}: ".encode()
        answer = await server.ask(data + b"\xff\xfe\r\n\r\n")
        assert check(answer, server.lines, is_head=method == "HEAD") < 500
