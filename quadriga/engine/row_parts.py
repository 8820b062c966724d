"""What there is to one row of the native engine while it is not in its row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quadriga.core.kv import KVExtent
from quadriga.engine.early_exit.skipped_kv import SuspendedSkips
from quadriga.engine.host_tensor import HostTensor


@dataclass(frozen=True, slots=True)
class RowRest:
    """What a row holds beside its KV, in host memory.

    Attributes:
        position, hidden: Of the newest token that was run, which may wait at an exit; −1 where
            none was run here.
    """

    position: int
    hidden: HostTensor
    skipped: SuspendedSkips | None


@dataclass(frozen=True, slots=True)
class SuspendedRow:
    """A row in host memory.

    Attributes:
        extents: What KV there is.
        kv: Of each extent: [layers, 2, num_kv_heads, tokens, head_dim].
        rest: What there is beside it.
    """

    extents: list[KVExtent]
    kv: list[torch.Tensor]
    rest: RowRest

    def read(self, first_layer: int, num_layers: int, start: int, stop: int) -> torch.Tensor:
        """See `Suspended.read`."""
        last = first_layer + num_layers
        pieces = [
            kv[
                max(first_layer, e.first_layer) - e.first_layer : last - e.first_layer,
                ...,
                start:stop,
                :,
            ]
            for e, kv in zip(self.extents, self.kv, strict=True)
            if e.first_layer < last and e.stop_layer > first_layer
        ]
        return torch.cat(pieces)
