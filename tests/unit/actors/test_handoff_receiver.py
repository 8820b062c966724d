"""A commit that the engine refuses: the row comes back, and the source learns why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.handoff_receiver import HandoffReceiver
from actors.kv_transport.payload import checksum
from quadriga.batching.handoff import LeaseState
from quadriga.clock import SystemClock
from quadriga.errors import MigrationFailed, QuadrigaError, ReplicaError
from quadriga.types import (
    DepthClass,
    KVPart,
    ResumePoint,
    SamplingParams,
    SequenceState,
    TransferOffer,
)

NUM_TOKENS = 3
CLASS = DepthClass("m", 2)
KV = torch.ones(2, 2, 1, NUM_TOKENS, 4)


class RefusingHost:
    """An engine that promises rows and lets nobody in."""

    def __init__(self, refusal: QuadrigaError) -> None:
        self.held: set[str] = set()
        self._refusal = refusal

    async def reserve_row(self, sequence_id: str, *_: Any, **__: Any) -> int:
        self.held.add(sequence_id)
        return 0

    async def release_row(self, sequence_id: str) -> None:
        self.held.remove(sequence_id)

    async def join(self, state: SequenceState, resume: ResumePoint | None, depth: int) -> None:
        raise self._refusal

    def write_kv(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("refusal", "end"),
    [
        (MigrationFailed("s was cancelled", code="cancelled"), LeaseState.CANCELLED),
        (ReplicaError("the engine is over"), LeaseState.ABORTED),
    ],
)
async def test_a_source_does_not_try_elsewhere_what_was_cancelled(
    refusal: QuadrigaError, end: LeaseState
) -> None:
    host = RefusingHost(refusal)
    receiver = HandoffReceiver(CLASS, host, SystemClock(), ["gloo"])
    await receiver.reserve(TransferOffer("t", "s", CLASS, "source", 1, 3, 32, "gloo", 5.0))
    digest = checksum(KV)
    part = KVPart("t", 0, 0, 2, 0, NUM_TOKENS, tuple(KV.shape), "float32", digest)
    receiver.store("source", part, KV)
    state = SequenceState(
        sequence_id="s",
        request_id="s",
        model="m",
        prompt_ids=[1] * NUM_TOKENS,
        sampling=SamplingParams(max_tokens=4),
        ingress_id="i",
        arrival_unix_s=0.0,
        deadline_unix_s=1e12,
        epoch=1,
        output_ids=[7],
    )
    with pytest.raises(MigrationFailed, match="could not join") as failure:
        await receiver.commit("t", state, [digest])
    assert failure.value.code == end
    assert await receiver.abort("t") is end
    assert not host.held
