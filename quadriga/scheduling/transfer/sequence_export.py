"""Sequences that leave a decode replica alive: read while they run, then moving, then gone.

    running ──begin_cutover──▶ moving ──leave──▶ gone: the destination owns it
       ▲                         │
       └──────abort_cutover──────┘   the destination never will

A moving sequence keeps its row and slot, and nothing is emitted for it. It does not expire: its
owner is being settled. A paused one leaves as well, out of host memory: it is paused before and
after instead of running, and neither has nor gets a row here. It may be paused, or come back, while
it is read: its KV is the same.

To a replica with fewer layers only their KV goes; `ExitParams.depth_bounds` says which sequences
may.

KV that is there does not change any more, so nothing is sent twice (`PreCopy`). Between two steps
of the source a piece is taken, small enough not to be felt by others; the sequence adds a position
meanwhile, or, when its token goes deep, the deep layers of all its predecessors. When little is
missing, it stops and the remainder goes.

The moment at which it stops is chosen so that the commit catches the destination's next step
(`cutover_delay_s`). A token comes every step, at the source's step borders; the next one after the
move comes a whole step after the first border of the destination that the commit reaches. So the
gap is one step and the time from border to border: less than two steps, unless the commit just
misses a border. Where it would, or would come long before one, the source holds its own next step
back for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quadriga.core.kv import KVExtent, KVSpan, ResumePoint
from quadriga.core.request import SequenceState
from quadriga.errors import InvariantViolation, MigrationFailed
from quadriga.scheduling.decode_batch import AT_EXIT, MOVING, PAUSED, RUNNING, DecodeBatch
from quadriga.scheduling.sequence import NO_ROW, RunningSequence

MAX_REMAINDER_TOKENS = 4
"""Positions per layer that may be left for the cutover."""
MIN_PIECE_TOKENS = 16
"""Positions of all layers in a piece, at least: many more than a step adds, so that it ends."""


class PreCopy:
    """What the source of one transfer has taken of a sequence's KV.

    Args:
        depth: Layers that go; the destination has no more. None for all there are.

    Attributes:
        num_cells: (layer, position) pairs taken so far.
        begun_at: `DecodeBatch.num_depth_changes` at the first piece.
    """

    def __init__(self, depth: int | None = None) -> None:
        self.num_cells = 0
        self.depth = depth
        self.begun_at: int | None = None
        self._sent: list[int] = []  # per layer, positions taken

    def cut(self, extents: Sequence[KVExtent]) -> list[KVExtent]:
        """The extents, as far as their layers go to the destination."""
        if self.depth is None:
            return list(extents)
        return [
            replace(extent, stop_layer=min(extent.stop_layer, self.depth))
            for extent in extents
            if extent.first_layer < self.depth
        ]

    def missing(self, extents: Sequence[KVExtent]) -> list[KVSpan]:
        """All that was not taken yet; neighbouring layers that lack the same go together.

        Raises:
            InvariantViolation: KV that was taken is not there any more.
            MigrationFailed: Layers that should go are not there any more.
        """
        extents = self.cut(extents)
        num_layers = extents[-1].stop_layer
        if not self._sent:
            self._sent = [0] * num_layers
        if num_layers != len(self._sent):
            raise MigrationFailed(
                f"{len(self._sent)} layers were to go, and there are {num_layers} now",
                code="depth_changed",
            )
        spans: list[KVSpan] = []
        for extent in extents:
            for layer in range(extent.first_layer, extent.stop_layer):
                sent = self._sent[layer]
                if extent.num_tokens < sent:
                    raise InvariantViolation(f"of {extent} {sent} positions were sent already")
                if extent.num_tokens == sent:
                    continue
                first_layer = layer
                if spans and (spans[-1].stop_layer, spans[-1].start, spans[-1].stop) == (
                    layer,
                    sent,
                    extent.num_tokens,
                ):
                    first_layer = spans.pop().first_layer
                spans.append(KVSpan(first_layer, layer + 1, sent, extent.num_tokens))
        return spans

    def is_ready(self, extents: Sequence[KVExtent]) -> bool:
        """Whether so little is missing that the sequence may stand still while it is sent."""
        return all(s.stop - s.start <= MAX_REMAINDER_TOKENS for s in self.missing(extents))

    def take(self, extents: Sequence[KVExtent], max_cells: int | None = None) -> list[KVSpan]:
        """The next piece, which counts as sent from now on; empty when nothing is missing.

        Args:
            extents: What there is now.
            max_cells: (layer, position) pairs, about; never less than `MIN_PIECE_TOKENS` of all
                layers. None takes all.
        """
        spans = self.missing(extents)
        if max_cells is not None:
            left = max(max_cells, MIN_PIECE_TOKENS * len(self._sent))
            piece = []
            for span in spans:
                stop = min(span.stop, span.start + left // span.num_layers)
                if stop > span.start:
                    piece.append(KVSpan(span.first_layer, span.stop_layer, span.start, stop))
                    left -= piece[-1].num_cells
            spans = piece
        for span in spans:
            self.num_cells += span.num_cells
            for layer in range(span.first_layer, span.stop_layer):
                self._sent[layer] = span.stop
        return spans


MAX_HOLD_SHARE = 0.08
"""Of a step: how long the source's step may be held back at once; its other sequences wait too."""
MAX_HOLDS = 8
MARGIN_SHARE = 0.1
"""Of a step: how far ahead of the destination's border, or behind it, is safe."""
MAX_WAIT_SHARE = 0.4
"""Of a step: how long the commit may wait for the border, where a hold can change it."""


@dataclass(frozen=True, slots=True)
class StepPhase:
    """Where a replica is in its steps.

    Attributes:
        left_s: Until the step under way should end.
        step_s: What a step takes; 0 where nothing runs.
    """

    left_s: float
    step_s: float


def cutover_delay_s(phase: StepPhase, *, age_s: float, lead_s: float) -> float:
    """Return how long to hold the source's next step back; 0 is to come to rest now.

    Args:
        phase: Of the destination, `age_s` ago.
        lead_s: From rest to the commit's arrival.
    """
    step_s = phase.step_s
    margin_s = MARGIN_SHARE * step_s
    if step_s <= 0.0 or lead_s + 2 * margin_s >= step_s:
        return 0.0  # steps so short that there is nothing to catch
    until_border_s = (phase.left_s - age_s) % step_s
    wait_s = until_border_s - (lead_s + margin_s)
    too_long_s = wait_s - MAX_WAIT_SHARE * step_s if wait_s >= 0.0 else until_border_s + margin_s
    return min(max(0.0, too_long_s), MAX_HOLD_SHARE * step_s)


Read = Callable[[int, int, int, int], Any]
"""`ModelRunner.read_kv` of one row."""


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


class SequenceExport:
    """The ways out of a decode replica, to another one."""

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch

    def held(self, sequence_id: str) -> tuple[SequenceState, int] | None:
        """The live state of a sequence that decodes here, or is paused; None for all others.

        Returns:
            With it, the layers of its KV; of one that was paused before a change of depth, those
            of then.
        """
        sequence = self._batch.find(sequence_id, RUNNING, AT_EXIT, PAUSED)
        if sequence is None:
            return None
        if sequence.status is PAUSED:
            return sequence.state, sequence.suspended.extents[-1].stop_layer
        return sequence.state, self._batch.runner.num_layers

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
        sent = books.cut(extents)
        waited_at = sequence.next_segment - 1 if sequence.next_segment else None
        if waited_at is not None and extents[waited_at].stop_layer > sent[-1].stop_layer:
            waited_at = None  # its token is run again: what it was waiting behind does not go
        return SequenceRemainder(
            state=sequence.state.copy(),
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
            batch, deadline_unix_s = self._batch, sequence.state.deadline_unix_s
            batch.num_paused += 1
            batch.first_deadline_unix_s = min(batch.first_deadline_unix_s, deadline_unix_s)
            batch.change(sequence, PAUSED)
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
                read(span.first_layer, span.stop_layer - span.first_layer, span.start, span.stop),
            )
            for span in books.take(extents, max_cells)
        ]
    )
