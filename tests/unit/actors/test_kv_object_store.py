"""The object store as a way for KV: however it stalls, a sender waits no longer than it may."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayError

from actors.kv_transfer import object_store
from actors.kv_transfer.object_store import MAX_PUTS, ObjectStoreTransport
from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError, ReplicaError
from tests.waiting import until

PATIENCE_S = 20.0


class Ref:
    """A reference to an object in the store, which is freed with the last of them."""


class Store:
    """An object store that takes things once its gate is open, and a peer that is well.

    Attributes:
        num_asked: Puts that have begun.
        refs: To all that was put.
        num_delivered: Parts that the peer was told of.
        put_failure: What the store answers.
        failure: What the peer answers.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.num_asked = 0
        self.refs: list[weakref.ref[Ref]] = []
        self.num_delivered = 0
        self.put_failure: Exception | None = None
        self.failure: Exception | None = None

    def put(self, value: Any) -> Ref:
        self.num_asked += 1
        assert self.gate.wait(20.0)
        if self.put_failure is not None:
            raise self.put_failure
        ref = Ref()
        self.refs.append(weakref.ref(ref))
        return ref

    async def find_actor(self, peer: str, timeout_s: float) -> str:
        return f"{peer}'s handle"

    async def call_handle(
        self, peer: str, handle: str, method: str, *args: Any, timeout_s: float
    ) -> None:
        """As Ray carries a call: only it can pass a reference on."""
        assert (handle, method) == (f"{peer}'s handle", "kv_deliver")
        self.num_delivered += 1
        if self.failure is not None:
            raise self.failure

    @property
    def num_kept(self) -> int:
        return sum(ref() is not None for ref in self.refs)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setattr(object_store.ray, "put", store.put)
    monkeypatch.setattr(object_store, "find_actor", store.find_actor)
    monkeypatch.setattr(object_store, "call_handle", store.call_handle)
    # The collector seldom comes to a process that serves: what waits for it lies there for long.
    gc.disable()
    yield store
    gc.enable()
    store.gate.set()


class Sender:
    """Sends parts of one transfer, and watches what of them stays in memory."""

    def __init__(self) -> None:
        self.transport = ObjectStoreTransport("me", None)
        self.sent: list[weakref.ref[np.ndarray[Any, Any]]] = []

    async def send(self, deadline_s: float) -> str:
        """Returns the code of the failure; "" where there was none."""
        memory = np.zeros((1, 2, 1, 4, 4), np.float32)
        self.sent.append(weakref.ref(memory))
        kv = torch.from_numpy(memory)
        del memory
        part = KVPart("t", 0, 0, 1, 0, 4, tuple(kv.shape), "float32", 0)
        try:
            await self.transport.send("peer", part, kv, deadline_s=deadline_s)
        except KVTransportError as exc:
            return exc.code
        return ""

    @property
    def num_kept(self) -> int:
        return sum(memory() is not None for memory in self.sent)


async def test_a_part_is_stored_and_its_peer_notified(store: Store) -> None:
    store.gate.set()
    sender = Sender()
    assert await sender.send(PATIENCE_S) == ""
    assert store.num_delivered == 1
    await until(lambda: (sender.num_kept, store.num_kept) == (0, 0))


async def test_a_store_that_stalls_takes_no_longer_than_a_part_may(store: Store) -> None:
    sender, began_s = Sender(), time.monotonic()
    async with asyncio.timeout(PATIENCE_S / 2):
        while not store.num_asked:  # what a late thread had not begun is not put at all
            assert await sender.send(0.2) == "timeout"
        assert await asyncio.to_thread(lambda: 1) == 1, "nor do others wait for it"
    assert time.monotonic() - began_s >= 0.2
    store.gate.set()
    await until(lambda: store.refs)
    await until(lambda: (sender.num_kept, store.num_kept) == (0, 0))
    assert store.num_delivered == 0, "the peer is not told what nobody waits for"
    assert await sender.send(PATIENCE_S) == "", "and the next part goes"


async def test_a_stalled_store_drops_the_parts_it_has_not_begun(store: Store) -> None:
    sender = Sender()
    reading = [asyncio.create_task(sender.send(PATIENCE_S)) for _ in range(MAX_PUTS)]
    await until(lambda: store.num_asked == MAX_PUTS)
    waiting = [asyncio.create_task(sender.send(0.2)) for _ in range(2 * MAX_PUTS)]
    assert set(await asyncio.gather(*waiting)) == {"timeout"}
    waiting.clear()
    assert store.num_asked == MAX_PUTS
    assert sender.num_kept == MAX_PUTS, "only what it is reading"
    store.gate.set()
    assert set(await asyncio.gather(*reading)) == {""}
    reading.clear()
    assert await sender.send(PATIENCE_S) == ""
    await until(lambda: (sender.num_kept, store.num_kept) == (0, 0))
    assert store.num_asked == MAX_PUTS + 1


async def test_an_abort_does_not_wait_for_the_store(store: Store) -> None:
    sender = Sender()
    sending = asyncio.create_task(sender.send(PATIENCE_S))
    await until(lambda: store.num_asked)
    await sender.transport.abort("peer", "t")
    async with asyncio.timeout(PATIENCE_S / 2):
        assert await sending == "aborted"
    del sending
    store.gate.set()
    await until(lambda: store.refs)
    await until(lambda: (sender.num_kept, store.num_kept) == (0, 0))


@pytest.mark.parametrize("where", ["put", "peer"])
async def test_a_part_that_failed_leaves_nothing(store: Store, where: str) -> None:
    store.gate.set()
    if where == "put":
        store.put_failure = RayError("the store is full")
    else:
        store.failure = ReplicaError("the peer has a bug")
    sender = Sender()
    assert await sender.send(PATIENCE_S) == KVTransportError.default_code
    store.put_failure = store.failure = None
    await until(lambda: (sender.num_kept, store.num_kept) == (0, 0))
