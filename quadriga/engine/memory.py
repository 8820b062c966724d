"""Memory the engine reads at every step: anonymous maps, zeroed, committed by the first touch.

Weights and KV rows are read end to end at every step. On 4 KiB pages the page walks, nested ones
in a virtual machine, cost as much as the reading; so big maps ask for huge pages where the system
offers them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Iterator

import torch

from quadriga.errors import DeviceMemoryExhausted

HUGE_PAGE_BYTES = 2 << 20
_SLAB_BYTES = 64 << 20
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Python names it from 3.13 on."""
ALIGNMENT = 128


def reserve(num_bytes: int, *, huge: bool) -> tuple[mmap.mmap, torch.Tensor]:
    """Map zeroed memory that costs nothing until it is touched.

    Args:
        huge: Commit it in huge pages: faster to read, coarser to commit.

    Returns:
        The map, and all of it as uint8 [num_bytes]. The tensor keeps the map alive.
    """
    slack = HUGE_PAGE_BYTES if huge else 0
    # Python's default, a shared map, has no huge pages and keeps what was released.
    # KV rows are mapped at full length, which may be more than there is, and filled as far as used.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    buffer = mmap.mmap(-1, max(1, num_bytes) + slack, flags=flags)
    view = torch.frombuffer(buffer, dtype=torch.uint8)
    if not huge:
        return buffer, view[:num_bytes]
    offset = -view.data_ptr() % HUGE_PAGE_BYTES
    whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, nothing else
            if whole:
                buffer.madvise(mmap.MADV_HUGEPAGE, offset, whole)
            # What is left over would commit a whole huge page.
            buffer.madvise(mmap.MADV_NOHUGEPAGE, offset + whole)
    return buffer, view[offset : offset + num_bytes]


def give_back(buffer: mmap.mmap, begin: int, end: int) -> None:
    """Give the whole pages among bytes [begin, end) of a map back to the system."""
    begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    end = end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        buffer.madvise(mmap.MADV_DONTNEED, begin, end - begin)


@contextlib.contextmanager
def passes_of(device: torch.device) -> Iterator[None]:
    """Around a pass, which may lack the device's memory.

    Raises: DeviceMemoryExhausted: It did; what nobody uses is given back to the device.
    """
    failure = None
    try:
        yield
    except torch.OutOfMemoryError as exc:
        failure = str(exc).partition("\n")[0]
        exc.__traceback__ = None  # its frames hold what the pass had computed so far
    if failure is not None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise DeviceMemoryExhausted(
            f"a pass needs more memory than the device has free: {failure}; lower "
            "decode.max_slots, prefill.chunk_tokens or engine.gpu_memory_share"
        )


class Arena:
    """Hands out tensors from a few large maps, so that small tensors share huge pages.

    A map is freed with the last of its tensors.

    Args:
        slab_bytes: Size of a map.
    """

    is_filled = False
    """Tensors come empty; see `SharedArena`."""

    def __init__(self, slab_bytes: int = _SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if padded > self._free.numel():
            slab = max(padded, self._slab_bytes)
            _, self._free = reserve(slab, huge=slab >= HUGE_PAGE_BYTES // 2)
        taken, self._free = self._free[:num_bytes], self._free[padded:]
        return taken.view(dtype).view(shape)


class DeviceArena:
    """The same on a GPU, whose allocator needs no help."""

    is_filled = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of anything."""
        return torch.empty(shape, dtype=dtype, device=self._device)
