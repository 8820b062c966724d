"""Tensors at rest in host memory, in a form that travels cheaply between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


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
