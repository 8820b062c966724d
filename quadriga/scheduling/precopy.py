"""What of a running sequence's KV was sent to another replica, and what is to be sent next.

KV that is there does not change any more, so nothing is sent twice. Between two steps of the source
a piece is taken, small enough not to be felt by others; the sequence adds a position meanwhile, or,
when its token goes deep, the deep layers of all its predecessors. When little is missing, it rests
and the remainder goes.

The moment at which it comes to rest is chosen so that the commit catches the destination's next
step. A token comes every step, at the source's step borders; the next one after the move comes a
whole step after the first border of the destination that the commit reaches. So the gap is one step
and the time from border to border: less than two steps, unless the commit just misses a border.
Where it would, or would come long before one, the source holds its own next step back for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quadriga.core.kv import KVExtent
from quadriga.errors import InvariantViolation, MigrationFailed

MAX_REMAINDER_TOKENS = 4
"""Positions per layer that may be left for the time in which the sequence rests."""
MIN_PIECE_TOKENS = 16
"""Positions of all layers in a piece, at least: many more than a step adds, so that it ends."""


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Positions [start, stop) of layers [first_layer, stop_layer)."""

    first_layer: int
    stop_layer: int
    start: int
    stop: int

    @property
    def num_cells(self) -> int:
        """(layer, position) pairs."""
        return (self.stop_layer - self.first_layer) * (self.stop - self.start)


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
        """Whether so little is missing that the sequence may rest while it is sent."""
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
                layers = span.stop_layer - span.first_layer
                stop = min(span.stop, span.start + left // layers)
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


def hold_s(phase: StepPhase, *, age_s: float, lead_s: float) -> float:
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
