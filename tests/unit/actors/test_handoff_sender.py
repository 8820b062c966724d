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
from quadriga.errors import ReplicaDied
from quadriga.scheduling.transfer.handoff import LeaseState
from tests.sequences import make_sequence
from tests.waiting import settled

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

    async def call_alone(self, *_: Any, **__: Any) -> Any:
        return await self.call()

    async def abort(self, *_: Any) -> None:
        await asyncio.sleep(0)


def transfer(peer: Any = None, transport: Any = None, lease_s: float = 30.0) -> OutgoingTransfer:
    offer = TransferOffer("t", "s", CLASS, "a", 1, 1, 9, lease_s)
    info = Accepted(ReplicaInfo("b", Role.DECODE, CLASS, "n", "i", 8, 4096))
    peer = peer or Peer()
    return OutgoingTransfer(offer, info, transport or peer, peer, 5.0)


def state() -> SequenceState:
    return make_sequence("s", [1], SamplingParams(max_tokens=8), deadline_unix_s=9.0)


async def test_a_lease_is_renewed_after_a_moment_out_of_reach() -> None:
    answers, has_asked = iter([ReplicaDied("not now", code="unreachable")]), asyncio.Event()

    class Away(Peer):
        async def call_alone(self, *_: Any, **__: Any) -> bool:
            for error in answers:
                raise error
            has_asked.set()
            return False

    made = transfer(Away(), lease_s=0.01)
    await asyncio.wait_for(has_asked.wait(), 20.0)
    await made.abort()


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
