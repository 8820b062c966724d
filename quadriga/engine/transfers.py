"""Small arrays on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy without waiting for the device; on CPUs the tensor shares the array's memory.

    From pinned memory: from pageable memory the driver may wait for the stream first. torch keeps
    the pinned block until the copy is over.
    """
    here = torch.from_numpy(values)
    if device.type == "cpu":
        return here
    return here.pin_memory().to(device, non_blocking=True)


def copy_over(values: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Copy as `to_device` does, into a contiguous tensor that exists."""
    here = torch.from_numpy(values)
    target.copy_(here if target.device.type == "cpu" else here.pin_memory(), non_blocking=True)


def index_on(device: torch.device, places: Sequence[int]) -> torch.Tensor:
    """Indices of a tensor of the device, int64 [n]: a list in its place makes the host wait."""
    return to_device(np.array(places, dtype=np.int64), device)
