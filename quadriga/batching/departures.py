"""Sequences that leave a decode replica alive: read while they run, then at rest, then gone.

    running ──freeze──▶ at rest ──release──▶ gone: the destination owns it
       ▲                   │
       └──────thaw─────────┘   the destination never will

At rest a sequence keeps its row and slot, and nothing is emitted for it. It does not expire there:
who owns it is being settled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quadriga.batching.places import Place, Places, Running
from quadriga.batching.precopy import KVSpan, PreCopy
from quadriga.interfaces import ModelRunner
from quadriga.types import KVExtent, ResumePoint, SequenceState


@dataclass(frozen=True, slots=True)
class Reading:
    """Copies of KV, taken between two steps.

    Attributes:
        parts: Where each is from, and the KV: [layers, 2, num_kv_heads, positions, head_dim].
    """

    parts: list[tuple[KVSpan, Any]]

    @property
    def num_cells(self) -> int:
        return sum(span.num_cells for span, _ in self.parts)


@dataclass(frozen=True, slots=True)
class Rest:
    """A sequence at rest, and all that was still to be sent of it.

    Attributes:
        state: A copy that nobody changes.
        resume: Where the destination goes on.
    """

    state: SequenceState
    reading: Reading
    resume: ResumePoint


class Departures:
    """The sequences of a decode replica that are on their way to another one.

    Args:
        enter: Takes a sequence back into a place.

    Attributes:
        at_rest: By sequence id.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        places: Places,
        enter: Callable[[int, SequenceState, Place], None],
    ) -> None:
        self.at_rest: dict[str, Running] = {}
        self._runner = runner
        self._places = places
        self._enter = enter

    def state(self, sequence_id: str) -> SequenceState | None:
        """The live state of a sequence that runs in a row here; None for all others."""
        row = self._places.rows.get(sequence_id)
        return None if row is None else self._places.running[row].state

    def read(self, sequence_id: str, books: PreCopy, max_cells: int | None) -> Reading | None:
        """Copy the next piece of a running sequence's KV; empty when it may be frozen.

        Returns:
            None when it does not run here (any more).
        """
        row = self._places.rows.get(sequence_id)
        if row is None:
            return None
        extents = self._runner.extents(row)
        if books.is_ready(extents):
            return Reading([])
        return self._read(row, books, extents, max_cells)

    def freeze(self, sequence_id: str, books: PreCopy) -> Rest | Reading | None:
        """Let a sequence rest in its row, and copy all that was not sent of it.

        Returns:
            A piece instead, and the sequence runs on, where more is missing than may be left for
            now: since the last reading its token went deep. None when it does not run here.
        """
        row = self._places.rows.get(sequence_id)
        if row is None:
            return None
        extents = self._runner.extents(row)
        if not books.is_ready(extents):
            return self._read(row, books, extents, 0)
        running = self._places.lift(row)
        self.at_rest[sequence_id] = running
        state = running.state
        return Rest(
            state=replace(
                state, output_ids=list(state.output_ids), exit_layers=list(state.exit_layers)
            ),
            reading=self._read(row, books, extents, None),
            resume=ResumePoint(
                extents=tuple(extents),
                waited_at=self._places.exit_of(running.place),
                rest=self._runner.read_rest(row),
            ),
        )

    def thaw(self, sequence_id: str, epoch: int | None = None) -> bool:
        """Let a sequence go on where it was; False when it is not here any more.

        Args:
            epoch: Its new one, where another replica may have spoken for it meanwhile.
        """
        running = self.at_rest.pop(sequence_id, None)
        if running is None:
            return False
        if epoch is not None:
            running.state.epoch = epoch
        self._enter(running.row, running.state, running.place)
        return True

    def _read(
        self, row: int, books: PreCopy, extents: list[KVExtent], max_cells: int | None
    ) -> Reading:
        return Reading(
            [
                (
                    span,
                    self._runner.read_kv(
                        row,
                        span.first_layer,
                        span.stop_layer - span.first_layer,
                        span.start,
                        span.stop,
                    ),
                )
                for span in books.take(extents, max_cells)
            ]
        )
