"""KV tensors as bytes and back, where they lie, and their digests. Only replicas import this.

A digest is taken where the KV lies: in host memory xxh3, on a GPU a hash made of tensor operations,
as copying everything to the host to hash it would cost more than sending it. The receiving side
puts the bytes where the sender had them (`where_digested`), however they travelled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DEVICE_DIGEST = 1 << 64
"""Added to digests taken on a device, so that the receiver knows how to make its own."""
DIGEST_CHUNK_WORDS = 1 << 20
"""32-bit words hashed at once; the keys and a chunk's products take 8 MB each."""
_KEY_SEED = 0x5EED


def as_bytes(kv: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, uncopied where it is contiguous: uint8 [num_bytes]."""
    return kv.detach().contiguous().reshape(-1).view(torch.uint8)


def num_bytes(part: KVPart) -> int:
    """Bytes the part's header announces.

    Raises:
        KVTransportError: The dtype is not one we move.
    """
    dtype = DTYPES.get(part.dtype)
    if dtype is None:
        raise KVTransportError(
            f"part {part.index} has dtype {part.dtype!r}; known: {', '.join(DTYPES)}",
            code="refused",
        )
    return math.prod(part.shape) * dtype.itemsize


def from_bytes(data: torch.Tensor, part: KVPart) -> torch.Tensor:
    """Undo `as_bytes`: [num_layers, 2, num_kv_heads, num_tokens, head_dim], not copied.

    Raises:
        KVTransportError: The bytes are not as many as the header says.
    """
    if data.numel() != num_bytes(part):
        raise KVTransportError(
            f"part {part.index} of {part.transfer_id} has {data.numel()} bytes; its header says "
            f"{num_bytes(part)}"
        )
    return data.view(DTYPES[part.dtype]).reshape(part.shape)


def pack(kv: torch.Tensor) -> bytes:
    """A copy of the tensor's bytes, for a call to carry."""
    return as_array(kv).tobytes()


def unpack(part: KVPart, data: bytes) -> torch.Tensor:
    """Undo `pack`, in host memory. Raises: KVTransportError: As `from_bytes`."""
    return from_bytes(torch.frombuffer(bytearray(data), dtype=torch.uint8), part)


def checksum(kv: torch.Tensor) -> int:
    """Digest of the tensor's bytes: xxh3-64 in host memory, else `device_digest`, marked as such.

    Args:
        kv: On a device it must be complete: nothing that fills it is still under way.
    """
    if kv.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(as_array(kv).data)
    with torch.cuda.stream(_side_stream(kv.device)):
        return DEVICE_DIGEST + device_digest(kv)


def device_digest(kv: torch.Tensor) -> int:
    """Multilinear hash of the tensor's bytes in 64 bits; waits for the device.

    Σ kᵢ·wᵢ mod 2⁶⁴ over the 32-bit words wᵢ, with fixed random odd keys kᵢ of 64 bits: any one
    changed word changes it, and any other corruption that does not know the keys goes unnoticed
    with a probability of some 2⁻³². Sums of chunks are multiplied by keys again and added.
    """
    data = as_bytes(kv)
    if tail := -data.numel() % 4:
        data = torch.cat([data, data.new_zeros(tail)])
    words = data.view(torch.int32)
    keys = _keys(data.device)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for index, chunk in enumerate(torch.split(words, DIGEST_CHUNK_WORDS)):
        # int64 products and sums wrap around, on every device alike.
        total += (chunk * keys[: chunk.numel()]).sum() * keys[index]
    return int(total.item()) & (DEVICE_DIGEST - 1)


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """Odd keys, the same in every process: int64 [DIGEST_CHUNK_WORDS]."""
    bits = np.random.Generator(np.random.PCG64(_KEY_SEED)).integers(
        -(1 << 63), 1 << 63, DIGEST_CHUNK_WORDS, dtype=np.int64
    )
    return torch.from_numpy(bits | 1).to(device)


def as_array(kv: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes as a numpy array; over the same memory where that is the host's."""
    array: np.ndarray[Any, np.dtype[np.uint8]] = to_host(as_bytes(kv)).numpy()
    return array


def where_digested(kv: torch.Tensor, part: KVPart) -> torch.Tensor:
    """The KV in host memory or on our GPU, as it was where its digest was taken; copied if need be.

    Raises:
        KVTransportError: It was taken on a GPU and this process has none.
    """
    if part.checksum < DEVICE_DIGEST:
        return to_host(kv)
    if kv.device.type != "cpu":
        return kv
    if not torch.cuda.is_available():
        raise KVTransportError(
            f"part {part.index} of {part.transfer_id} comes from a GPU, and there is none here to "
            "check it on; give all replicas the same engine.device",
            code="refused",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    return on_side_stream(device, lambda: kv.pin_memory().to(device, non_blocking=True))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, complete; itself where it is there already."""
    if tensor.device.type == "cpu":
        return tensor

    def copy() -> torch.Tensor:
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return staged.copy_(tensor, non_blocking=True)

    return on_side_stream(tensor.device, copy)


def join_layers(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pieces of KV of the same positions as one, layer after layer; complete where they are."""
    device = pieces[0].device
    if device.type == "cpu":
        return torch.cat(list(pieces))
    return on_side_stream(device, lambda: torch.cat(list(pieces)))


def on_side_stream(device: torch.device, work: Any) -> torch.Tensor:
    """Run a copy beside the engine's stream, not behind it, and wait for it.

    What it reads must be complete.
    """
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        result: torch.Tensor = work()
        stream.synchronize()
    return result


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """The stream for copies and digests: on the engine's they would wait for its passes."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
