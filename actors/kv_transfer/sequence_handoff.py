"""The hand-off of one sequence, from its first prefill chunk until a decode replica owns it."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any

from actors.kv_transfer.placement import DecodePlacement
from actors.replica.replica import Replica
from quadriga.background import background
from quadriga.core.kv import KVSpan
from quadriga.core.output import EngineOutput
from quadriga.core.request import layers_of, remaining_of
from quadriga.core.routing import PlaceRequest
from quadriga.errors import (
    Cancelled,
    DeadlineExceeded,
    MigrationFailed,
    Overloaded,
    QuadrigaError,
    ReplicaError,
    Unavailable,
    is_known_death,
)
from quadriga.observability import tracing
from quadriga.scheduling.sequence import RunningSequence, SequenceStatus
from quadriga.scheduling.transfer.handoff import LeaseState
from quadriga.scheduling.transfer.kv_feed import KVFeed

if TYPE_CHECKING:
    from actors.kv_transfer.handoff_sender import HandoffSender, OutgoingTransfer

logger = logging.getLogger(__name__)

MAX_FAILURES = 4
"""Hand-offs of one sequence that may fail for other reasons than a lack of room."""
MIN_PAUSE_S = 0.02
MAX_PAUSE_S = 0.5


class PrefillHandoff:
    """One sequence's way to its decode replica, as one task.

    While the prompt is computed the task finds a place and sends what is complete; when the
    first token is out it sends the rest and commits.

    Attributes:
        task: What `PrefillReplica` runs it as.
    """

    def __init__(
        self,
        replica: Replica[Any],
        sequence: RunningSequence,
        feed: KVFeed,
        placement: DecodePlacement,
        sender: HandoffSender,
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._replica = replica
        self._sequence = sequence
        self._state = sequence.state
        self._feed = feed
        self._placement = placement
        self._sender = sender
        self._failed_on: list[str] = []
        self._prompt_done_s = 0.0
        self._placed_from_s = replica.clock.now_s()
        self._started_s = replica.clock.now_s()
        self._started_unix_s = replica.clock.unix_s()
        self._deadline_s = replica.config.transport.deadline_s
        self._limit: asyncio.Timeout | None = None

    def prompt_done(self) -> None:
        """The first token is out and is not the last; all KV there will be has been fed."""
        self._prompt_done_s = self._placed_from_s = self._replica.clock.now_s()
        self._set_placed(self._sequence.is_placed)
        self._placement.turns.call_heads()  # its length is predicted now
        self._start_limit()
        self._feed.complete()

    async def run(self) -> str:
        """Hand the sequence over. Returns the name of the decode replica that owns it.

        Raises:
            QuadrigaError: Why no replica took it, or may have taken it.
        """
        left_s = self._state.deadline_unix_s - self._replica.clock.unix_s()
        error: QuadrigaError
        peer = ""
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                peer = await self._hand_off()
            self._trace(peer)
            return peer
        except TimeoutError:
            error = DeadlineExceeded(
                "the deadline passed before a decode replica had room", param="deadline_ms"
            )
        except QuadrigaError as exc:
            error = exc
        except Exception as exc:  # a border: no caller awaits the task, and the client would hang
            logger.exception("the hand-off of %s broke", self._state.sequence_id)
            error = ReplicaError(f"the hand-off broke: {exc!r}")
        finally:
            if not peer:  # failed, or cancelled while a place was looked for
                self._placement.give_up(self._state.sequence_id)
        self._trace("", error.code)
        raise error

    def _trace(self, peer: str, error: str | None = None) -> None:
        tracing.record(
            "transfer",
            self._state.traceparent,
            self._started_unix_s,
            self._replica.clock.unix_s(),
            {
                "quadriga.replica": self._replica.name,
                "quadriga.sequence_id": self._state.sequence_id,
                "quadriga.peer": peer,
                "quadriga.failures": len(self._failed_on),
            },
            error,
        )

    async def _hand_off(self) -> str:
        """Try replicas until one owns the sequence. Returns its name."""
        while True:
            transfer = await self._reserve()
            peer = transfer.peer.name
            try:
                num_bytes = await self._send_and_commit(transfer)
            except ReplicaError as exc:
                end = await transfer.abort()
                if end is LeaseState.COMMITTED:
                    return peer
                if end is LeaseState.CANCELLED:
                    raise Cancelled(f"{self._state.sequence_id} was cancelled") from exc
                self._set_placed(False)
                self._note_failure(peer, exc)
                if end is None:
                    # It must not run twice under one name. Its ingress begins it anew under
                    # another, unless that replica has sent it tokens already.
                    raise MigrationFailed(
                        f"{peer} does not answer whether it has {self._state.sequence_id} now"
                    ) from exc
            except BaseException:
                # Cancelled or late: the row here is not kept waiting for the other side.
                background(self._abort_and_cancel(transfer))
                raise
            else:
                took_s = self._replica.clock.now_s() - self._prompt_done_s
                self._replica.metrics.handed_off(took_s, num_bytes)
                return peer

    async def _send_and_commit(self, transfer: OutgoingTransfer) -> int:
        """Copy and commit; once the prompt is done, within the hand-off's deadline.

        Returns:
            The bytes sent.

        Raises:
            ReplicaError: It failed, or took too long.
        """
        try:
            async with asyncio.timeout(None) as self._limit:
                if self._prompt_done_s:
                    self._start_limit()
                num_bytes = await self._send_all(transfer)
                await transfer.commit(self._state)
                return num_bytes
        except TimeoutError as exc:
            raise MigrationFailed(
                f"hand-off to {transfer.peer.name} took longer than {self._deadline_s:.1f} s",
                code="timeout",
            ) from exc
        finally:
            self._limit = None

    def _start_limit(self) -> None:
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._deadline_s)

    async def _abort_and_cancel(self, transfer: OutgoingTransfer) -> None:
        """Give a transfer up for good; what is, or may be, committed is cancelled over there.

        It is not cancelled where this process ends: then the client still wants the sequence.
        """
        is_owned = await transfer.abort() in (LeaseState.COMMITTED, None)
        if is_owned and not self._replica.is_ending:
            state = self._state
            self._replica.cancel_at(transfer.peer.name, state.sequence_id, state.ingress_id)

    async def _send_all(self, transfer: OutgoingTransfer) -> int:
        """Send what the destination lacks, as it becomes complete. Returns the bytes sent."""
        # Here, not above: the controller imports this module, and has no torch.
        from quadriga.kv_transport.payload import join_layers

        index = 0
        num_bytes = 0
        while (piece := await self._feed.next(index, transfer.held_tokens)) is not None:
            if piece.copies is None:
                kv = await self._read_kv(piece.span)
            else:
                kv = piece.copies[0] if len(piece.copies) == 1 else join_layers(piece.copies)
            await transfer.send(piece.span.first_layer, piece.span.start, kv)
            num_bytes += kv.nbytes
            index += piece.num_ranges
        return num_bytes

    async def _read_kv(self, span: KVSpan) -> Any:
        """Copy a range out of its row, between two steps of the engine."""
        sequence = self._sequence
        return await self._replica.engine.call(lambda core: core.read_kv(sequence, span))

    async def _reserve(self) -> OutgoingTransfer:
        """Find a replica with room and reserve there; wait for a turn when there is none."""
        if self._placement.turns.is_free_for(self._state.priority):
            transfer = await self._try_once()
            if transfer is not None:
                return transfer
        async with self._placement.turns.turn(self._sequence):
            pause_s = MIN_PAUSE_S
            while True:
                transfer = await self._try_once()
                if transfer is not None:
                    return transfer
                self._feed.wants_copies = False
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _try_once(self) -> OutgoingTransfer | None:
        """Ask for a place and reserve there; after a refusal the next best. None: no room."""
        replica = self._replica
        state = self._state
        refused: list[str] = []
        while True:
            # Replicas that failed this sequence are tried again only when no other is left.
            excluded = (*self._failed_on, *refused)
            peer = await self._place(excluded)
            if peer is None and self._failed_on:
                peer = await self._place(tuple(refused))
            if peer is None or peer in refused:
                return None
            try:
                transfer = await self._sender.reserve(
                    peer,
                    state,
                    replica.info_record.depth_class,
                    numerics=replica.info_record.numerics,
                    block_keys=tuple(self._sequence.block_keys),
                )
            except (Overloaded, Unavailable):
                refused.append(peer)
                continue
            except ReplicaError as exc:
                if exc.code == "cancelled":
                    raise Cancelled(f"{state.sequence_id} was cancelled") from exc
                self._note_failure(peer, exc)
                refused.append(peer)
                continue
            replica.remember_peer(transfer.peer)
            self._set_placed(True)
            if replica.load.num_waiting:
                replica.engine.wake()  # another prompt may be begun
            moved = EngineOutput(
                state.sequence_id, state.epoch, len(state.output_ids), moved_to=peer
            )
            # Before the first token, which is on its way, this is not worth a reply of its own.
            replica.emit([(state.ingress_id, moved)], wakes=self._prompt_done_s > 0.0)
            return transfer

    async def _place(self, exclude: tuple[str, ...]) -> str | None:
        """The name of a decode replica with room; None: no room."""
        state = self._state
        return await self._placement.find(
            PlaceRequest(
                sequence_id=state.sequence_id,
                depth_class=self._replica.info_record.depth_class,
                num_tokens=state.num_tokens,
                max_total_tokens=state.max_total_tokens,
                exclude=exclude,
                prediction=remaining_of(state),
                priority=state.priority,
                waited_s=self._replica.clock.now_s() - self._placed_from_s,
                source=self._replica.name,
                started_s=self._started_s,
                is_prompt_done=self._prompt_done_s > 0.0,
                leaves_early=state.exits.leaves_early,
                numerics=self._replica.info_record.numerics,
                expected_layers=layers_of(state),
            )
        )

    def _set_placed(self, is_placed: bool) -> None:
        """Note whether a decode replica has a row for the sequence."""
        sequence = self._sequence
        sequence.is_placed = is_placed
        if self._prompt_done_s:
            sequence.status = (
                SequenceStatus.TRANSFERRING if is_placed else SequenceStatus.WAITING_FOR_PLACEMENT
            )

    def _note_failure(self, peer: str, error: ReplicaError) -> None:
        """Count a failed hand-off; raise when it was one too many."""
        self._failed_on.append(peer)
        self._replica.metrics.handoff_failed(error.code)
        state, count = self._state, len(self._failed_on)
        about = {"request_id": state.request_id, "peer": peer, "code": error.code}
        logger.warning(
            "hand-off %d of %s to %s failed: %s", count, state.sequence_id, peer, error, extra=about
        )
        if is_known_death(error):
            self._placement.report_death(peer)
        if count >= MAX_FAILURES:
            why = f"{count} hand-offs failed, the last on {peer}: {error.message}"
            raise MigrationFailed(why) from error
