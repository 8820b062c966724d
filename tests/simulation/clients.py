"""The SDK's side of a simulated cluster: its calls, over connections that break."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from quadriga.client.aio import AsyncClient
from quadriga.client.retries import RetryPolicy
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from tests.simulation.plans import TIMEOUT_S

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

KEY = "k"
REFUSALS = frozenset({"overloaded", "kv_cache_exhausted", "ingress_full"})
"""Codes of the errors that say when there will be room."""


class _Context:
    """gRPC's context of one call."""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {KEY}")]

    def auth_context(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Stub:
    """The SDK's calls, carried to an ingress of the simulated cluster.

    Attributes:
        num_refused: How often each request was told to come back.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.num_refused: Counter[str] = Counter()

    async def Generate(self, message: Any, metadata: Any, timeout: float) -> AsyncIterator[Any]:
        request_id = dict(metadata)["session_id"]
        ingress = self._cluster.ingress_of(request_id)
        if ingress is None:
            raise _broken("no ingress is there")
        process, instance = ingress
        data = message.SerializeToString()
        inbox: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def serve() -> None:
            async with aclosing(instance.grpc.generate(data, _Context())) as messages:
                async for one in messages:
                    inbox.put_nowait(one.SerializeToString())
            inbox.put_nowait(b"end")

        task = process.spawn(serve())
        process.at_death.append(lambda: inbox.put_nowait(None))
        self._cluster.connections.append((inbox, task))
        try:
            async with asyncio.timeout(timeout):
                while True:
                    got = await inbox.get()
                    if got is None:
                        raise _broken("the connection broke")
                    if got == b"end":
                        return
                    await asyncio.sleep(0.001)
                    answer = pb.GenerateResponse.FromString(got)
                    if answer.HasField("error") and answer.error.code in REFUSALS:
                        self.num_refused[request_id] += 1
                    yield answer
        except TimeoutError as exc:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "late"
            ) from exc
        finally:
            process.call(task.cancel)

    async def Cancel(self, message: Any, metadata: Any, timeout: float) -> Any:
        ingress = self._cluster.ingress_of(dict(metadata)["session_id"])
        if ingress is None:
            raise _broken("no ingress is there")
        process, instance = ingress
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def cancel() -> None:
            answer = await instance.grpc.cancel(message.SerializeToString(), _Context())
            if not reply.done():
                reply.set_result(answer)

        process.spawn(cancel())
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError as exc:
            raise _broken("no answer") from exc


def _broken(why: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), why
    )


class SimulatedClient(AsyncClient):
    """The SDK over `_Stub`."""

    def __init__(self, cluster: Cluster) -> None:
        self._stub = self.calls = _Stub(cluster)
        self._metadata = []
        self._timeout_s = TIMEOUT_S
        self._retry = RetryPolicy(max_attempts=1000, max_pause_s=60.0)
        self._cancelling, self._open = set(), set()
        self._connecting, self._is_closed = threading.Lock(), False
