"""Copies the KV of a sequence piece by piece while it decodes, until its cutover."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from quadriga.clock import Clock
from quadriga.errors import MigrationFailed
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.transfer.sequence_export import (
    MAX_HOLDS,
    MAX_REMAINDER_TOKENS,
    PreCopy,
    SequenceReading,
    SequenceRemainder,
    StepPhase,
    cutover_delay_s,
)

READ_SHARE = 0.08
"""Of a step's time: what one reading of KV may cost the others."""
MIN_READ_S = 0.0005
FIRST_READ_CELLS = 512
MAX_READ_CELLS = 1 << 20
MAX_CARRIED_BYTES = 1 << 16
"""Of the last KV: no more than this goes with the commit, which saves a round trip; Ray carries
small calls in one message."""
COMMIT_S = 0.001
"""What a commit takes beyond an empty call's time."""


class Ended(MigrationFailed):
    """The sequence is over, or was cancelled, before it could move."""

    default_code = "ended"


class Destination(Protocol):
    """What the copying asks of a transfer; see `OutgoingTransfer`."""

    async def send(self, first_layer: int, start: int, kv: Any, *, deadline_s: float) -> None:
        """Copy KV to the destination. Raises: KVTransportError."""

    def carry(self, first_layer: int, start: int, kv: Any) -> None:
        """Send KV with the commit instead of before it."""

    async def step_phase(self) -> StepPhase:
        """Where the destination is in its steps. Raises: ReplicaError."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A reading, how long it took, and what a step takes.

    Attributes:
        is_paused: Of a sequence in host memory, which takes part in no step.
    """

    reading: SequenceReading
    took_s: float = 0.0
    step_s: float = 0.0
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class _Aim:
    """Where the destination was in its steps at `at_s`, and how far away it is."""

    phase: StepPhase
    at_s: float
    lead_s: float


class Copy:
    """The KV of one sequence on its way.

    Args:
        on_loop: Runs a command on the engine's thread, between two steps.
        depth: Layers that go.

    Attributes:
        rounds: Readings so far, the last one, in the cutover, included.
        bytes_sent, sending_s: Of KV, and how long it took.
    """

    def __init__(
        self,
        sequence_id: str,
        transfer: Destination,
        on_loop: Callable[[Callable[[DecodeLoop], Any]], Awaitable[Any]],
        clock: Clock,
        *,
        depth: int,
    ) -> None:
        self.rounds = 0
        self.bytes_sent = 0
        self.sending_s = 0.0
        self._sequence_id = sequence_id
        self._transfer = transfer
        self._on_loop = on_loop
        self._clock = clock
        self._precopy = PreCopy(depth)
        self._depth = depth
        self._sending_s = 0.0
        self._cell_bytes = 0.0

    async def until_cutover(self, end_s: float) -> SequenceRemainder:
        """Send what there is, in pieces whose reading costs other sequences little time.

        Args:
            end_s: By the clock, when all of it must be there.

        Raises:
            Ended: The sequence is over.
            QuadrigaError: It cannot be sent; its cutover may have begun nevertheless.
        """
        cells, num_holds = FIRST_READ_CELLS, 0
        while True:
            self.rounds += 1
            piece: _Piece = await self._on_loop(partial(self._read, cells))
            if not piece.reading.parts:
                is_free = piece.is_paused or num_holds >= MAX_HOLDS
                aim = None if is_free else await self._aim()
                found: SequenceRemainder | _Piece | None = await self._on_loop(
                    partial(self._begin_cutover, aim)
                )
                if isinstance(found, SequenceRemainder):
                    return found
                if found is None:
                    num_holds += 1
                    continue
                piece = found
            await self._send(piece.reading, end_s)
            if piece.took_s > 0.0:
                budget_s = max(MIN_READ_S, READ_SHARE * piece.step_s)
                fitting = int(piece.reading.num_cells * budget_s / piece.took_s)
                cells = min(MAX_READ_CELLS, fitting)

    async def _send(self, reading: SequenceReading, end_s: float) -> None:
        """Send a reading's parts, in order. Raises: KVTransportError."""
        began_s = self._clock.now_s()
        for span, kv in reading.parts:
            left_s = end_s - self._clock.now_s()
            await self._transfer.send(span.first_layer, span.start, kv, deadline_s=left_s)
            self.bytes_sent += kv.nbytes
        self._sending_s = self._clock.now_s() - began_s
        self.sending_s += self._sending_s
        if reading.parts:
            self._cell_bytes = sum(kv.nbytes for _, kv in reading.parts) / reading.num_cells

    async def send_last(self, reading: SequenceReading, end_s: float) -> None:
        """Have the commit carry the remainder; send it, where it is too large for that.

        Raises: KVTransportError.
        """
        if sum(kv.nbytes for _, kv in reading.parts) > MAX_CARRIED_BYTES:
            await self._send(reading, end_s)
            return
        for span, kv in reading.parts:
            self._transfer.carry(span.first_layer, span.start, kv)
            self.bytes_sent += kv.nbytes

    async def _aim(self) -> _Aim:
        """Learn when the destination's next step begins. Raises: ReplicaError."""
        asked_s = self._clock.now_s()
        phase = await self._transfer.step_phase()
        now_s = self._clock.now_s()
        lead_s = (now_s - asked_s) + COMMIT_S
        if self._cell_bytes * self._depth * MAX_REMAINDER_TOKENS > MAX_CARRIED_BYTES:
            lead_s += self._sending_s
        return _Aim(phase, (asked_s + now_s) / 2, lead_s)

    # On the engine's thread.

    def _read(self, max_cells: int, loop: DecodeLoop) -> _Piece:
        began_s = self._clock.now_s()
        reading = loop.export.read(self._sequence_id, self._precopy, max_cells)
        if reading is None:
            raise Ended("it was over before it could move")
        took_s = self._clock.now_s() - began_s
        return _Piece(reading, took_s, loop.step_time_s, loop.is_paused(self._sequence_id))

    def _begin_cutover(
        self, aim: _Aim | None, loop: DecodeLoop
    ) -> SequenceRemainder | _Piece | None:
        """None: not now, the next step was held back for a better moment."""
        export = loop.export
        if export.held(self._sequence_id) is None:
            raise Ended("it was over before it could move")
        if aim is not None:
            age_s = self._clock.now_s() - aim.at_s
            held_s = cutover_delay_s(aim.phase, age_s=age_s, lead_s=aim.lead_s)
            if held_s > 0.0:
                time.sleep(held_s)
                return None
        found = export.begin_cutover(self._sequence_id, self._precopy)
        assert found is not None
        return found if isinstance(found, SequenceRemainder) else _Piece(found)
