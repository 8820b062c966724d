"""Choice of the number type of matrix products, by a measurement of a few milliseconds."""

import time

import torch


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 where its products are faster than fp32 ones, else fp32.

    Some CPUs have bf16 instructions and run it three times faster; others emulate it, far slower.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    seconds = {dtype: _product_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return min(seconds, key=seconds.__getitem__)


def _product_seconds(dtype: torch.dtype) -> float:
    left, right = torch.ones(2048, 320, dtype=dtype), torch.ones(320, 896, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return best
