"""KV parts through Ray's object store: slower than gloo, and works wherever Ray does."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from actors.rpc.ray_rpc import call_handle, find_actor
from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError, QuadrigaError
from quadriga.interfaces import KVSink
from quadriga.kv_transport.payload import as_array, from_bytes, num_bytes, where_digested

MAX_PUTS = 4
"""At once: parts of 256 KiB to 1 MiB, as they mostly are, go through faster up to four and not
beyond. They share one connection to the store; larger ones are copied by threads of Ray's own."""

_putting = ThreadPoolExecutor(MAX_PUTS, thread_name_prefix="put-kv")
"""Threads of their own: where the store stalls, only parts for it wait for each other."""


class ObjectStoreTransport:
    """Puts a part into the object store and passes the reference to the peer's `kv_deliver`.

    The reference travels inside a list, so that Ray does not fetch the bytes before the peer has
    looked at the header.
    """

    name = "object_store"

    def __init__(self, me: str, sink: KVSink | None) -> None:
        self._me = me
        self._sink = sink
        self._calls: dict[str, set[asyncio.Task[None]]] = {}
        self._is_closed = False

    async def send(self, peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
        if self._is_closed:
            raise KVTransportError(f"the transport of {self._me} is closed")
        task = asyncio.create_task(self._send(peer, part, kv, deadline_s))
        calls = self._calls.setdefault(part.transfer_id, set())
        calls.add(task)
        try:
            await asyncio.wait([task], timeout=deadline_s)
            if not task.done():
                raise KVTransportError(
                    f"part {part.index} to {peer} took longer than {deadline_s:.1f} s",
                    code="timeout",
                )
            if task.cancelled():
                raise KVTransportError(f"transfer {part.transfer_id} was aborted", code="aborted")
            task.result()
        finally:
            task.cancel()
            calls.discard(task)
            if not calls:
                self._calls.pop(part.transfer_id, None)
            # Its error has this frame, and that the KV: they would wait for the garbage collector.
            del task

    async def _send(self, peer: str, part: KVPart, kv: torch.Tensor, deadline_s: float) -> None:
        """Put a part and have the peer fetch it; `send` breaks it off at the deadline.

        The call goes through Ray: pickled by others, a reference does not say where its bytes are.
        """
        began_s = time.monotonic()
        try:
            handle = await find_actor(peer, deadline_s)
            ref = await _put(kv)
            left_s = deadline_s - (time.monotonic() - began_s)
            what = self._me, part, [ref], left_s
            await call_handle(peer, handle, "kv_deliver", *what, timeout_s=deadline_s)
        except KVTransportError:
            raise
        except (QuadrigaError, RayError) as exc:
            raise KVTransportError(f"part {part.index} to {peer}: {exc}") from exc

    async def deliver(
        self, source: str, part: KVPart, refs: list[ray.ObjectRef[Any]], deadline_s: float
    ) -> None:
        """The receiving half: fetch the bytes of an accepted part and store them.

        Raises:
            KVTransportError: Refused, late, or the bytes are lost.
        """
        if self._sink is None:
            raise KVTransportError(f"{self._me} does not receive KV", code="refused")
        self._sink.accept(source, part)
        num_bytes(part)
        try:
            async with asyncio.timeout(deadline_s):
                array = await refs[0]
        except TimeoutError as exc:
            raise KVTransportError(f"part {part.index} did not arrive in {deadline_s} s") from exc
        except RayError as exc:
            raise KVTransportError(f"part {part.index} from {source} is lost: {exc}") from exc
        # The store's memory is read-only and shared; the copy also lets go of it at once.
        data = torch.from_numpy(array.copy())
        await asyncio.to_thread(self._store, self._sink, source, part, data)

    @staticmethod
    def _store(sink: KVSink, source: str, part: KVPart, data: torch.Tensor) -> None:
        sink.store(source, part, where_digested(from_bytes(data, part), part))

    async def abort(self, peer: str, transfer_id: str) -> None:
        for task in list(self._calls.get(transfer_id, ())):
            task.cancel()

    async def close(self) -> None:
        self._is_closed = True
        tasks = [task for calls in self._calls.values() for task in calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _put(kv: torch.Tensor) -> ray.ObjectRef[Any]:
    """Put a tensor's bytes into the store.

    A caller that gives up cancels a put that has not begun; one that ends later is freed at once,
    as nothing has its reference. Raises: RayError.
    """
    waiting = [kv]
    try:
        return await asyncio.wrap_future(_putting.submit(lambda: ray.put(as_array(waiting.pop()))))
    finally:
        waiting.clear()
