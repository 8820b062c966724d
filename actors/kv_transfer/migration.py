"""Live migration, the source's side: a running sequence goes to another decode replica.

    reserve ─▶ copy, while it decodes on ─▶ cutover ─▶ commit ─▶ acknowledged: let go
       │                │                     │           │
       ▼                ▼                     ▼           ▼
    refused          failed; or it         aborted:    settle: COMMITTED, let go; ABORTED, or the
                     ended: finished       failed      destination is dead: goes on here

During the cutover the sequence stands still. A paused one goes the same way, and decodes nowhere
meanwhile. The last KV goes with the commit where it is small. A destination of another depth gets
the layers that both have.

Until the commit leaves, the destination cannot own the sequence, so whatever goes wrong it decodes
on here. Afterwards the destination is asked until it answers or is known to be dead; meanwhile the
sequence stands still. So it runs on one replica, never on two and never on none. Where the
destination died without an answer it may have emitted tokens before: the source then goes on under
a yet higher epoch.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from actors.rpc.lifecycle import scheduler_name
from quadriga.background import background
from quadriga.core.migration import (
    MigrationCause,
    MigrationOrder,
    MigrationOutcome,
    MigrationReport,
)
from quadriga.core.output import EngineOutput
from quadriga.core.request import SequenceState
from quadriga.errors import ContextTooLong, MigrationFailed, QuadrigaError, ReplicaDied
from quadriga.observability import tracing
from quadriga.policies.ares.orders import REASONS
from quadriga.scheduling.transfer.handoff import LeaseState
from quadriga.scheduling.transfer.migration_copy import Copy, Ended

if TYPE_CHECKING:
    from actors.kv_transfer.handoff_sender import OutgoingTransfer
    from actors.replica.decode_engine import DecodeEngine
    from actors.replica.replica import Replica
    from quadriga.scheduling.transfer.sequence_export import SequenceRemainder

logger = logging.getLogger(__name__)

REST_DEADLINE_S = 2.0
"""For the last KV, and again for the commit, while the sequence stands still."""
MAX_SETTLE_PAUSE_S = 1.0
MAX_OUTGOING = 2
"""Sequences a replica hands over at once: each costs its steps a little."""


class Migration:
    """One sequence's move.

    Args:
        order: Checked: this replica may try.

    Attributes:
        verdict: What came of it; there before `run` returns only where that is "unknown" yet.
    """

    def __init__(
        self, migrations: Migrations, replica: Replica[DecodeEngine], order: MigrationOrder
    ) -> None:
        self.order = order
        self.verdict: asyncio.Future[MigrationReport] = asyncio.get_running_loop().create_future()
        self._migrations = migrations
        self._replica = replica
        self._started_s = replica.clock.now_s()
        self._started_unix_s = replica.clock.unix_s()
        self._traceparent: str | None = None
        self._rested_s = 0.0
        self._at_fault = ""
        self._copying: Copy | None = None

    async def run(self) -> None:
        """Move it, or leave everything as it was; raises for programming errors only."""
        sequence_id = self.order.sequence_id
        try:
            held = await self._replica.engine.call(lambda core: core.loop.export.held(sequence_id))
            if held is None:
                self._conclude("refused", "not_running: it is not here")
                return
            state, depth = held
            self._at_fault = self.order.destination
            self._traceparent = state.traceparent
            transfer = await self._replica.sender.reserve(
                self.order.destination,
                state,
                replace(self.order.depth_class, depth=depth),
                is_live=True,
                depths=state.exits.depth_bounds(
                    depth, deterministic=self._replica.config.deterministic
                ),
                numerics=self._replica.info_record.numerics,
            )
        except QuadrigaError as exc:
            if isinstance(exc, ContextTooLong) or exc.code == "busy":
                self._at_fault = ""  # for others there may be room
            self._conclude("refused", _reason(exc))
            return
        self._replica.remember_peer(transfer.peer)
        # Now, so that the ingress polls the destination by the time it emits tokens.
        self._announce(state, transfer, "begun")
        try:
            rest = await self._copy(transfer, depth)
        except Exception as exc:  # whatever it is: nothing else would let the sequence go on
            await self._give_up(state, transfer, _as_failure(exc))
            return
        try:
            await self._commit(transfer, rest)
        except Exception as exc:  # the same
            await self._settle(state, transfer, _as_failure(exc))
        else:
            await self._let_go(state, transfer)

    async def _copy(self, transfer: OutgoingTransfer, held_depth: int) -> SequenceRemainder:
        """Send what there is until the cutover, while it runs; the commit carries the remainder.

        Args:
            held_depth: Layers of its KV; those that the destination has not got do not go.

        Raises:
            Ended: It is over.
            QuadrigaError: It cannot be sent, or takes too long.
        """
        end_s = self._started_s + self._replica.config.transport.deadline_s
        self._copying = Copy(
            self.order.sequence_id,
            transfer,
            lambda command: self._replica.engine.call(lambda core: command(core.loop)),
            self._replica.clock,
            depth=min(held_depth, transfer.peer.depth_class.depth),
        )
        try:
            async with asyncio.timeout(end_s - self._replica.clock.now_s()):
                rest = await self._copying.until_cutover(end_s)
        except TimeoutError as exc:
            why = f"its KV was not at {transfer.peer.name} before the deadline"
            raise MigrationFailed(why, code="timeout") from exc
        self._rested_s = self._replica.clock.now_s()
        await self._copying.send_last(rest.reading, self._rested_s + REST_DEADLINE_S)
        return rest

    async def _commit(self, transfer: OutgoingTransfer, rest: SequenceRemainder) -> None:
        """Raises: QuadrigaError: It is not known whether the destination owns the sequence."""
        state, epoch = rest.state, transfer.offer.epoch
        pending = self._replica.mail.unacknowledged(state.ingress_id, state.sequence_id)
        moved = replace(
            state, num_moves=state.num_moves + 1, moved_unix_s=self._replica.clock.unix_s()
        )
        resume = replace(
            rest.resume, unacknowledged=tuple(replace(e, epoch=epoch) for e in pending)
        )
        await transfer.commit(moved, resume, deadline_s=REST_DEADLINE_S)

    async def _give_up(
        self, state: SequenceState, transfer: OutgoingTransfer, reason: QuadrigaError
    ) -> None:
        """Nothing was committed: the sequence goes on here, if it is not over."""
        background(transfer.abort())
        if reason.code == "depth_changed":
            self._at_fault = ""  # the layers of this replica
        # A cutover that was asked for may have begun although its result was not awaited.
        await self._go_on(state, transfer, None)
        self._conclude("finished" if isinstance(reason, Ended) else "failed", _reason(reason))

    async def _go_on(
        self, state: SequenceState, transfer: OutgoingTransfer, epoch: int | None
    ) -> None:
        """Let the sequence go on here, under another epoch where one is given."""
        sequence_id = self.order.sequence_id

        def go_on(core: DecodeEngine) -> bool:
            core.loop.export.abort_cutover(sequence_id, epoch)
            return core.loop.export.held(sequence_id) is not None

        try:
            is_here = await self._replica.engine.call(go_on)
        except QuadrigaError as exc:  # the engine is over, and this process with it
            logger.info("%s does not go on here: %s", sequence_id, exc)
            return
        if is_here:
            self._announce(state, transfer, "failed")

    async def _settle(
        self, state: SequenceState, transfer: OutgoingTransfer, reason: QuadrigaError
    ) -> None:
        """Ask the destination what became of the commit, until it answers or is dead."""
        pause_s, end = 0.05, None
        while end is None:
            try:
                end = await transfer.settle()
            except ReplicaDied as exc:
                if exc.code != "unreachable":
                    # It may have emitted tokens under the offered epoch before it died.
                    await self._go_on(state, transfer, transfer.offer.epoch + 1)
                    self._conclude("failed", _reason(exc))
                    return
            except Exception as exc:  # whatever it is: nothing else would let the sequence go on
                failure = _as_failure(exc)
                logger.info("%s at %s: %s", self.order.sequence_id, transfer.peer.name, failure)
            if end is None:
                self._report("unknown", _reason(reason))
                if self._replica.departed.is_cancelled(self.order.sequence_id):
                    self._conclude("finished", "cancelled: it was cancelled at both ends")
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_SETTLE_PAUSE_S)
        if end is LeaseState.COMMITTED:
            await self._let_go(state, transfer)
        else:
            await self._go_on(state, transfer, None)
            self._conclude("failed", _reason(reason))

    async def _let_go(self, state: SequenceState, transfer: OutgoingTransfer) -> None:
        """The destination owns it: release what is here."""
        sequence_id = self.order.sequence_id
        self._replica.moved_away(sequence_id, transfer.peer.name)
        try:
            await self._replica.engine.call(lambda core: core.loop.leave(sequence_id))
        except QuadrigaError as exc:  # the engine is over, and this process with it
            logger.info("the row of %s is not released: %s", sequence_id, exc)
        self._announce(state, transfer, "done")
        self._conclude("moved", "")

    def _announce(
        self,
        state: SequenceState,
        transfer: OutgoingTransfer,
        move: Literal["begun", "done", "failed"],
    ) -> None:
        """Send the ingress word of the move: it polls both replicas meanwhile."""
        emission = EngineOutput(
            state.sequence_id,
            state.epoch,
            len(state.output_ids),
            moved_to=transfer.peer.name,
            move=move,
        )
        self._replica.emit([(state.ingress_id, emission)])

    def _conclude(self, outcome: MigrationOutcome, reason: str) -> None:
        """Report how it ended to the caller, the metrics and the trace."""
        report = self._report(outcome, reason)
        self._migrations.ended(self.order, report)
        self._trace(report)
        if outcome != "moved":
            logger.info("%s: %s (%s)", self.order.sequence_id, outcome, reason)

    def _trace(self, report: MigrationReport) -> None:
        tracing.record(
            "migration",
            self._traceparent,
            self._started_unix_s,
            self._replica.clock.unix_s(),
            {
                "quadriga.replica": self._replica.name,
                "quadriga.sequence_id": report.sequence_id,
                "quadriga.peer": self.order.destination,
                "quadriga.cause": self.order.cause.value,
                "quadriga.outcome": report.outcome,
                "quadriga.rounds": report.rounds,
                "quadriga.bytes": report.bytes_sent,
                "quadriga.stall_s": report.stall_s,
            },
            report.reason if report.outcome in ("failed", "unknown") else None,
        )

    def _report(self, outcome: MigrationOutcome, reason: str) -> MigrationReport:
        now_s, copying = self._replica.clock.now_s(), self._copying
        report = MigrationReport(
            sequence_id=self.order.sequence_id,
            outcome=outcome,
            reason=reason,
            rounds=copying.rounds if copying is not None else 0,
            bytes_sent=copying.bytes_sent if copying is not None else 0,
            stall_s=now_s - self._rested_s if self._rested_s else 0.0,
            took_s=now_s - self._started_s,
            sending_s=copying.sending_s if copying is not None else 0.0,
            at_fault=self._at_fault,
        )
        if not self.verdict.done():
            self.verdict.set_result(report)
        return report


def _as_failure(exc: Exception) -> QuadrigaError:
    if isinstance(exc, QuadrigaError):
        return exc
    logger.error("a migration broke", exc_info=exc)
    return MigrationFailed(f"it broke: {exc!r}")


def _reason(error: QuadrigaError) -> str:
    return f"{error.code}: {error.message}"


class Migrations:
    """All live migrations out of one replica; on its event loop.

    Attributes:
        under_way: Ids of the sequences on their way; from any thread, as it is replaced, never
            changed.
    """

    def __init__(self, replica: Replica[DecodeEngine]) -> None:
        self._replica = replica
        self.under_way: frozenset[str] = frozenset()

    async def migrate(self, order: MigrationOrder) -> MigrationReport:
        """Hand a running sequence over; every ordinary end is reported, not raised."""
        refusal = self._refusal(order)
        if refusal is not None:
            report = MigrationReport(order.sequence_id, "refused", refusal)
            self.ended(order, report)
            return report
        self.under_way |= {order.sequence_id}
        migration = Migration(self, self._replica, order)
        # It runs to its end whatever becomes of the caller.
        background(self._run(migration))
        return await asyncio.shield(migration.verdict)

    def ended(self, order: MigrationOrder, report: MigrationReport) -> None:
        """Count how an order ended; of one that the scheduler has not given, it is told."""
        self._replica.metrics.migrated(order.cause, report)
        if order.cause in REASONS:
            scheduler = scheduler_name(self._replica.config.name)
            background(self._replica.calls.tell(scheduler, "moved", order, report))

    async def _run(self, migration: Migration) -> None:
        try:
            await migration.run()
        except Exception as exc:  # the caller must not wait for ever
            if not migration.verdict.done():
                migration.verdict.set_exception(exc)
            raise
        finally:
            self.under_way -= {migration.order.sequence_id}

    def _refusal(self, order: MigrationOrder) -> str | None:
        """Why an order is not even tried; None where it is."""
        replica = self._replica
        mine = replica.spec.engine.depth_class
        if order.destination == replica.name:
            return "same_replica: it is there already"
        if order.depth_class != mine:
            return f"wrong_depth_class: the order is for {order.depth_class}, this is {mine}"
        if order.sequence_id in self.under_way:
            return "under_way: it is on its way already"
        if len(self.under_way) >= MAX_OUTGOING:
            return f"busy: {MAX_OUTGOING} sequences are on their way from here"
        if replica.departed.is_cancelled(order.sequence_id):
            return "cancelled: it was cancelled"
        return None

    async def move_all(self, destination: str, reason: str = "") -> list[MigrationReport]:
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
                reason=reason,
            )
            async with room:
                return await self.migrate(order)

        return await asyncio.gather(*(move(s.sequence_id, s.num_tokens) for s in states))
