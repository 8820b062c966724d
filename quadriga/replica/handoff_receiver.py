"""The destination's side of a hand-off: leases on rows, parts of KV, commit.

A reservation is kept only while its source gives signs of life. After a prefill and between decode
replicas the calls are the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from quadriga.background import background
from quadriga.clock import Clock
from quadriga.core.kv import KVPart, ResumePoint, TransferOffer
from quadriga.core.replica import DepthClass
from quadriga.core.request import SequenceState
from quadriga.errors import KVTransportError, MigrationFailed, Overloaded, QuadrigaError
from quadriga.kv_transport.payload import checksum, unpack
from quadriga.scheduling.transfer.handoff import Lease, LeaseState, LeaseTable, still_busy

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class RowHost(Protocol):
    """What the receiving side asks of the engine that owns the rows."""

    async def reserve_row(self, offer: TransferOffer) -> tuple[int, int]:
        """Promise a row; see `DecodeLoop.reserve`.

        Returns:
            The row, and its positions whose KV is there already.

        Raises: KVCacheExhausted, ContextTooLong.
        """

    async def release_row(self, sequence_id: str) -> None:
        """Give a promised row back."""

    async def join(self, state: SequenceState, resume: ResumePoint | None, depth: int) -> None:
        """Let the sequence run in its row from the next step on; `depth` layers of KV came."""

    def write_kv(self, row: int, first_layer: int, start: int, kv: Any) -> None:
        """Store KV in a promised row; called on other threads than the event loop's."""


class HandoffReceiver:
    """The destination side of a replica's transfers; the `KVSink` of its transports.

    Runs on the event loop; `knows`, `accept` and `store` are called on other threads.

    Attributes:
        leases: The transfers; may be looked at from any thread.
        joining: Sequences whose transfer is committed, and that do not run yet; the same.
    """

    def __init__(
        self,
        depth_class: DepthClass,
        host: RowHost,
        clock: Clock,
        *,
        any_depth: bool = False,
    ) -> None:
        self.leases = LeaseTable(depth_class, any_depth=any_depth)
        self._host = host
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._commits: dict[str, asyncio.Task[None]] = {}
        self._reserving: set[str] = set()
        self.joining: frozenset[str] = frozenset()  # replaced, never changed

    async def reserve(self, offer: TransferOffer) -> int:
        """Take an offer: promise a row until the lease lapses. A repeated offer is the same.

        Returns:
            Positions, from the first on, whose KV need not be sent.

        Raises:
            KVCacheExhausted, ContextTooLong: No room now, or ever.
            MigrationFailed: Stale, for another depth class, or over.
            Overloaded: Code "busy": enough running sequences are on their way here, or the row of
                an earlier try is not free yet.
        """
        lease = self.leases.get(offer.transfer_id)
        if lease is not None:
            return lease.held_tokens
        for transfer_id in self.leases.check_offer(offer):
            await self.abort(transfer_id)
        self.leases.check_row(offer.sequence_id)
        # Where the engine is slow, an earlier try may be given up before its row was asked for.
        if offer.sequence_id in self._reserving:
            raise still_busy(offer.sequence_id)
        self._reserving.add(offer.sequence_id)
        try:
            return await self._open(offer)
        finally:
            self._reserving.discard(offer.sequence_id)

    async def _open(self, offer: TransferOffer) -> int:
        row, held_tokens = await self._host.reserve_row(offer)
        try:
            self.leases.open(offer, row, now_s=self._clock.now_s(), held_tokens=held_tokens)
        except (MigrationFailed, Overloaded):
            await self._host.release_row(offer.sequence_id)
            raise
        return held_tokens

    async def commit(
        self,
        transfer_id: str,
        state: SequenceState,
        checksums: Sequence[int],
        resume: ResumePoint | None = None,
    ) -> None:
        """Verify that everything is there and let the sequence run; may be repeated.

        Args:
            resume: Where it stood, if it was decoding; with the last of its KV, maybe.

        Raises:
            MigrationFailed: Unknown, ended, stale, incomplete, incoherent or corrupt.
            KVTransportError: The KV that came with it does not belong there.
        """
        task = self._commits.get(transfer_id)
        if task is None:
            task = background(self._take(transfer_id, state, checksums, resume))
            self._commits[transfer_id] = task
            task.add_done_callback(lambda _: self._commits.pop(transfer_id, None))
        await asyncio.shield(task)

    async def _take(
        self,
        transfer_id: str,
        state: SequenceState,
        checksums: Sequence[int],
        resume: ResumePoint | None,
    ) -> None:
        """Store what came with a commit, commit the lease, and let the sequence join; once."""
        if resume is not None and resume.last_kv:
            # Where ranks share the cache, a write waits for the pass under way.
            await asyncio.to_thread(self._store_last, transfer_id, resume.last_kv)
            resume = replace(resume, last_kv=())
        # The newest token has no KV yet: it is the next step's input.
        lease = self.leases.commit(
            transfer_id,
            epoch=state.epoch,
            num_tokens=state.num_tokens - 1,
            checksums=checksums,
            extents=resume.extents if resume is not None else (),
        )
        if lease is not None:
            await self._join(lease, state, resume)

    def _store_last(self, transfer_id: str, last_kv: Sequence[tuple[KVPart, bytes]]) -> None:
        """Write the KV that came with a commit; nothing where the transfer is over already.

        On a thread of its own.
        """
        lease = self.leases.get(transfer_id)
        if lease is None:
            return
        for part, data in last_kv:
            if part.transfer_id != transfer_id:
                raise KVTransportError(
                    f"a part of {part.transfer_id} came with the commit of {transfer_id}",
                    code="refused",
                )
            try:
                self.accept(lease.offer.source, part)
                self.store(lease.offer.source, part, unpack(part, data))
            except KVTransportError:
                raise
            except QuadrigaError as exc:  # of the row: no memory, or the engine is over
                raise KVTransportError(
                    f"the last KV of {transfer_id} was not written: {exc.message}"
                ) from exc

    async def _join(self, lease: Lease, state: SequenceState, resume: ResumePoint | None) -> None:
        self.joining |= {state.sequence_id}
        try:
            await self._host.join(state, resume, lease.offer.depth_class.depth)
        except Exception as exc:  # whatever it was, the row must not stay taken
            # A source that learns of a cancellation does not try elsewhere.
            is_cancelled = isinstance(exc, QuadrigaError) and exc.code == "cancelled"
            end = LeaseState.CANCELLED if is_cancelled else LeaseState.ABORTED
            self.leases.revoke(lease, end)
            await self._host.release_row(state.sequence_id)
            message = exc.message if isinstance(exc, QuadrigaError) else repr(exc)
            raise MigrationFailed(
                f"{state.sequence_id} could not join: {message}", code=end
            ) from exc
        finally:
            self.joining -= {state.sequence_id}

    async def abort(
        self, transfer_id: str, end: LeaseState = LeaseState.ABORTED
    ) -> LeaseState | None:
        """End a transfer, unless it is committed; may be repeated. Returns what it is now."""
        joining = self._commits.get(transfer_id)
        if joining is not None:  # it may yet fail, and then it is no commit
            await asyncio.wait({joining})
        lease = self.leases.abort(transfer_id, end)
        state = self.leases.state(transfer_id)
        if lease is not None:
            await self._give_back(lease)
        return state

    async def _give_back(self, lease: Lease) -> None:
        """Free the row of a transfer that ended."""
        await self._host.release_row(lease.offer.sequence_id)
        self.leases.freed(lease)

    async def cancel(self, sequence_id: str) -> None:
        """End every open transfer of a cancelled sequence; its source learns of it."""
        for transfer_id in self.leases.open_transfers(sequence_id):
            await self.abort(transfer_id, LeaseState.CANCELLED)

    async def abort_all(self) -> None:
        """End every open transfer: the replica is going away."""
        for transfer_id in self.leases.open_transfers():
            await self.abort(transfer_id)

    async def sweep(self, *, stood_still_s: float = 0.0) -> int:
        """Release what lapsed; called every fraction of a lease. Returns how many.

        Args:
            stood_still_s: How long this process could receive nothing: no silence of the sources.
        """
        now_s = self._clock.now_s()
        self.leases.stood_still(stood_still_s, now_s=now_s)
        lapsed = self.leases.lapse(now_s=now_s)
        for lease in lapsed:
            logger.info("lease of transfer %s lapsed", lease.offer.transfer_id)
            await self._give_back(lease)
        return len(lapsed)

    def knows(self, source: str) -> bool:
        return self.leases.has_source(source)

    def accept(self, source: str, part: KVPart) -> None:
        self.leases.check_part(source, part, now_s=self._clock.now_s())

    def store(self, source: str, part: KVPart, kv: torch.Tensor) -> None:
        lease = self.leases.begin_store(source, part, now_s=self._clock.now_s())
        digest: int | None = None
        try:
            self._host.write_kv(lease.row, part.first_layer, part.start, kv)
            digest = checksum(kv)
        except (RuntimeError, ValueError, IndexError) as exc:
            raise KVTransportError(
                f"part {part.index} of {part.transfer_id} does not fit its row: {exc}"
            ) from exc
        finally:
            due = self.leases.end_store(lease, part, digest, now_s=self._clock.now_s())
            if due:
                self._loop.call_soon_threadsafe(background, self._give_back(lease))
