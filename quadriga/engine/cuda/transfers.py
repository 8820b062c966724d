"""Small arrays on their way to a device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy without waiting for the device.

    From pinned memory: from pageable memory the driver may wait for the stream first. torch keeps
    the pinned block until the copy is over.
    """
    here = torch.from_numpy(values)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)
