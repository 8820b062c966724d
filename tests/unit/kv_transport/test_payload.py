"""Digests of KV, and where it is put."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError
from quadriga.kv_transport import payload
from quadriga.kv_transport.payload import (
    DEVICE_DIGEST,
    as_bytes,
    checksum,
    device_digest,
    from_bytes,
    join_layers,
    num_bytes,
    where_digested,
)


def part_of(kv: torch.Tensor, digest: int) -> KVPart:
    name = str(kv.dtype).removeprefix("torch.")
    return KVPart("t", 0, 0, kv.shape[0], 0, kv.shape[3], tuple(kv.shape), name, digest)


def make(num_tokens: int = 37, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 2, 3, num_tokens, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def reference(kv: torch.Tensor, chunk: int) -> int:
    """The digest's definition, in Python's integers."""
    data = as_bytes(kv).numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), dtype="<i4")
    keys = [int(k) for k in payload._keys(torch.device("cpu"))[:chunk]]
    total = 0
    for index, start in enumerate(range(0, len(words), chunk)):
        piece = words[start : start + chunk]
        total += keys[index] * sum(int(w) * k for w, k in zip(piece, keys, strict=False))
    return total % (1 << 64)


@pytest.mark.parametrize("num_tokens", [1, 37, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_digest_is_what_it_says(
    num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 500 words here, so that the larger ones cross several."""
    monkeypatch.setattr(payload, "DIGEST_CHUNK_WORDS", 500)
    payload._keys.cache_clear()
    kv = make(num_tokens, dtype)
    assert device_digest(kv) == reference(kv, 500)
    payload._keys.cache_clear()


def test_a_device_digest_sees_every_kind_of_harm() -> None:
    kv = make()
    digest = device_digest(kv)
    flat = as_bytes(kv)
    for byte in range(0, flat.numel(), 7):
        for bit in (0, 3, 7):
            harmed = flat.clone()
            harmed[byte] ^= 1 << bit
            assert device_digest(harmed) != digest, (byte, bit)
    signs = flat.clone().view(torch.int32)
    signs[[3, 90]] ^= -(1 << 31)  # the sign bits of two values
    assert device_digest(signs) != digest
    assert device_digest(kv.flip(3).contiguous()) != digest
    swapped = flat.clone().view(torch.int32)
    swapped[[0, 1]] = swapped[[1, 0]]
    assert device_digest(swapped) != digest


def test_digests_of_host_and_device_are_never_the_same_number() -> None:
    kv = make()
    assert 0 <= checksum(kv) < DEVICE_DIGEST
    assert 0 <= device_digest(kv) < DEVICE_DIGEST, "the mark is added by checksum, on a device"


def test_kv_whose_digest_a_gpu_took_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert where_digested(kv, part_of(kv, checksum(kv))) is kv
    with pytest.raises(KVTransportError, match=r"engine\.device") as refusal:
        where_digested(kv, part_of(kv, DEVICE_DIGEST + 5))
    assert refusal.value.code == "refused"


def test_bytes_and_back() -> None:
    kv = make(dtype=torch.float16)
    part = part_of(kv, 0)
    assert num_bytes(part) == kv.nbytes
    assert torch.equal(from_bytes(as_bytes(kv).clone(), part), kv)
    with pytest.raises(KVTransportError, match="its header says"):
        from_bytes(as_bytes(kv)[:-2], part)
    with pytest.raises(KVTransportError, match="float64"):
        num_bytes(part_of(kv.double(), 0))


def test_layers_are_joined_in_order() -> None:
    kv = make()
    assert torch.equal(join_layers([kv[:1], kv[1:]]), kv)
