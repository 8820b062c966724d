"""Sequences that leave a decode replica alive: read while they run, then at rest, then gone.

    running ──freeze──▶ at rest ──release──▶ gone: the destination owns it
       ▲                   │
       └──────thaw─────────┘   the destination never will

At rest a sequence keeps its row and slot, and nothing is emitted for it. It does not expire there:
who owns it is being settled. One that is paused leaves as well, out of host memory: it is paused
before and after instead of running, and neither has nor gets a row here. It may be paused, or come
back, while it is read: its KV is the same.

To a replica with fewer layers only their KV goes; see `depth_bounds` for who may.
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
from quadriga.interfaces import ModelRunner, Suspended
from quadriga.scheduling.batch_state import BatchState, Place, RunningRow
from quadriga.scheduling.precopy import KVSpan, PreCopy
from quadriga.scheduling.preemption import PausedSequence, Preemption
from quadriga.scheduling.slots import SlotTable

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
    """A sequence at rest, and all that was still to be sent of it.

    Attributes:
        state: A copy that nobody changes.
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
    """The sequences of a decode replica that are on their way to another one.

    Args:
        enter: Takes a sequence back into a place.

    Attributes:
        at_rest: By sequence id.
        num_depths: Changes of the depth that is loaded, so far; what was begun before one ends.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        slots: SlotTable,
        places: BatchState,
        preemption: Preemption,
        enter: Callable[[int, SequenceState, Place], None],
    ) -> None:
        self.at_rest: dict[str, RunningRow | PausedSequence] = {}
        self.num_depths = 0
        self._runner = runner
        self._slots = slots
        self._places = places
        self._preemption = preemption
        self._enter = enter

    def held(self, sequence_id: str) -> HeldSequence | None:
        """A sequence that runs in a row here, or is paused; None for all others."""
        row = self._places.rows.get(sequence_id)
        if row is not None:
            return HeldSequence(self._places.running[row].state, self._runner.num_layers, False)
        paused = self._preemption.paused.get(sequence_id)
        if paused is None:
            return None
        suspended: Suspended = paused.suspended
        return HeldSequence(paused.state, suspended.extents[-1].stop_layer, True)

    def state(self, sequence_id: str) -> SequenceState | None:
        """The live state of a sequence that runs in a row here, or is paused; else None."""
        held = self.held(sequence_id)
        return None if held is None else held.state

    def read(
        self, sequence_id: str, books: PreCopy, max_cells: int | None
    ) -> SequenceReading | None:
        """Copy the next piece of a sequence's KV; empty when it may be frozen.

        Returns:
            None when it is not here (any more).

        Raises:
            MigrationFailed: The depth that is loaded has changed since its first piece.
        """
        found = self._find(sequence_id, books)
        if found is None:
            return None
        extents, read = found
        if books.is_ready(extents):
            return SequenceReading([])
        return _copy(books, extents, max_cells, read)

    def freeze(
        self, sequence_id: str, books: PreCopy
    ) -> SequenceRemainder | SequenceReading | None:
        """Let a sequence rest where it is, and copy all that was not sent of it.

        Returns:
            A piece instead, and the sequence runs on, where more is missing than may be left for
            now: since the last reading its token went deep. None when it is not here.

        Raises:
            MigrationFailed: As `read`.
        """
        found = self._find(sequence_id, books)
        if found is None:
            return None
        extents, read = found
        if not books.is_ready(extents):
            return _copy(books, extents, 0, read)
        resting: RunningRow | PausedSequence
        row = self._places.rows.get(sequence_id)
        if row is not None:
            resting = running = self._places.lift(row)
            waited_at = self._places.exit_of(running.place)
            rest = self._runner.read_rest(row)
        else:
            resting = paused = self._preemption.paused.pop(sequence_id)
            waited_at, rest = paused.waited_at, paused.suspended.rest
        self.at_rest[sequence_id] = resting
        state, sent = resting.state, books.cut(extents)
        if waited_at is not None and extents[waited_at].stop_layer > sent[-1].stop_layer:
            waited_at = None  # its token is run again: what it was waiting behind does not go
        return SequenceRemainder(
            state=replace(
                state, output_ids=list(state.output_ids), exit_layers=list(state.exit_layers)
            ),
            reading=_copy(books, extents, None, read),
            resume=ResumePoint(extents=tuple(sent), waited_at=waited_at, rest=rest),
        )

    def thaw(self, sequence_id: str, epoch: int | None = None) -> bool:
        """Let a sequence go on where it was; False when it is not here any more.

        Args:
            epoch: Its new one, where another replica may have spoken for it meanwhile.
        """
        resting = self.at_rest.pop(sequence_id, None)
        if resting is None:
            return False
        if epoch is not None:
            resting.state.epoch = epoch
        if isinstance(resting, RunningRow):
            self._enter(resting.row, resting.state, resting.place)
        else:
            self._preemption.paused[sequence_id] = resting
        return True

    def release(self, sequence_id: str) -> SequenceState | None:
        """Let go of a sequence at rest; returns its state, None where it is not at rest."""
        resting = self.at_rest.pop(sequence_id, None)
        if resting is None:
            return None
        if isinstance(resting, RunningRow):
            self._slots.release(sequence_id)
            self._runner.detach(resting.row)
        return resting.state

    def _find(self, sequence_id: str, books: PreCopy) -> tuple[Sequence[KVExtent], Read] | None:
        """What KV a sequence has, and how it is read. Raises: MigrationFailed."""
        row = self._places.rows.get(sequence_id)
        paused = self._preemption.paused.get(sequence_id)
        if row is None and paused is None:
            return None
        if books.begun_at is None:
            books.begun_at = self.num_depths
        if books.begun_at != self.num_depths:
            raise MigrationFailed(
                "layers were loaded or let go while it was copied", code="depth_changed"
            )
        if row is not None:
            return self._runner.extents(row), partial(self._runner.read_kv, row)
        assert paused is not None
        suspended: Suspended = paused.suspended
        return suspended.extents, suspended.read


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
