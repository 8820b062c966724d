"""The Ingress deployment: one Serve class that carries the HTTP routes and the gRPC methods."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

from fastapi import FastAPI
from ray import serve

from quadriga.config.loader import load_config
from quadriga.errors import Unavailable
from quadriga.observability import tracing
from quadriga.observability.logs import configure_logging
from quadriga.replica.gc_tuning import collect_rarely, settle
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli.startup import announce_when_ready
from serve_app.grpc.server import GrpcServer
from serve_app.http.server import HttpServer
from serve_app.http.tls import grpc_tls_port
from serve_app.openai.models import ModelDirectory
from serve_app.ops.admin import serve_admin
from serve_app.request.cluster_client import ClusterClient
from serve_app.request.engine_client import EngineClient

LOOK_INTERVAL_S = 0.5
CUT_MARGIN_S = 2.0
"""Serve kills a replica at its time limit: streams are ended in an error so long before."""


class Ingress:
    """One ingress replica; it holds its clients' streams until they end.

    Args:
        config: `QuadrigaConfig` as a plain dict, without API keys.
        keys: Hashes of the accepted keys.
        announces: Print what runs where once the service is ready.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: dict[str, Any], keys: ApiKeys, announces: bool
    ) -> None:
        collect_rarely()
        loaded = load_config(config)
        ingress_id = f"{loaded.name}:ingress:{uuid.uuid4().hex[:12]}"
        configure_logging(loaded.logging.format, loaded.logging.level, process=ingress_id)
        tracing.start(ingress_id)
        # Reading tokenizers and asking for the actors both block.
        models = await asyncio.to_thread(ModelDirectory.load, loaded)
        from actors.rpc.lookup import ensure_cluster
        from actors.rpc.ray_rpc import num_connections

        await asyncio.to_thread(ensure_cluster, loaded)
        self._engine_client = EngineClient(
            loaded, models, keys, ClusterClient(loaded.name), ingress_id=ingress_id
        )
        self._engine_client.metrics.connections.set_function(num_connections)
        self._grpc = GrpcServer(self._engine_client, needs_tls=grpc_tls_port())
        # Started here: what a request starts, Ray cancels with the request.
        self._engine_client.start()
        self._engine_client.tasks.spawn(serve_admin(self._engine_client))
        self._engine_client.tasks.repeat(self._follow_serve, LOOK_INTERVAL_S)
        settle()
        if announces and serve.get_replica_context().rank.rank == 0:
            self._engine_client.tasks.spawn(
                announce_when_ready(loaded, needs_key=not keys.is_http_open)
            )
        # KubeRay moves the traffic to a new cluster as soon as this has returned.
        if within_s := float(os.environ.get("QUADRIGA_READY_WITHIN_S", 0)):
            await until_ready(self._engine_client.check_ready, within_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return HttpServer(self._engine_client).application()

    async def drain(self, within_s: float) -> int:
        """Refuse new requests and end the open ones, in an error after `within_s` seconds.

        The command that stops the service calls it before Serve does anything: once Serve stops
        an application, its proxy answers 404.

        Returns:
            The number of requests that are open or still being answered.
        """
        return self._engine_client.drain(within_s)

    async def _follow_serve(self) -> None:
        """End open requests in an error before Serve, which was asked to stop us, cuts them.

        New ones are taken: a router that does not know yet that this replica ends sends some.
        """
        timeout_s = _stop_timeout_s()
        if timeout_s is not None:
            self._engine_client.drain(
                timeout_s - min(CUT_MARGIN_S, timeout_s / 2), refuses_new=False
            )

    # gRPC: Serve calls these by the name of the method.

    async def Generate(self, request: bytes, grpc_context: Any) -> AsyncIterator[Any]:
        async with aclosing(self._grpc.generate(request, grpc_context)) as messages:
            async for message in messages:
                yield message

    async def GenerateOnce(self, request: bytes, grpc_context: Any) -> Any:
        return await self._grpc.generate_once(request, grpc_context)

    async def Embed(self, request: bytes, grpc_context: Any) -> Any:
        return await self._grpc.embed(request, grpc_context)

    async def Cancel(self, request: bytes, grpc_context: Any) -> Any:
        return await self._grpc.cancel(request, grpc_context)

    async def ListModels(self, request: bytes, grpc_context: Any) -> Any:
        return await self._grpc.list_models(request, grpc_context)

    async def Check(self, request: Any, grpc_context: Any) -> Any:
        return self._grpc.check(request.service, grpc_context)

    async def Watch(self, request: Any) -> AsyncIterator[Any]:
        async with aclosing(self._grpc.watch(request.service)) as answers:
            async for answer in answers:
                yield answer


async def until_ready(check_ready: Callable[[], None], within_s: float) -> None:
    """Wait until the cluster serves. Raises: Unavailable: What it lacks after so long."""
    for _ in range(int(within_s / LOOK_INTERVAL_S)):
        with suppress(Unavailable):
            return check_ready()
        await asyncio.sleep(LOOK_INTERVAL_S)
    return check_ready()


def _stop_timeout_s() -> float | None:
    """Seconds that Serve gives this replica to end, once Serve has asked it to; None before that.

    Serve notifies a replica's own code only after its last request. Ray keeps the actors of this
    process in a private place; where it is another one in a later Ray, this is always None, and
    requests that outlast the time limit are cut without an error.
    """
    from ray._private import worker

    process: Any = worker.global_worker
    for actor in getattr(process, "actors", {}).values():
        replica = getattr(actor, "_replica_impl", None)
        if getattr(replica, "_shutting_down", False):
            deployment = serve.get_replica_context()._deployment_config
            return float(deployment.graceful_shutdown_timeout_s)
    return None
