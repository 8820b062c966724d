"""What a transfer at its source leaves behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from actors.kv_transfer.handoff_sender import OutgoingTransfer
from quadriga.core.kv import Accepted, TransferOffer
from quadriga.core.replica import DepthClass, ReplicaInfo, Role
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.scheduling.transfer.handoff import LeaseState
from tests.settled import settled

CLASS = DepthClass("m", 8)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Peer:
    """The destination: takes every commit, and every abort."""

    async def call(self, *_: Any, **__: Any) -> LeaseState:
        await asyncio.sleep(0)
        return LeaseState.ABORTED

    call_alone = call

    async def abort(self, *_: Any) -> None:
        await asyncio.sleep(0)


def transfer() -> OutgoingTransfer:
    offer = TransferOffer(
        transfer_id="t",
        sequence_id="s",
        depth_class=CLASS,
        source="a",
        epoch=1,
        num_tokens=1,
        max_total_tokens=9,
        transport="gloo",
        lease_s=30.0,
    )
    info = Accepted(ReplicaInfo("b", Role.DECODE, CLASS, "n", "i", 8, 4096))
    peer: Any = Peer()
    return OutgoingTransfer(offer, info, peer, peer, 5.0)


def state() -> SequenceState:
    return SequenceState(
        sequence_id="s",
        request_id="r",
        model="m",
        prompt_ids=[1],
        sampling=SamplingParams(max_tokens=8),
        ingress_id="i",
        arrival_unix_s=0.0,
        deadline_unix_s=9.0,
    )


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_aborted", [False, True])
async def test_a_transfer_is_freed_without_the_collector(is_aborted: bool) -> None:
    """It may hold KV, and a process that serves collects seldom."""
    made = transfer()
    await asyncio.sleep(0)  # the lease is being renewed
    if is_aborted:
        await made.abort()
    else:
        await made.commit(state())
    left = weakref.ref(made)
    del made
    await settled(4)  # turns for what was cancelled
    assert left() is None
