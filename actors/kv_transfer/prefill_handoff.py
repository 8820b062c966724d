"""What happens to one sequence from its first prefill chunk until a decode replica owns it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.kv_transfer.kv_feed import KVFeed, KVRange
from actors.rpc.lifecycle import scheduler_name
from actors.rpc.ray_rpc import call
from actors.rpc.tasks import background
from quadriga.core.output import EngineOutput
from quadriga.core.request import SequenceState
from quadriga.core.routing import PlaceRequest
from quadriga.errors import (
    Cancelled,
    DeadlineExceeded,
    MigrationFailed,
    Overloaded,
    QuadrigaError,
    ReplicaDied,
    ReplicaError,
    Unavailable,
)
from quadriga.observability import tracing
from quadriga.scheduling.forecasts import remaining_of
from quadriga.scheduling.handoff import LeaseState
from quadriga.scheduling.prefill_queue import STARVING_S

if TYPE_CHECKING:
    from actors.kv_transfer.handoff_sender import OutgoingTransfer
    from actors.replica.prefill import PrefillReplica

logger = logging.getLogger(__name__)

MAX_FAILURES = 4
"""Hand-offs of one sequence that may fail for other reasons than a lack of room."""
PLACE_TIMEOUT_S = 2.0
MIN_PAUSE_S = 0.02
MAX_PAUSE_S = 0.5


@dataclass(order=True, slots=True)
class _Place:
    """A place in the line; the smallest is served first."""

    priority: int
    number: int
    since_s: float = field(compare=False)
    is_called: asyncio.Event = field(compare=False, default_factory=asyncio.Event)


class PlacementQueue:
    """Whoever finds no room on any decode replica waits in one line.

    The most important are served first, then first come first served; whoever comes to the head
    while a less important one is being served is served beside it. Whoever has waited for
    `STARVING_S` is served before all others, so that nobody waits for ever behind the important.

    Args:
        now_s: A steady clock that goes as the event loop's does.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._waiting: list[_Place] = []
        self._numbers = itertools.count()

    def is_free_for(self, priority: int) -> bool:
        """Whether nobody waits who would be served before a newcomer."""
        head = self._head()
        return head is None or (head.priority > priority and not self._is_starving(head))

    @asynccontextmanager
    async def turn(self, priority: int) -> AsyncIterator[None]:
        """Wait for one's turn; it lasts as long as the context."""
        place = _Place(priority, next(self._numbers), self._now_s())
        self._waiting.append(place)
        self._call_head()
        # Starving makes it the head though nobody comes or goes.
        starving = asyncio.get_running_loop().call_later(STARVING_S, self._call_head)
        try:
            await place.is_called.wait()
            yield
        finally:
            starving.cancel()
            self._waiting.remove(place)
            self._call_head()

    def _call_head(self) -> None:
        head = self._head()
        if head is not None:
            head.is_called.set()

    def _head(self) -> _Place | None:
        if not self._waiting:
            return None
        first = self._waiting[0]  # in the order of their coming
        return first if self._is_starving(first) else min(self._waiting)

    def _is_starving(self, place: _Place) -> bool:
        return self._now_s() - place.since_s >= STARVING_S


class PrefillHandoff:
    """One sequence's way to its decode replica, as one task.

    While the prompt is computed the task finds a place and sends what is complete; when the
    first token is out it sends the rest and commits. Whatever happens, the row is released.
    """

    def __init__(self, replica: PrefillReplica, state: SequenceState, feed: KVFeed) -> None:
        self._replica = replica
        self._state = state
        self._feed = feed
        self._failed_on: list[str] = []
        self._prompt_done_s = 0.0
        self._prompt_done = asyncio.Event()
        self._placed_from_s = replica.clock.now_s()
        self._started_s = replica.clock.now_s()
        self._started_unix_s = replica.clock.unix_s()
        self._deadline_s = replica.config.transport.deadline_s
        self._limit: asyncio.Timeout | None = None

    def prompt_done(self) -> None:
        """The first token is out and is not the last; all KV there will be has been fed."""
        self._prompt_done_s = self._replica.clock.now_s()
        self._start_limit()
        self._feed.complete()
        self._prompt_done.set()

    async def run(self) -> None:
        state = self._state
        sequence_id = state.sequence_id
        try:
            left_s = state.deadline_unix_s - self._replica.clock.unix_s()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    peer = await self._hand_off()
            except TimeoutError:
                raise DeadlineExceeded(
                    "the deadline passed before a decode replica had room", param="deadline_ms"
                ) from None
            self._replica.handed_off(sequence_id, peer)
            self._trace(peer)
        except QuadrigaError as exc:
            self._replica.failed(state, exc)
            self._trace("", exc.code)
        except Exception as exc:  # a border: nobody awaits this task, and the client would hang
            logger.exception("the hand-off of %s broke", sequence_id)
            error = ReplicaError(f"the hand-off broke: {exc!r}")
            self._replica.failed(state, error)
            self._trace("", error.code)
        finally:
            self._feed.close()
            self._replica.placed.discard(sequence_id)  # first: a row that is free is nobody's
            if self._replica.engine.is_ready:
                await asyncio.shield(
                    self._replica.engine.call(lambda core: core.release(sequence_id))
                )

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
        replica = self._replica
        if replica.report_options.place_predicted:
            # How long it will run is known only then, and decides where it goes.
            await self._prompt_done.wait()
            self._placed_from_s = replica.clock.now_s()
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
                replica.placed.discard(self._state.sequence_id)
                self._note_failure(peer, exc)
                if end is None:
                    # It must not run twice under one name. Its ingress begins it anew under
                    # another, unless it has heard of it from there.
                    raise MigrationFailed(
                        f"{peer} does not say whether it has taken {self._state.sequence_id} over"
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

        But where this process ends: then nobody has given the sequence up.
        """
        is_owned = await transfer.abort() in (LeaseState.COMMITTED, None)
        if is_owned and not self._replica.is_ending:
            state = self._state
            self._replica.cancel_at(transfer.peer.name, state.sequence_id, state.ingress_id)

    async def _send_all(self, transfer: OutgoingTransfer) -> int:
        """Send every range, as they become complete. Returns the bytes sent."""
        from actors.kv_transfer.transports.payload import (
            join_layers,  # with torch, in the replica only
        )

        index = 0
        num_bytes = 0
        while (piece := await self._feed.next(index)) is not None:
            if piece.copies is None:
                kv = await self._read_kv(piece.span)
            else:
                kv = piece.copies[0] if piece.num_ranges == 1 else join_layers(piece.copies)
            await transfer.send(piece.span.first_layer, piece.span.start, kv)
            num_bytes += kv.nbytes
            index += piece.num_ranges
        return num_bytes

    async def _read_kv(self, span: KVRange) -> Any:
        """Copy a range out of its row, between two steps of the engine."""
        sequence_id = self._state.sequence_id
        return await self._replica.engine.call(lambda core: core.read_kv(sequence_id, span))

    async def _reserve(self) -> OutgoingTransfer:
        """Find a replica with room and reserve there; wait in line when there is none."""
        line, priority = self._replica.line, self._state.priority
        if line.is_free_for(priority):
            transfer = await self._try_once()
            if transfer is not None:
                return transfer
        async with line.turn(priority):
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
        depth_class = replica.spec.engine.depth_class
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
                transfer = await replica.sender.reserve(peer, state, depth_class)
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
            replica.has_place(state.sequence_id)
            moved = EngineOutput(
                state.sequence_id, state.epoch, len(state.output_ids), moved_to=peer
            )
            # Before the first token, which is on its way, this is not worth a reply of its own.
            replica.emit([(state.ingress_id, moved)], wakes=self._prompt_done_s > 0.0)
            return transfer

    async def _place(self, exclude: tuple[str, ...]) -> str | None:
        """Ask the scheduler; without one, choose by the last known loads. None: no room."""
        request = PlaceRequest(
            sequence_id=self._state.sequence_id,
            depth_class=self._replica.spec.engine.depth_class,
            num_tokens=self._state.num_tokens,
            max_total_tokens=self._state.max_total_tokens,
            exclude=exclude,
            prediction=remaining_of(self._state),
            priority=self._state.priority,
            waited_s=self._replica.clock.now_s() - self._placed_from_s,
            source=self._replica.name,
            started_s=self._started_s,
        )
        if self._replica.is_scheduler_away:  # as of the last look; asking would take its time
            return self._replica.place_without_scheduler(request)
        scheduler = scheduler_name(self._replica.config.name)
        try:
            try:
                name: str = await self._replica.calls.call(
                    scheduler, "place_now", request, timeout_s=PLACE_TIMEOUT_S
                )
            except Overloaded:
                if exclude:
                    return None
                # Now waiting pays, and must not hold up those who travel in the same call.
                name = await call(scheduler, "place", request, timeout_s=PLACE_TIMEOUT_S)
            return name
        except (Overloaded, Unavailable):
            return None
        except ReplicaError as exc:
            logger.info("no scheduler (%s); placing by the last known loads", exc)
            return self._replica.place_without_scheduler(request)

    def _note_failure(self, peer: str, error: ReplicaError) -> None:
        """Count a failed hand-off; raise when it was one too many."""
        self._failed_on.append(peer)
        self._replica.metrics.handoff_failed(error.code)
        logger.warning(
            "hand-off %d of %s to %s failed: %s",
            len(self._failed_on),
            self._state.sequence_id,
            peer,
            error,
            extra={"request_id": self._state.request_id, "peer": peer, "code": error.code},
        )
        if isinstance(error, ReplicaDied):
            self._replica.report_death(peer)
        if len(self._failed_on) >= MAX_FAILURES:
            raise MigrationFailed(
                f"{len(self._failed_on)} hand-offs failed, the last on {peer}: {error.message}"
            ) from error
