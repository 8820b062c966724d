"""Which sequences a decode replica is handing over, and where the others went that it had."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from actors.kv_transfer.migration import Migration
from actors.rpc.ray_rpc import call
from actors.rpc.rpc_batcher import RpcBatcher
from actors.rpc.tasks import background
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.errors import QuadrigaError

if TYPE_CHECKING:
    from actors.kv_transfer.handoff_sender import HandoffSender
    from actors.replica.decode import DecodeReplica

MAX_OUTGOING = 2
"""Sequences a replica hands over at once: each costs its steps a little."""
MAX_REMEMBERED = 4096
CANCEL_TIMEOUT_S = 5.0


class Migrations:
    """All live migrations out of one replica; on its event loop."""

    def __init__(self, replica: DecodeReplica) -> None:
        self._replica = replica
        self._sender: HandoffSender | None = None
        self._under_way: frozenset[str] = frozenset()  # replaced, never changed: others look
        self._moved: OrderedDict[str, str] = OrderedDict()  # sequence → where it went

    @property
    def under_way(self) -> Collection[str]:
        """Sequences on their way; from any thread."""
        return self._under_way

    async def migrate(self, order: MigrationOrder) -> MigrationReport:
        """Hand a running sequence over; every ordinary end is reported, not raised."""
        refusal = self._refusal(order)
        if refusal is not None:
            report = MigrationReport(order.sequence_id, "refused", refusal)
            self._replica.metrics.migrated(order.cause, report)
            return report
        self._under_way |= {order.sequence_id}
        migration = Migration(self._replica, self._require_sender(), order)
        # It runs to its end whatever becomes of whoever ordered it.
        background(self._run(migration))
        return await asyncio.shield(migration.verdict)

    def _require_sender(self) -> HandoffSender:
        """Made at first use: its module needs torch."""
        from actors.kv_transfer.handoff_sender import HandoffSender

        if self._sender is None:
            replica = self._replica
            self._sender = HandoffSender(
                replica.name, replica.transport, RpcBatcher(call), replica.config.transport
            )
        return self._sender

    async def _run(self, migration: Migration) -> None:
        try:
            await migration.run()
        except Exception as exc:  # whoever waits for the verdict must not wait forever
            if not migration.verdict.done():
                migration.verdict.set_exception(exc)
            raise
        finally:
            self._under_way -= {migration.order.sequence_id}

    def _refusal(self, order: MigrationOrder) -> str | None:
        """Why an order is not even tried; None where it is."""
        replica = self._replica
        mine = replica.spec.engine.depth_class
        if order.destination == replica.name:
            return "same_replica: it is there already"
        if order.depth_class != mine:
            return f"wrong_depth_class: the order is for {order.depth_class}, this is {mine}"
        if order.sequence_id in self._under_way:
            return "under_way: it is on its way already"
        if len(self._under_way) >= MAX_OUTGOING:
            return f"busy: {MAX_OUTGOING} sequences are on their way from here"
        if replica.is_cancelled(order.sequence_id):
            return "cancelled: nobody wants it any more"
        return None

    async def move_all(self, destination: str) -> list[MigrationReport]:
        """Hand everything that runs here over to one replica, as many at once as allowed."""
        states = await self._replica.engine.call(lambda core: core.loop.running)
        room = asyncio.Semaphore(MAX_OUTGOING)

        async def move(sequence_id: str, num_tokens: int) -> MigrationReport:
            order = MigrationOrder(
                sequence_id=sequence_id,
                depth_class=self._replica.spec.engine.depth_class,
                source=self._replica.name,
                destination=destination,
                cause=MigrationCause.DRAIN,
                gain=0.0,
                num_tokens=num_tokens,
                remaining_tokens=0.0,
            )
            async with room:
                return await self.migrate(order)

        return await asyncio.gather(*(move(s.sequence_id, s.num_tokens) for s in states))

    def moved_away(self, sequence_id: str, peer: str) -> None:
        """Another replica owns a sequence from here on."""
        self._moved[sequence_id] = peer
        while len(self._moved) > MAX_REMEMBERED:
            self._moved.popitem(last=False)
        if self._replica.is_cancelled(sequence_id):
            self.forward([sequence_id])

    def came_back(self, sequence_id: str) -> None:
        """A sequence that was moved away is here again."""
        self._moved.pop(sequence_id, None)

    def forward(self, sequence_ids: Sequence[str], ingress_id: str | None = None) -> None:
        """Cancel what was moved away where it went: the ingress may not know of that yet.

        Args:
            ingress_id: Who cancels; see `Replica.cancel`.
        """
        for sequence_id in sequence_ids:
            peer = self._moved.pop(sequence_id, None)
            if peer is not None:
                background(_cancel(peer, sequence_id, ingress_id))


async def _cancel(peer: str, sequence_id: str, ingress_id: str | None) -> None:
    try:
        await call(peer, "cancel", [sequence_id], ingress_id, timeout_s=CANCEL_TIMEOUT_S)
    except QuadrigaError:
        return  # whoever does not answer is settled by its controller, and by the deadline
