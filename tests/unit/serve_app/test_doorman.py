"""Connections that stop in the middle of a request's head, or never end it, are closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app import doorman
from serve_app.doorman import MAX_HEAD_BYTES, GuardedProtocol, guard
from tests.unit.serve_app.test_front import until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Streams]]
HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n"
HEAD_TIMEOUT_S = 0.2
PATIENCE_S = 10.0


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body; `/slow` takes a moment."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(0.3)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body"})


@pytest.fixture
async def connect(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    """Connections to a server that waits for a head for a moment only.

    What is given lies at the server before it accepts, and so before it waits.
    """
    monkeypatch.setattr(doorman, "HEAD_TIMEOUT_S", HEAD_TIMEOUT_S)
    monkeypatch.setattr(auto, "AutoHTTPProtocol", HttpToolsProtocol)
    assert guard() == []
    server = uvicorn.Server(
        uvicorn.Config(answer, host="127.0.0.1", port=0, lifespan="off", log_config=None)
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
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
    server.should_exit = True
    await asyncio.wait_for(task, PATIENCE_S)
    assert not GuardedProtocol.waiting
    assert GuardedProtocol.all_bytes == 0


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


async def test_a_head_that_does_not_end_is_not_waited_for(connect: Connect) -> None:
    silent, _ = await connect()
    partial, writer = await connect()
    writer.write(HEAD)
    assert await rest(silent) == b""
    assert await rest(partial) == b""


async def test_bytes_now_and_then_buy_no_time(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(HEAD)
    closed = asyncio.create_task(rest(reader))
    began_s = asyncio.get_running_loop().time()
    while not closed.done():
        writer.write(b"x: y\r\n")
        await asyncio.wait([closed], timeout=0.05)
        assert asyncio.get_running_loop().time() < began_s + PATIENCE_S
    assert await closed == b""


async def test_nor_do_empty_lines_before_a_further_request(connect: Connect) -> None:
    reader, writer = await connect(HEAD + b"\r\n")
    assert await status(reader) == b"200"
    writer.write(b"\r\n")
    assert await rest(reader) == b""


async def test_a_head_without_end_is_refused_as_too_large(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorman, "HEAD_TIMEOUT_S", PATIENCE_S)
    reader, writer = await connect()
    writer.write(HEAD + b"x: " + b"y" * (MAX_HEAD_BYTES + 1))
    assert (await rest(reader)).startswith(b"HTTP/1.1 431 ")


async def test_so_is_one_behind_a_request_that_is_being_answered(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorman, "HEAD_TIMEOUT_S", PATIENCE_S)
    reader, writer = await connect()
    writer.write(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n")
    await asyncio.sleep(0.05)
    writer.write(HEAD + b"x: " + b"y" * (MAX_HEAD_BYTES + 1))
    assert b"431" in await rest(reader)


async def test_all_unfinished_heads_together_are_bounded(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorman, "MAX_ALL_BYTES", 1000)
    monkeypatch.setattr(doorman, "HEAD_TIMEOUT_S", PATIENCE_S)
    await connect(b"GET / HTTP/1.1\r\nx: " + b"y" * 900)
    await until(lambda: GuardedProtocol.all_bytes > 900)
    reader, second = await connect()
    second.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 900)
    assert (await rest(reader)).startswith(b"HTTP/1.1 431 ")
    reader, third = await connect()
    third.write(HEAD + b"x: " + b"y" * 2000 + b"\r\n\r\n")  # whole at once
    assert await status(reader) == b"200"


async def test_of_too_many_the_oldest_is_closed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorman, "MAX_WAITING", 3)
    monkeypatch.setattr(doorman, "HEAD_TIMEOUT_S", PATIENCE_S)
    readers = []
    for _ in range(4):
        reader, _ = await connect()
        readers.append(reader)
        await asyncio.sleep(0.02)
    assert await rest(readers[0]) == b""
    reader, writer = await connect()
    writer.write(HEAD + b"\r\n")
    assert await status(reader) == b"200"


async def test_honest_requests_take_all_the_time_they_want(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow bodies, slow answers, and several requests on a connection are not the doorman's."""
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
        monkeypatch.setattr(doorman, "HEAD_TIMEOUT_S", PATIENCE_S)
        writer.write(HEAD)
        await asyncio.sleep(0.02)
        writer.write(b"\r\n")
        assert await status(reader) == b"200"
        monkeypatch.setattr(doorman, "HEAD_TIMEOUT_S", HEAD_TIMEOUT_S)
    writer.write(HEAD + b"\r\n" + HEAD + b"\r\n")  # two at once
    assert await status(reader) == b"200"
    assert await status(reader) == b"200"
