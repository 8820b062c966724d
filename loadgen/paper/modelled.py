"""Real tokens in modelled time: what rebatching would do on a device that is not here.

The passes are really run, for their tokens and confidences; the clock moves by a cost model.
Figures taken this way are figures of the model, and say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quadriga.clock import ManualClock
from quadriga.engine.runner import NativeRunner
from quadriga.interfaces import LayersDone, PrefillChunk
from quadriga.types import KVExtent, SampledToken, SequenceState


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Time of a pass over a share of the model's layers: `share · (base_s + per_row_s · b)`.

    Attributes:
        head_s, head_row_s: Of a head: fixed, and per row.
        source: Where the shape comes from.
    """

    name: str
    base_s: float
    per_row_s: float
    head_s: float
    head_row_s: float
    source: str

    def pass_s(self, share: float, rows: int) -> float:
        """Seconds for `rows` through this share of the layers and one head."""
        layers_s = share * (self.base_s + self.per_row_s * rows)
        return layers_s + self.head_s + self.head_row_s * rows


WEIGHT_BOUND = DeviceModel(
    name="modelled weight-bound GPU",
    base_s=15e-3,
    per_row_s=0.05e-3,
    head_s=0.3e-3,
    head_row_s=0.002e-3,
    source="15 ms of weights to read at 7B in bf16 and 1 TB/s, .05 ms a row of KV and attention, "
    "a head of 2 % of the weights",
)


class ModelledRunner:
    """A runner whose passes take modelled time."""

    def __init__(self, native: NativeRunner, clock: ManualClock, device: DeviceModel) -> None:
        self._native, self._clock, self._device = native, clock, device

    @property
    def num_layers(self) -> int:
        return self._native.num_layers

    @property
    def segment_ends(self) -> tuple[int, ...]:
        return self._native.segment_ends

    @property
    def num_rows(self) -> int:
        return self._native.num_rows

    @property
    def row_capacity_tokens(self) -> int:
        return self._native.row_capacity_tokens

    def attach(self, row: int, state: SequenceState) -> None:
        """See `ModelRunner.attach`."""
        self._native.attach(row, state)

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`."""
        self._native.detach(row)

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        """See `ModelRunner.prefill`; takes no time, as on a replica of its own."""
        return self._native.prefill(chunks, on_layers)

    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.decode`."""
        self._clock.advance(self._device.pass_s(1.0, len(rows)))
        return self._native.decode(rows)

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """See `ModelRunner.advance`."""
        ends = self.segment_ends
        layers = ends[stop - 1] - (ends[first - 1] if first else 0)
        self._clock.advance(self._device.pass_s(layers / ends[-1], len(rows)))
        return self._native.advance(rows, first, stop)

    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.emit`."""
        return self._native.emit(rows)

    @property
    def num_filled(self) -> int:
        """See `ModelRunner.num_filled`."""
        return self._native.num_filled

    def suspend(self, row: int) -> Any:
        """See `ModelRunner.suspend`."""
        return self._native.suspend(row)

    def restore(self, row: int, state: SequenceState, suspended: Any) -> None:
        """See `ModelRunner.restore`."""
        self._native.restore(row, state, suspended)

    def extents(self, row: int) -> list[KVExtent]:
        """See `ModelRunner.extents`."""
        return self._native.extents(row)

    def read_rest(self, row: int) -> Any:
        """See `ModelRunner.read_rest`."""
        return self._native.read_rest(row)

    def resume(self, row: int, state: SequenceState, rest: Any, depth: int | None = None) -> None:
        """See `ModelRunner.resume`."""
        self._native.resume(row, state, rest, depth)

    def read_kv(self, row: int, first_layer: int, num_layers: int, start: int, stop: int) -> Any:
        """See `ModelRunner.read_kv`."""
        return self._native.read_kv(row, first_layer, num_layers, start, stop)

    def write_kv(self, row: int, first_layer: int, start: int, kv: Any) -> None:
        """See `ModelRunner.write_kv`."""
        self._native.write_kv(row, first_layer, start, kv)
