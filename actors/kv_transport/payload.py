"""KV tensors as bytes and back, and their checksums. Only replica processes import this."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import xxhash

from quadriga.errors import KVTransportError
from quadriga.types import KVPart

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def checksum(kv: torch.Tensor) -> int:
    """xxh3-64 of the tensor's bytes."""
    return xxhash.xxh3_64_intdigest(as_array(kv).data)


def as_array(kv: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes as a numpy array over the same memory."""
    array: np.ndarray[Any, np.dtype[np.uint8]] = as_bytes(kv).numpy()
    return array
