"""The admin port: pages and data for operators, on a socket of its own.

Every ingress replica tries to open it; one on each node succeeds, and if it dies another takes
over. Any of them answers for the whole cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from quadriga.config.ingress import AdminConfig
from quadriga.control.replica_names import parse_replica_name
from quadriga.errors import ConfigError, InvalidRequest, NotFound, ReplicaError, is_known_death
from serve_app.auth.api_keys import ApiKeys
from serve_app.http.call import Call, Endpoint, Handler, json_in_parts
from serve_app.http.pages import dashboard_pages
from serve_app.http.protocol import LimitedHttpProtocol
from serve_app.http.server import answer_metrics, routing_error
from serve_app.http.tls import is_loopback
from serve_app.request.engine_client import EngineClient

logger = logging.getLogger("quadriga.admin")

RETRY_S = 2.0
KEEP_ALIVE_S = 30
MAX_CONNECTIONS = 64
VIEW_AGE_S = 0.5
"""However many clients read the live page, the actors are asked this rarely."""


def check_admin(config: AdminConfig, keys: ApiKeys) -> None:
    """Raises: ConfigError when the port would be open without a key."""
    if config.port is None or is_loopback(config.host):
        return
    if keys.file is None and not any(key.is_admin for key in keys.all):
        raise ConfigError(
            f"admin.host: {config.host} is not loopback, so a key with `admin` is needed: "
            "`python -m serve_app keys --name NAME --admin` makes one",
            param="admin.host",
        )


class AdminServer:
    """The routes of the admin port."""

    def __init__(self, engine_client: EngineClient) -> None:
        self._engine_client = engine_client
        self._is_loopback = is_loopback(engine_client.config.admin.host)
        self._viewing = asyncio.Lock()
        self._view: dict[str, Any] | None = None
        self._viewed_s = 0.0

    def routes(self) -> list[tuple[str, Handler]]:
        """Paths and their handlers, all GET; each is guarded alike."""
        return [
            ("/metrics", self.metrics),
            ("/live", self.live),
            ("/cluster", self.cluster),
            ("/cluster/moves", self.moves),
            ("/cluster/ticks", self.ticks),
            ("/cluster/kv_events", self.kv_events),
            ("/admin/history", self.history),
        ]

    def application(self) -> Starlette:
        # The page's own files hold nothing of the service: a browser gets them without a key, asks
        # its user for one, and shows it with every request for data.
        handlers = [(path, self._guarded(handler)) for path, handler in self.routes()]
        handlers += dashboard_pages()
        routes = [
            Route(path, Endpoint(self._engine_client, handler, "admin"), methods=["GET"])
            for path, handler in handlers
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: routing_error})
        app.router.redirect_slashes = False  # to http://, also for who came over TLS
        return app

    async def metrics(self, call: Call) -> None:
        await answer_metrics(self._engine_client, call)

    async def cluster(self, call: Call) -> None:
        """Replicas, load, forecast, exits, and moves; for `/dashboard` and `loadgen watch`."""
        clock = self._engine_client.clock
        async with self._viewing:
            if self._view is None or clock.now_s() - self._viewed_s >= VIEW_AGE_S:
                self._view = await self._engine_client.cluster.operators_view()
                self._viewed_s = clock.now_s()
        await call.answer_json(self._view)

    async def moves(self, call: Call) -> None:
        """Why the sequences of one request were moved; for `loadgen why`."""
        request_id = call.query.get("request", "")
        if not request_id:
            raise InvalidRequest("name the request: /cluster/moves?request=ID", param="request")
        for prefix in ("chatcmpl-", "cmpl-", "resp_"):  # as answers give it
            request_id = request_id.removeprefix(prefix)
        await call.answer_json({"moves": await self._engine_client.cluster.moves(request_id)})

    async def ticks(self, call: Call) -> None:
        """The newest rescheduling decisions with all they saw; for `loadgen replay`."""
        lines = await self._engine_client.cluster.ticks()
        await call.answer(lines.encode(), content_type=b"application/jsonl")

    async def kv_events(self, call: Call) -> None:
        """Which blocks a replica's prefix cache has kept and let go, for routers elsewhere."""
        client, name = self._engine_client, call.query.get("replica", "")
        if parse_replica_name(client.config.name, name) is None:
            raise InvalidRequest(
                f"replica: {name[:80]!r} is none; /cluster has their names", param="replica"
            )
        after = call.query.get("after", "0")
        if not re.fullmatch("[0-9]{1,18}", after):
            raise InvalidRequest("after: give `seq` of the last answer", param="after")
        try:
            found = await client.cluster.kv_events(name, int(after))
        except ReplicaError as exc:
            if exc.code == "unknown_method":
                why = f"{name} is of an earlier version; ask again once it is replaced"
                raise NotFound(why, param="replica") from exc
            if not is_known_death(exc):
                raise
            raise NotFound(f"{name} is gone: forget its blocks", param="replica") from exc
        if found is None:
            raise NotFound(f"{name} keeps no blocks of prompts", param="replica")
        await call.answer(await asyncio.to_thread(json_in_parts, found))

    async def history(self, call: Call) -> None:
        """HELIOS: the performance history, the machine's state, and its last decisions."""
        found = await self._engine_client.cluster.history()
        if found is None:
            raise NotFound("helios is off: models are not chosen here", param="helios.enabled")
        await call.answer_json(found)

    async def live(self, call: Call) -> None:
        await call.answer_json({"status": "alive"})

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(call: Call) -> None:
            if not self._is_loopback:
                self._engine_client.rate_limiter.keys.admin_caller(
                    call.headers.get("authorization")
                )
            await handler(call)

        return guarded


async def serve_admin(engine_client: EngineClient) -> None:
    """Serve the admin port for ever, where it is configured; wait while another one has it."""
    config = engine_client.config.admin
    if config.port is None:
        return
    told = ""
    while True:
        try:
            opened = _open(config.host, config.port)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE and str(exc) != told:
                told = str(exc)
                logger.error(
                    "admin port: %s:%d cannot be opened: %s", config.host, config.port, exc
                )
            await asyncio.sleep(RETRY_S)
            continue
        logger.info("admin port: %s:%d", config.host, config.port)
        server = _Server(
            uvicorn.Config(
                AdminServer(engine_client).application(),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                http=LimitedHttpProtocol,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        try:
            await server.serve(sockets=[opened])
        finally:
            opened.close()


def _open(host: str, port: int) -> socket.socket:
    """The listening socket. Raises: OSError: EADDRINUSE while another process has the port."""
    if ":" not in host:
        return socket.create_server((host, port))
    address = (host.strip("[]"), port)
    is_dual = socket.has_dualstack_ipv6()
    return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=is_dual)


class _Server(uvicorn.Server):
    """Leaves the process's signals to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
