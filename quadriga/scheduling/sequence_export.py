"""Sequences that leave a decode replica alive: read while they run, then moving, then gone.

    running ──begin_cutover──▶ moving ──leave──▶ gone: the destination owns it
       ▲                         │
       └──────abort_cutover──────┘   the destination never will

A moving sequence keeps its row and slot, and nothing is emitted for it. It does not expire: its
owner is being settled. A paused one leaves as well, out of host memory: it is paused before and
after instead of running, and neither has nor gets a row here. It may be paused, or come back, while
it is read: its KV is the same.

To a replica with fewer layers only their KV goes; see `depth_bounds` for which sequences may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quadriga.checkpoint.exits import ExitParams
from quadriga.core.kv import KVExtent, ResumePoint
from quadriga.core.request import SequenceState
from quadriga.errors import MigrationFailed
from quadriga.scheduling.decode_batch import AT_EXIT, MOVING, PAUSED, RUNNING, DecodeBatch
from quadriga.scheduling.precopy import KVSpan, PreCopy
from quadriga.scheduling.sequence import NO_ROW, RunningSequence

Read = Callable[[int, int, int, int], Any]
"""`ModelRunner.read_kv` of one row."""


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A sequence that is here and may leave.

    Attributes:
        state: The live one.
        depth: Layers of its KV; of one that was paused before a change of depth, those of then.
        is_paused: It is in host memory.
    """

    state: SequenceState
    depth: int
    is_paused: bool


@dataclass(frozen=True, slots=True)
class SequenceReading:
    """Copies of KV, taken between two steps.

    Attributes:
        parts: Where each is from, and the KV: [layers, 2, num_kv_heads, positions, head_dim].
    """

    parts: list[tuple[KVSpan, Any]]

    @property
    def num_cells(self) -> int:
        return sum(span.num_cells for span, _ in self.parts)


@dataclass(frozen=True, slots=True)
class SequenceRemainder:
    """A moving sequence, and all that was still to be sent of it.

    Attributes:
        state: A copy that does not change.
        resume: Where the destination goes on.
    """

    state: SequenceState
    reading: SequenceReading
    resume: ResumePoint


def depth_bounds(exits: ExitParams, held: int, *, deterministic: bool) -> tuple[int, int]:
    """Return how many layers a replica needs for a sequence to move there, and may have at most.

    A strict sequence goes where it can do at least what it can here; so its tokens are the same.
    A bounded one may lose layers, and leave early below its threshold where it is then, as if its
    replica had shrunk. Where answers must not depend on load it goes nowhere else, unless its own
    limit makes the difference void.

    Args:
        held: Layers of its KV.

    Returns:
        (least, most); most is 0 for no bound.
    """
    least = min(held, exits.max_depth or held)
    is_limited = 0 < exits.max_depth <= held
    if exits.policy == "strict":
        return least, 0
    if deterministic:
        return least, 0 if is_limited else held
    return 0, 0


class SequenceExport:
    """The ways out of a decode replica, to another one."""

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch

    def held(self, sequence_id: str) -> HeldSequence | None:
        """A sequence that decodes here, or is paused; None for all others."""
        sequence = self._batch.find(sequence_id, RUNNING, AT_EXIT, PAUSED)
        if sequence is None:
            return None
        is_paused = sequence.status is PAUSED
        depth = self._batch.runner.num_layers
        if is_paused:
            depth = sequence.suspended.extents[-1].stop_layer
        return HeldSequence(sequence.state, depth, is_paused)

    def state(self, sequence_id: str) -> SequenceState | None:
        """The live state of a sequence that decodes here, or is paused; else None."""
        sequence = self._batch.find(sequence_id, RUNNING, AT_EXIT, PAUSED)
        return None if sequence is None else sequence.state

    def read(
        self, sequence_id: str, books: PreCopy, max_cells: int | None
    ) -> SequenceReading | None:
        """Copy the next piece of a sequence's KV; empty when its cutover may begin.

        Returns:
            None when it is not here (any more).

        Raises:
            MigrationFailed: The depth that is loaded has changed since its first piece.
        """
        found = self._find(sequence_id, books)
        if found is None:
            return None
        _, extents, read = found
        if books.is_ready(extents):
            return SequenceReading([])
        return _copy(books, extents, max_cells, read)

    def begin_cutover(
        self, sequence_id: str, books: PreCopy
    ) -> SequenceRemainder | SequenceReading | None:
        """Stop a sequence where it is, and copy all that was not sent of it.

        Returns:
            A piece instead, and the sequence runs on, where more is missing than may be left for
            now: since the last reading its token went deep. None when it is not here.

        Raises:
            MigrationFailed: As `read`.
        """
        found = self._find(sequence_id, books)
        if found is None:
            return None
        sequence, extents, read = found
        if not books.is_ready(extents):
            return _copy(books, extents, 0, read)
        if sequence.status is PAUSED:
            rest = sequence.suspended.rest
            self._batch.num_paused -= 1
            self._batch.change(sequence, MOVING)
        else:
            rest = self._batch.runner.read_rest(sequence.row)
            self._batch.lift(sequence, MOVING)
        state, sent = sequence.state, books.cut(extents)
        waited_at = sequence.next_segment - 1 if sequence.next_segment else None
        if waited_at is not None and extents[waited_at].stop_layer > sent[-1].stop_layer:
            waited_at = None  # its token is run again: what it was waiting behind does not go
        return SequenceRemainder(
            state=replace(
                state, output_ids=list(state.output_ids), exit_layers=list(state.exit_layers)
            ),
            reading=_copy(books, extents, None, read),
            resume=ResumePoint(extents=tuple(sent), waited_at=waited_at, rest=rest),
        )

    def abort_cutover(self, sequence_id: str, epoch: int | None = None) -> bool:
        """Let a moving sequence go on where it was; False when it is not here any more.

        Args:
            epoch: Its new one, where another replica may have emitted for it meanwhile.
        """
        sequence = self._batch.find(sequence_id, MOVING)
        if sequence is None:
            return False
        if epoch is not None:
            sequence.state.epoch = epoch
        if sequence.row != NO_ROW:
            self._batch.enter(sequence)
        else:
            self._batch.num_paused += 1
            self._batch.change(sequence, PAUSED)
        return True

    def _find(
        self, sequence_id: str, books: PreCopy
    ) -> tuple[RunningSequence, Sequence[KVExtent], Read] | None:
        """A sequence, what KV it has, and how that is read. Raises: MigrationFailed."""
        batch = self._batch
        sequence = batch.find(sequence_id, RUNNING, AT_EXIT, PAUSED)
        if sequence is None:
            return None
        if books.begun_at is None:
            books.begun_at = batch.num_depth_changes
        if books.begun_at != batch.num_depth_changes:
            raise MigrationFailed(
                "layers were loaded or let go while it was copied", code="depth_changed"
            )
        if sequence.status is PAUSED:
            return sequence, sequence.suspended.extents, sequence.suspended.read
        runner, row = batch.runner, sequence.row
        return sequence, runner.extents(row), partial(runner.read_kv, row)


def _copy(
    books: PreCopy, extents: Sequence[KVExtent], max_cells: int | None, read: Read
) -> SequenceReading:
    return SequenceReading(
        [
            (
                span,
                read(
                    span.first_layer,
                    span.stop_layer - span.first_layer,
                    span.start,
                    span.stop,
                ),
            )
            for span in books.take(extents, max_cells)
        ]
    )
