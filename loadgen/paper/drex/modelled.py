"""Real tokens in modelled time: what rebatching would do on a device that is not here.

The passes are really run, for their tokens and confidences; the clock moves by a cost model, as a
`PacedRunner` that sleeps on a `ManualClock`.
Figures taken this way are figures of the model, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    def pass_s(self, share: float, rows: int, num_tokens: int = 0) -> float:
        """Seconds for `rows` through this share of the layers and a head; context is free."""
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
