"""NCCL as CuPy gives it, and the GPU memory and streams around it: all that touches a device.

Checked against CuPy 14.2.0 with NCCL 2.32:

- `get_unique_id() -> bytes`, `NcclCommunicator(ndev, commId: bytes, rank)` (up to CuPy 13 both were
  tuples of ints, which are not portable between processors: 14 is required). The constructor waits
  for all ranks. Calls release Python's lock.
- `send(sendbuf, count, datatype, peer, stream)` and `recv` alike take addresses as ints; `abort()`,
  `check_async_error()`. A pair needs no group: each call is one transfer with one peer.
- A communicator that is collected without `abort()` calls ncclCommDestroy, which may wait for the
  peer: every path here aborts.
- `NcclError(status)` raises KeyError for statuses it has no name for.
- Aborting from another thread needs NCCL 2.19 (NVIDIA/nccl#992); this CuPy is made for 2.27.
- `NcclConfig` has no non-blocking mode, so a call that waits can only be left behind, or aborted.

Source: docs.cupy.dev, cupy.cuda.nccl.NcclCommunicator, cupy.cuda.Stream; docs.nvidia.com NCCL user
guide, "Error handling and communicator abort", "Point-to-point communication".
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from quadriga.errors import KVTransportError
from quadriga.kv_transport.channel import NO_ROUTE

SHARE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Set to 1, NCCL 2.30 and later take several ranks on one GPU; without it, none do."""
LIMITS = {"NCCL_MAX_CTAS": "4"}
"""Where they are not set: a transfer's kernels take no more of the GPU's processors from passes."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NcclEnd(Protocol):
    """`cupy.cuda.nccl.NcclCommunicator`, as far as it is used."""

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...

    def check_async_error(self) -> None: ...

    def abort(self) -> None: ...


class NcclLibrary:
    """`cupy.cuda.nccl` on one device.

    Args:
        module: `cupy.cuda.nccl`, or something like it.
    """

    def __init__(self, module: Any, device: CudaDevice) -> None:
        self._module = module
        self.device = device
        self.bytes_type: int = module.NCCL_UINT8

    def unique_id(self) -> bytes:
        """What two ranks need to find each other; this process must be rank 0."""
        uid: bytes = named(self._module.get_unique_id)
        return uid

    def pair(self, uid: bytes, rank: int) -> NcclEnd:
        """Wait for the other rank, for ever if it must be. Raises: RuntimeError."""
        end: NcclEnd = named(lambda: self._module.NcclCommunicator(2, uid, rank))
        return end

    def why_not(self, gpu: str) -> str | None:
        """Why no pair can be had with a process on that GPU; None when it can."""
        if gpu == self.device.gpu and os.environ.get(SHARE_VARIABLE) != "1":
            return (
                f"both are on GPU {gpu} and NCCL takes one rank a GPU (unless its version is 2.30 "
                f"or later and {SHARE_VARIABLE}=1)"
            )
        return None


def named(call: Callable[[], Any]) -> Any:
    """Call CuPy; statuses it has no name for become RuntimeErrors like the others."""
    try:
        return call()
    except KeyError as exc:
        raise RuntimeError(f"NCCL failed with status {exc.args[0]}") from None


def find_nccl() -> NcclLibrary:
    """NCCL on the current CUDA device.

    Raises:
        KVTransportError: Code "no_route": it cannot be used here, and why.
    """
    if not torch.cuda.is_available():
        raise KVTransportError("torch sees no GPU", code=NO_ROUTE)
    for name, most in LIMITS.items():
        os.environ.setdefault(name, most)  # read when a pair is made
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's about a missing NCCL; said below
            from cupy.cuda import nccl
    except ImportError as exc:
        raise KVTransportError(
            f"CuPy cannot be imported ({exc}); install cupy-cuda12x or cupy-cuda13x, as torch's "
            f"CUDA {torch.version.cuda} is",
            code=NO_ROUTE,
        ) from exc
    if not nccl.available:
        raise KVTransportError(
            "CuPy finds no NCCL; install nvidia-nccl-cu12 or nvidia-nccl-cu13, as CuPy is",
            code=NO_ROUTE,
        )
    version, wanted = int(nccl.get_version()), int(nccl.get_build_version())
    if version // 100 < wanted // 100:  # 22703 is 2.27.3
        raise KVTransportError(
            f"NCCL is version {version} and CuPy was made for {wanted}; install "
            "nvidia-nccl-cu12 or nvidia-nccl-cu13 as new as that",
            code=NO_ROUTE,
        )
    return NcclLibrary(nccl, CudaDevice(torch.cuda.current_device()))


class CudaDevice:
    """A GPU by its index in this process.

    Attributes:
        gpu: Names it among all GPUs of the cluster.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.gpu = gpu_name(index)

    def use(self) -> None:
        """Make it the calling thread's."""
        torch.cuda.set_device(self.device)

    def make_stream(self) -> CudaStream:
        return CudaStream(self.device)

    def holds(self, data: torch.Tensor) -> bool:
        """Whether a tensor is in its memory."""
        return data.device == self.device

    def empty(self, num_bytes: int, stream: CudaStream) -> torch.Tensor:
        """Memory, uint8 [num_bytes], to be used and given back in the order of a stream."""
        with torch.cuda.stream(stream.stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


class CudaStream:
    """A stream of our own, apart from the default stream.

    Not one of torch's: those are handed out again and again, and behind a transfer that hangs
    the copies of another user would hang.
    """

    def __init__(self, device: torch.device) -> None:
        import cupy

        with cupy.cuda.Device(device.index):
            self._owner = cupy.cuda.Stream(non_blocking=True)
        self.stream: Any = torch.cuda.ExternalStream(self._owner.ptr, device=device)  # type: ignore[no-untyped-call]

    @property
    def ptr(self) -> int:
        return int(self._owner.ptr)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy bytes from host memory to the device, in order."""
        with torch.cuda.stream(self.stream):
            target.copy_(source.pin_memory(), non_blocking=True)

    def record(self) -> Callable[[], bool]:
        """Returns a question: is everything that the stream was given so far done?"""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        done: Callable[[], bool] = event.query
        return done

    def synchronize(self) -> None:
        self.stream.synchronize()


def gpu_name(index: int) -> str:
    """The machine's boot and the GPU's place on its bus: by which NCCL tells GPUs apart.

    Not the UUID: those of a GPU's partitions differ.
    """
    from cupy.cuda import Device as CupyDevice

    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else os.uname().nodename
    return f"{boot}/{CupyDevice(index).pci_bus_id}"
