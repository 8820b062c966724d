"""A decode replica that fails at a chosen step of the hand-off, and says how far it got."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray

from actors.kv_transfer.transport_hub import TransportHub
from actors.rpc.lookup import NAMESPACE, scheduler_name
from actors.rpc.rpc_batcher import BatchedCalls
from quadriga.clock import SystemClock
from quadriga.core.kv import Accepted, KVPart, ResumePoint, TransferOffer
from quadriga.core.output import PollReply
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import SequenceState
from quadriga.errors import KVCacheExhausted, KVTransportError, MigrationFailed, ReplicaError
from quadriga.kv_transport.channel import ChannelOffer
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.scheduling.transfer.handoff import LeaseState
from tests.ray.ingress import call

HANG_S = 60.0
"""Beyond every deadline of the tests."""

FAULTS = [
    "reserve_refused",
    "reserve_fails",
    "reserve_hangs",
    "connect_refused",
    "part_fails",
    "part_hangs",
    "commit_refused",
    "commit_hangs",
    "commit_lost",
    "dies_at_commit",
]


class FaultyDecode(BatchedCalls):
    """Takes transfers as a decode replica does, up to the step that `fault` names."""

    BATCHED = frozenset({"reserve", "commit"})

    def __init__(self, name: str, depth_class: DepthClass) -> None:
        self.fault = ""
        self._has_changed = threading.Event()
        self.calls: Counter[str] = Counter()
        self._info = ReplicaInfo(name, Role.DECODE, depth_class, "", "faulty", 100, 10**6)
        names = ("gloo", "object_store")
        self._receiver = HandoffReceiver(depth_class, self, SystemClock(), names)
        self._transport = TransportHub("auto", name, self._receiver, lambda _: "127.0.0.1")

    async def set_fault(self, fault: str) -> None:
        self._has_changed.set()  # a part that hangs does so no more
        self._has_changed = threading.Event()
        self.fault = fault
        self.calls.clear()

    async def seen(self) -> dict[str, int]:
        return dict(self.calls)

    async def until(self, method: str) -> None:
        """Wait until a method was called."""
        while not self.calls[method]:  # noqa: ASYNC110 - a test's wait, bounded by its caller
            await asyncio.sleep(0.005)

    async def reserve(self, offer: TransferOffer) -> Accepted:
        self.calls["reserve"] += 1
        if self.fault == "reserve_refused":
            raise KVCacheExhausted("no room")
        if self.fault == "reserve_fails":
            raise ReplicaError("a bug")
        if self.fault == "reserve_hangs":
            await asyncio.Event().wait()
        await self._receiver.reserve(offer)
        return Accepted(self._info)

    async def renew(self, transfer_id: str) -> bool:
        return self._receiver.leases.renew(transfer_id, now_s=SystemClock().now_s())

    async def kv_connect(self, offer: ChannelOffer) -> None:
        if self.fault == "connect_refused":
            raise KVTransportError("no")
        self._transport.connect(offer)

    async def kv_deliver(
        self, source: str, part: KVPart, refs: list[Any], deadline_s: float
    ) -> None:
        if self.fault == "connect_refused":
            raise KVTransportError("no")
        await self._transport.deliver(source, part, refs, deadline_s)

    async def commit(
        self,
        transfer_id: str,
        state: SequenceState,
        sums: Sequence[int],
        resume: ResumePoint | None = None,
    ) -> None:
        self.calls["commit"] += 1
        if self.fault == "commit_refused":
            raise MigrationFailed("corrupt", code="corrupt")
        if self.fault in ("commit_hangs", "commit_lost"):
            if self.fault == "commit_lost":
                await self._receiver.commit(transfer_id, state, sums, resume)
            await asyncio.Event().wait()
        if self.fault == "dies_at_commit":
            os._exit(1)

    async def abort(self, transfer_id: str) -> LeaseState | None:
        self.calls["abort"] += 1
        return await self._receiver.abort(transfer_id)

    async def cancel(self, sequence_ids: Sequence[str], ingress_id: str | None = None) -> None:
        self.calls["cancel"] += 1

    async def poll(self, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        return PollReply("faulty", 0, [])

    # RowHost

    async def reserve_row(self, offer: TransferOffer) -> tuple[int, int]:
        return 0, 0

    async def release_row(self, sequence_id: str) -> None:
        self.calls["released"] += 1

    async def join(self, state: SequenceState, resume: ResumePoint | None, depth: int) -> None:
        self.calls["joined"] += 1

    def write_kv(self, row: int, first_layer: int, start: int, kv: Any) -> None:
        self.calls["part"] += 1
        if self.fault == "part_fails":
            raise ValueError("disk full, or some such")
        if self.fault == "part_hangs":
            self._has_changed.wait(HANG_S)


def start_faulty(app: str, depth_class: DepthClass) -> tuple[str, Any]:
    """Start one beside the application's replicas, under a name that sorts before theirs."""
    name = f"{app}:decode:!:{os.urandom(3).hex()}"
    actor: Any = (
        ray.remote(FaultyDecode)
        .options(name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=100)
        .remote(name, depth_class)
    )
    ray.get(actor.seen.remote(), timeout=60)
    return name, actor


def advertise(app: str, name: str, depth_class: DepthClass) -> None:
    """Make the scheduler believe that this is the least loaded decode replica."""
    info = ReplicaInfo(name, Role.DECODE, depth_class, "", "faulty", 100, 10**6)
    snapshot = ReplicaSnapshot(info, taken_unix_s=time.time() + 30.0)
    call(scheduler_name(app), "report", snapshot)
