"""What a client may do before its request is here, and how the server refuses the rest."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app.http import header_limits as doorman
from serve_app.http import protocol as http_protocol
from serve_app.http import server_metrics as http_server_metrics
from serve_app.http.protocol import MAX_HEAD_BYTES, LimitedHttpProtocol
from serve_app.http.server_metrics import HTTP_SERVER, ThrottledLog
from tests.waiting import until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Streams]]
HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n"
HEAD_TIMEOUT_S = 0.2
PATIENCE_S = 30.0
SEEN: list[tuple[bytes, list[bytes]]] = []  # bodies that were read, and the headers' names


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, but of `/early`; `/slow` and `/wait` take time, `/long` has 16 MiB."""
    body, more = b"", scope["path"] != "/early"
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body")
    if scope["path"] == "/wait":
        await receive()
    SEEN.append((body, [name for name, _ in scope["headers"]]))
    if scope["path"] == "/slow":
        await asyncio.sleep(0.3)
    pieces = [bytes(1 << 16)] * 256 if scope["path"] == "/long" else []
    length = (b"content-length", b"%d" % sum(map(len, pieces)))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch, request: Any) -> AsyncIterator[int]:
    """The port of a server that waits for a head for a moment only."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", HEAD_TIMEOUT_S)
    monkeypatch.setattr(auto, "AutoHTTPProtocol", HttpToolsProtocol)
    monkeypatch.setattr(doorman, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(LimitedHttpProtocol, "max_open", 0)
    monkeypatch.setattr(LimitedHttpProtocol, "_review", None)
    monkeypatch.setattr(HTTP_SERVER, "_closings", ThrottledLog(logging.getLogger()))
    SEEN.clear()
    assert doorman.guard()
    config = uvicorn.Config(answer, port=0, lifespan="off", log_config=None)
    config.limit_concurrency = getattr(request, "param", None)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started, within_s=PATIENCE_S)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await asyncio.wait_for(task, PATIENCE_S)
    await until(lambda: LimitedHttpProtocol.num_open == 0, within_s=PATIENCE_S)
    assert not LimitedHttpProtocol.silent
    assert LimitedHttpProtocol.all_bytes == 0


@pytest.fixture
def patient(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits for heads."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
async def connect(port: int) -> AsyncIterator[Connect]:
    """Opens connections.

    What is given lies at the server before it accepts, and so before it waits.
    """
    opened: list[asyncio.StreamWriter] = []

    async def open_one(first: bytes = b"") -> Streams:
        plain = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        plain.sendall(first)
        reader, writer = await asyncio.open_connection(sock=plain)
        opened.append(writer)
        return reader, writer

    yield open_one
    for writer in opened:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes, with bytes of ours unread or not."""
    got = b""
    async with asyncio.timeout(PATIENCE_S):
        try:
            while piece := await reader.read(65536):
                got += piece
        except ConnectionResetError:
            pass
    return got


async def status(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    return head.split()[1]


def check_error(answer: bytes, wanted: int) -> dict[str, Any]:
    """Check an answer's status and OpenAI's form; return the error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == wanted, answer
    assert b"content-type: application/json" in head.lower()
    assert b"connection: close" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def closed(reason: str) -> float:
    return HTTP_SERVER.closed.labels(reason)._value.get()


async def test_a_connection_without_a_request_is_closed(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    before = closed("silent")
    reader, _ = await connect()
    assert await rest(reader) == b""
    assert closed("silent") == before + 1
    assert "closed the connection of 127.0.0.1:" in caplog.text


async def test_a_head_that_does_not_end_is_answered_408(connect: Connect) -> None:
    before = closed("slow_head")
    reader, writer = await connect()
    writer.write(HEAD)
    assert check_error(await rest(reader), 408)["code"] == "request_timeout"
    assert closed("slow_head") == before + 1


async def test_bytes_now_and_then_buy_no_time(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(HEAD)
    answered = asyncio.create_task(reader.readuntil(b"\r\n"))
    began_s = asyncio.get_running_loop().time()
    while not answered.done():
        writer.write(b"x: y\r\n")
        await asyncio.wait([answered], timeout=0.05)
        assert asyncio.get_running_loop().time() < began_s + PATIENCE_S
    assert b" 408 " in await answered


async def test_nor_do_empty_lines_before_a_further_request(connect: Connect) -> None:
    reader, writer = await connect(HEAD + b"\r\n")
    assert await status(reader) == b"200"
    writer.write(b"\r\n")
    check_error(await rest(reader), 408)


async def test_a_body_that_was_answered_unread_has_to_come_in_time(connect: Connect) -> None:
    reader, writer = await connect(b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
    assert await status(reader) == b"200"
    writer.write(b"x")
    assert await rest(reader) == b""


async def test_a_body_that_comes_after_its_head_counts_as_no_head(connect: Connect) -> None:
    reader, writer = await connect(b"POST /slow HTTP/1.1\r\nhost: a\r\ncontent-length: 900\r\n\r\n")
    await asyncio.sleep(0.1)
    writer.write(b"z" * 900)
    assert await status(reader) == b"200"
    assert LimitedHttpProtocol.all_bytes == 0


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "STUCK_MS", 300)
    await connect(b"GET /long HTTP/1.1\r\nhost: a\r\n\r\n")
    await until(lambda: LimitedHttpProtocol.num_open == 1, within_s=PATIENCE_S)
    await until(lambda: LimitedHttpProtocol.num_open == 0, within_s=PATIENCE_S)


@pytest.mark.usefixtures("patient")
async def test_a_head_without_end_is_refused_as_too_large(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(HEAD + b"x: " + b"y" * (MAX_HEAD_BYTES + 1))
    assert check_error(await rest(reader), 431)["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "wrong", [HEAD + b"x: " + b"y" * (MAX_HEAD_BYTES + 1), b"\x00\xff", HEAD + b"\r\n\x00\xff"]
)
@pytest.mark.usefixtures("patient")
async def test_what_is_wrong_behind_a_request_does_not_cut_its_answer(
    connect: Connect, wrong: bytes
) -> None:
    reader, writer = await connect()
    writer.write(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n")
    await asyncio.sleep(0.05)
    writer.write(wrong)
    assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")


async def test_all_unfinished_heads_together_are_bounded(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_ALL_BYTES", 1000)
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", PATIENCE_S)
    await connect(b"GET / HTTP/1.1\r\nx: " + b"y" * 900)
    await until(lambda: LimitedHttpProtocol.all_bytes > 900, within_s=PATIENCE_S)
    reader, second = await connect()
    second.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 900)
    check_error(await rest(reader), 429)
    reader, third = await connect()
    third.write(HEAD + b"x: " + b"y" * 2000 + b"\r\n\r\n")  # whole at once
    assert await status(reader) == b"200"


async def test_of_too_many_silent_connections_the_oldest_gets_an_error_and_is_closed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_SILENT", 3)
    monkeypatch.setattr(http_protocol, "GRACE_S", 0.1)
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", PATIENCE_S)
    before = closed("too_many_silent")
    readers = []
    for number in range(4):
        reader, _ = await connect()
        readers.append(reader)
        await until(lambda n=number: len(LimitedHttpProtocol.silent) > n, within_s=PATIENCE_S)  # type: ignore[misc]
    assert check_error(await rest(readers[0]), 503)["code"] == "unavailable"
    assert len(LimitedHttpProtocol.silent) == 3
    assert closed("too_many_silent") == before + 1
    reader, writer = await connect()
    writer.write(HEAD + b"\r\n")
    assert await status(reader) == b"200"


async def test_a_burst_above_the_limit_of_silent_connections_is_answered(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections are accepted before the first of them is read."""
    monkeypatch.setattr(http_protocol, "MAX_SILENT", 3)
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", PATIENCE_S)
    before = closed("too_many_silent")
    clients = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(200)]
    for client in clients:
        client.sendall(HEAD + b"connection: close\r\n\r\n")

    async def ask(client: socket.socket) -> bytes:
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            return await status(reader)
        finally:
            writer.close()

    assert set(await asyncio.gather(*map(ask, clients))) == {b"200"}
    assert closed("too_many_silent") == before


async def test_a_connection_above_the_limit_gets_an_error(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LimitedHttpProtocol, "max_open", 8)
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(http_protocol, "LINGER_S", PATIENCE_S)
    for number in range(8):
        await connect()
        await until(lambda n=number: LimitedHttpProtocol.num_open > n, within_s=PATIENCE_S)  # type: ignore[misc]
    reader, _ = await connect(HEAD + b"\r\n")
    error = check_error(await rest(reader), 503)
    assert "8 connections" in error["message"]
    reader, _ = await connect(HEAD + b"\r\n")  # one lingers already: as many as may
    assert await rest(reader) == b""


async def test_an_error_is_read_by_a_client_that_is_still_sending(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed at once, TCP would reset the connection and take the answer back."""
    monkeypatch.setattr(LimitedHttpProtocol, "max_open", 8)
    monkeypatch.setattr(LimitedHttpProtocol, "num_open", 8)
    reader, writer = await connect()
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert b" 503 " in head
    writer.write(HEAD + b"\r\n")
    await writer.drain()
    assert json.loads(await rest(reader))["error"]["code"] == "unavailable"
    LimitedHttpProtocol.num_open = 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS on a port without
        b"GET\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nh\xffst: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\x00b\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_in_openais_form(
    connect: Connect, request_bytes: bytes
) -> None:
    reader, _ = await connect(request_bytes)
    assert check_error(await rest(reader), 400)["code"] == "invalid_http"


@pytest.mark.parametrize("offer", [b"websocket", b"h2c", b"foo"])
@pytest.mark.parametrize("size", [1, 60, 1 << 20])
@pytest.mark.usefixtures("patient")
async def test_an_upgrade_is_not_taken_and_its_body_begins_no_request(
    connect: Connect, offer: bytes, size: int
) -> None:
    head, inner = HEAD + b"connection: upgrade\r\nupgrade: " + offer, HEAD + b"\r\n"
    framed = b"\r\ncontent-length: %d\r\n\r\n%s" % (len(inner), inner)
    chunked = b"\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner)
    data = b"".join(head + rest for rest in (framed, chunked, b"\r\n\r\n")) * 2
    reader, writer = await connect()
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await asyncio.sleep(0.001)
    assert [await status(reader) for _ in range(6)] == [b"200"] * 6
    assert [body for body, _ in SEEN] == [inner, inner, b""] * 2


async def test_trailers_are_left_out_and_bounded(connect: Connect) -> None:
    begun = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nz\r\n0\r\nx-a: "
    reader, writer = await connect(begun + b"1\r\nx-b: 2\r\n\r\n" + HEAD + b"\r\n")
    assert [await status(reader) for _ in range(2)] == [b"200"] * 2
    assert SEEN == [(b"z", [b"host", b"transfer-encoding"]), (b"", [b"host"])]
    writer.write(begun + b"y" * (MAX_HEAD_BYTES + (1 << 20)))
    assert check_error(await rest(reader), 431)["code"] == "headers_too_large"


async def test_a_client_that_goes_is_noticed_behind_a_further_request(connect: Connect) -> None:
    _, writer = await connect(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n" + HEAD + b"\r\n")
    await asyncio.sleep(0.1)
    writer.close()
    await until(lambda: len(SEEN) == 1, within_s=PATIENCE_S)


@pytest.mark.parametrize("port", [1], indirect=True)
async def test_too_many_requests_at_a_port_with_a_limit(connect: Connect) -> None:
    await connect(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n")
    reader, _ = await connect(HEAD + b"\r\n")
    check_error(await rest(reader), 503)


async def test_honest_requests_take_all_the_time_they_want(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow bodies, slow answers, and several requests on a connection are not limited here."""
    reader, writer = await connect(
        b"POST /slow HTTP/1.1\r\nhost: a\r\ncontent-length: 300001\r\n\r\n"
    )
    body = b"z" * 300_000
    await asyncio.sleep(0.3)
    writer.write(body)
    await asyncio.sleep(0.3)
    writer.write(b"!")
    assert await status(reader) == b"200"
    for _ in range(3):
        await asyncio.sleep(0.3)  # between two requests
        # The two halves are to come in time, however long this process stands still between them.
        monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", PATIENCE_S)
        writer.write(HEAD)
        await asyncio.sleep(0.02)
        writer.write(b"\r\n")
        assert await status(reader) == b"200"
        monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", HEAD_TIMEOUT_S)
    writer.write(HEAD + b"\r\n" + HEAD + b"\r\n")  # two at once
    assert await status(reader) == b"200"
    assert await status(reader) == b"200"


async def test_many_events_make_two_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server_metrics, "LOG_INTERVAL_S", 0.1)
    log = ThrottledLog(logging.getLogger("quadriga.http"))
    for number in range(500):
        log.add("a kind", f"event {number}")
    await until(lambda: len(caplog.messages) == 2, within_s=PATIENCE_S)
    assert caplog.messages == ["event 0", "event 499 (499 such events since the last line)"]
