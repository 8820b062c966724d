"""Very many connections, idle ones and streams, cost no stream and lock nobody out."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest
import pytest_asyncio

from serve_app.cli.environment import haproxy_enabled
from serve_app.http.haproxy import HEAD_S, IDLE_S
from tests.e2e.conftest import Service
from tests.e2e.observe import wait_until_free

NUM_IDLE, NUM_STREAMS, NUM_TOKENS = 1000, 500, 4
NUM_FROM_ONE_ADDRESS = 10_000
GIVE_UP_S = 240.0
LEAST_FILES = 8192  # HAProxy, too, may open as many, and takes 5 for two connections
pytestmark = pytest.mark.timeout(2 * GIVE_UP_S)

LIVE = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n"
BODY = {"prompt": "copy: 1 2 3", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def files_for_all() -> Iterator[None]:
    """The client's ends are open files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < LEAST_FILES:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest_asyncio.fixture
async def many(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    made = httpx.AsyncClient(base_url=service.base_url, timeout=GIVE_UP_S, limits=limits)
    async with made as client:
        yield client


async def streamed(client: httpx.AsyncClient) -> str:
    """Return a stream's text; it comes again when it is told to."""
    async with asyncio.timeout(GIVE_UP_S):
        while True:
            reply = await client.post("/v1/completions", json=BODY)
            if reply.status_code != 429:
                break
            await asyncio.sleep(float(reply.headers["retry-after"]))
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]", reply.text
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


Idle = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def idle(service: Service, number: int) -> AsyncIterator[list[Idle]]:
    """Connections that have had an answer each, and are kept for the next one."""
    host, port = service.base_url.removeprefix("http://").split(":")
    made: list[Idle] = []
    try:
        for _ in range(number):
            made.append(await asyncio.open_connection(host, int(port)))
            made[-1][1].write(LIVE)
        for reader, _ in made:
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), GIVE_UP_S)
        yield made
    finally:
        for _, writer in made:
            writer.transport.abort()


@pytest.mark.asyncio
async def test_a_thousand_idle_connections_and_five_hundred_streams(
    service: Service, many: httpx.AsyncClient, http: httpx.Client
) -> None:
    alone = await streamed(many)
    async with idle(service, NUM_IDLE) as held:
        began_s = time.monotonic()
        texts = await asyncio.gather(*(streamed(many) for _ in range(NUM_STREAMS)))
        assert texts == [alone] * NUM_STREAMS
        closed = 0
        for reader, writer in held:
            writer.write(LIVE)
            try:
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), GIVE_UP_S)
            except (ConnectionError, asyncio.IncompleteReadError):
                closed += 1
    if time.monotonic() - began_s < IDLE_S:
        assert not closed
    wait_until_free(http, within_s=GIVE_UP_S)


def test_ten_thousand_connections_of_one_address_lock_nobody_out(
    service: Service, http: httpx.Client
) -> None:
    """They send nothing; HAProxy keeps half of what it may have, and closes them all in time."""
    if not haproxy_enabled():
        pytest.skip("Serve's own proxy limits no address")
    host, port = service.base_url.removeprefix("http://").split(":")
    most = min(NUM_FROM_ONE_ADDRESS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1000)
    began_s = time.monotonic()
    with ExitStack() as stack:
        many = [stack.enter_context(socket.socket()) for _ in range(most)]
        for one in many:
            one.setblocking(False)
            one.bind(("127.0.0.2", 0))
            one.connect_ex((host, int(port)))
        for _ in range(20):
            reply = http.post("/v1/completions", json=BODY | {"stream": False})
            assert reply.status_code == 200, reply.text
        closed = sum(is_closed(one) for one in many)
    if time.monotonic() - began_s < HEAD_S:  # later they are closed for their silence
        assert 0 < closed < most


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
