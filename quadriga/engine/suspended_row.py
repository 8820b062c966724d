"""A row of the native engine outside its runner: in host memory, or on its way to another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quadriga.core.kv import KVExtent
from quadriga.engine.kv_cache import Ints


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor's bytes with what is needed to read them; pickles ten times faster than a tensor.

    Attributes:
        dtype: torch's name, as "bfloat16", which numpy does not know.
    """

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostTensor:
        """Copy a tensor of any device."""
        host = tensor.detach().to("cpu", copy=True).contiguous()
        data: npt.NDArray[np.uint8] = host.reshape(-1).view(torch.uint8).numpy()
        return cls(data, str(host.dtype).removeprefix("torch."), tuple(host.shape))

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The tensor on a device; on CPUs it may share this one's memory: read it only."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.data.size:  # an empty tensor cannot be viewed as another type
            return torch.empty(self.shape, dtype=dtype, device=device)
        data: Any = self.data if self.data.flags.writeable else self.data.copy()
        return torch.from_numpy(data).view(dtype).reshape(self.shape).to(device)


@dataclass(frozen=True, slots=True)
class SuspendedSkips:
    """Copy of one row of a `SkippedKVStore`; `ends` are the segments of the runner it was in."""

    ends: tuple[int, ...]
    filled: Ints
    base: int
    depths: npt.NDArray[np.uint8]
    states: HostTensor | None


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
