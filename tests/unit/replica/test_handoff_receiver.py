"""A commit that the engine refuses: the row comes back, and the source learns why."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import quadriga.background
from actors.replica.decode import DecodeReplica
from actors.replica.decode_engine import DecodeEngine
from quadriga.clock import ManualClock, SystemClock
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.kv import KVExtent, KVPart, ResumePoint, TransferOffer
from quadriga.core.replica import DepthClass
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import (
    InvariantViolation,
    KVCacheExhausted,
    KVTransportError,
    MigrationFailed,
    Overloaded,
    ReplicaError,
)
from quadriga.kv_transport.payload import checksum, pack
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.scheduling.idle_check import LEAK_AFTER_S, Leaks
from quadriga.scheduling.transfer.handoff import LeaseState
from tests.sequences import make_sequence
from tests.waiting import settled

NUM_TOKENS = 3
CLASS = DepthClass("m", 2)
KV = torch.ones(2, 2, 1, NUM_TOKENS, 4)


def an_offer(transfer_id: str = "t") -> TransferOffer:
    return TransferOffer(transfer_id, "s", CLASS, "source", 1, 3, 32, 5.0)


def a_state() -> SequenceState:
    """What a source commits."""
    return make_sequence(
        "s",
        [1] * NUM_TOKENS,
        SamplingParams(max_tokens=4),
        epoch=1,
        output_ids=[7],
        exit_layers=[2],
    )


class RefusingHost:
    """An engine that promises rows and lets nobody in."""

    def __init__(self, refusal: Exception) -> None:
        self.held: set[str] = set()
        self._refusal = refusal

    async def reserve_row(self, offer: TransferOffer) -> tuple[int, int]:
        self.held.add(offer.sequence_id)
        return 0, 0

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
        (KeyError("a fault of the engine"), LeaseState.ABORTED),
    ],
)
async def test_a_source_does_not_try_elsewhere_what_was_cancelled(
    refusal: Exception, end: LeaseState
) -> None:
    host = RefusingHost(refusal)
    receiver = HandoffReceiver(CLASS, host, SystemClock())
    await receiver.reserve(an_offer())
    digest = checksum(KV)
    part = KVPart("t", 0, 0, 2, 0, NUM_TOKENS, tuple(KV.shape), "float32", digest)
    receiver.store("source", part, KV)
    with pytest.raises(MigrationFailed, match="could not join") as failure:
        await receiver.commit("t", a_state(), [digest])
    assert failure.value.code == end
    assert await receiver.abort("t") is end
    assert not host.held


class TakingHost(RefusingHost):
    """An engine that takes everybody, and remembers what was written."""

    def __init__(self) -> None:
        super().__init__(ReplicaError(""))
        self.joined: list[ResumePoint | None] = []
        self.written: list[tuple[int, int, int, int]] = []

    async def join(self, state: SequenceState, resume: ResumePoint | None, depth: int) -> None:
        self.joined.append(resume)

    def write_kv(self, *args: Any) -> None:
        row, first_layer, start, kv = args
        assert torch.equal(kv, KV[:, :, :, : kv.shape[3]])
        self.written.append((row, first_layer, start, kv.shape[3]))


def a_part(index: int, start: int, num_tokens: int, transfer_id: str = "t") -> KVPart:
    kv = KV[:, :, :, :num_tokens].contiguous()
    return KVPart(
        transfer_id, index, 0, 2, start, num_tokens, tuple(kv.shape), "float32", checksum(kv)
    )


def carried(*parts: KVPart) -> ResumePoint:
    return ResumePoint(
        (KVExtent(0, 2, NUM_TOKENS),),
        None,
        last_kv=tuple((p, pack(KV[:, :, :, : p.num_tokens])) for p in parts),
    )


async def open_transfer(host: TakingHost) -> HandoffReceiver:
    """Of a running sequence, whose first position is here."""
    receiver = HandoffReceiver(CLASS, host, SystemClock())
    await receiver.reserve(replace(an_offer(), is_live=True))
    receiver.store("source", a_part(0, 0, 1), KV[:, :, :, :1].contiguous())
    return receiver


async def test_a_sequence_that_waits_for_its_grammar_behind_others_is_no_leak() -> None:
    """It is committed and does not run yet; many slow grammars take longer than a leak may."""
    host, may_join, clock = RefusingHost(KeyError("not asked")), asyncio.Event(), ManualClock()

    async def reserve_row(offer: TransferOffer) -> tuple[int, int]:
        return 0, NUM_TOKENS

    async def join(*_: object) -> None:
        await may_join.wait()

    host.reserve_row, host.join = reserve_row, join  # type: ignore[assignment,method-assign]
    receiver = HandoffReceiver(CLASS, host, clock)
    engine: Any = Mock(held=[], _receiver=receiver, _leaks=Leaks())
    engine.loop.slots.owners, engine._replica.clock = ["s"], clock
    await receiver.reserve(an_offer())
    committing = asyncio.create_task(receiver.commit("t", a_state(), []))
    await settled()
    assert not DecodeEngine._check(engine)
    may_join.set()
    await committing
    assert DecodeEngine._check(engine), "nobody has it now"
    clock.advance(LEAK_AFTER_S)
    with pytest.raises(InvariantViolation, match="unknown sequences"):
        DecodeEngine._check(engine)


async def test_a_commit_may_bring_the_last_kv_and_be_repeated() -> None:
    host = TakingHost()
    receiver = await open_transfer(host)
    resume = carried(a_part(1, 1, 1), a_part(2, 2, 1))
    sums = [a_part(0, 0, 1).checksum] * 3
    for _ in range(2):
        await receiver.commit("t", a_state(), sums, resume)
    assert host.written == [(0, 0, 0, 1), (0, 0, 1, 1), (0, 0, 2, 1)]
    assert len(host.joined) == 1
    assert host.joined[0] is not None
    assert host.joined[0].last_kv == (), "bytes that are written are not kept"
    assert await receiver.abort("t") is LeaseState.COMMITTED


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([a_part(1, 1, 1)], "incomplete"),
        ([replace(a_part(1, 1, 2), checksum=5)], "corrupt"),
        ([a_part(2, 1, 2)], "refused"),
        ([a_part(1, 1, 2, "u")], "refused"),
        ([replace(a_part(1, 1, 1), shape=(2, 2, 1, 2, 4))], "refused"),
        ([a_part(1, 31, 2)], "refused"),
    ],
    ids=["too little", "corrupt", "a gap", "another's", "misshapen", "outside"],
)
async def test_last_kv_of_another_transfer_is_refused(parts: list[KVPart], code: str) -> None:
    host = TakingHost()
    receiver = await open_transfer(host)
    sums = [a_part(0, 0, 1).checksum, *(part.checksum for part in parts)]
    with pytest.raises(ReplicaError) as failure:
        await receiver.commit("t", a_state(), sums, carried(*parts))
    assert failure.value.code == code
    assert host.joined == []
    assert await receiver.abort("t") is LeaseState.ABORTED
    assert not host.held


async def test_last_kv_that_finds_no_memory_is_no_commit() -> None:
    host = TakingHost()
    receiver = await open_transfer(host)

    def full(*_: object) -> None:
        raise KVCacheExhausted("no pages")

    host.write_kv = full  # type: ignore[method-assign]
    resume = carried(a_part(1, 1, 2))
    sums = [a_part(0, 0, 1).checksum, a_part(1, 1, 2).checksum]
    with pytest.raises(KVTransportError, match="was not written: no pages"):
        await receiver.commit("t", a_state(), sums, resume)
    assert await receiver.abort("t") is LeaseState.ABORTED
    assert not host.held


class SlowHost(TakingHost):
    """An engine with one slot for each sequence, whose writing takes its time.

    Attributes:
        is_writing: Set while it writes.
        may_end: Lets it end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_writing = threading.Event()
        self.may_end = threading.Event()

    async def reserve_row(self, offer: TransferOffer) -> tuple[int, int]:
        if offer.sequence_id in self.held:
            raise InvariantViolation(f"sequence {offer.sequence_id} already holds a slot")
        return await super().reserve_row(offer)

    async def release_row(self, sequence_id: str) -> None:
        await asyncio.sleep(0)
        await super().release_row(sequence_id)

    def write_kv(self, *args: Any) -> None:
        self.is_writing.set()
        assert self.may_end.wait(20)


async def until_taken(receiver: HandoffReceiver, offer: TransferOffer) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                return await receiver.reserve(offer)
            except Overloaded:
                await asyncio.sleep(0)


async def test_a_second_try_waits_until_the_first_ones_row_is_free() -> None:
    """A part that is being written when its transfer ends keeps the row for a moment."""
    host = SlowHost()
    receiver = HandoffReceiver(CLASS, host, SystemClock())
    await receiver.reserve(an_offer())
    writing = asyncio.create_task(
        asyncio.to_thread(receiver.store, "source", a_part(0, 0, NUM_TOKENS), KV)
    )
    await asyncio.to_thread(host.is_writing.wait, 20)
    assert await receiver.abort("t") is LeaseState.ABORTED
    with pytest.raises(Overloaded) as refused:
        await receiver.reserve(an_offer("u"))
    assert refused.value.code == "busy"
    host.may_end.set()
    await writing
    await until_taken(receiver, an_offer("u"))
    assert host.held == {"s"}
    assert await receiver.abort("u") is LeaseState.ABORTED
    assert not host.held


@pytest.mark.parametrize("lapses", [False, True])
async def test_last_kv_that_takes_long_to_write_holds_nobody_up(lapses: bool) -> None:
    """With several ranks a write waits for a pass; a commit that is repeated waits for it, too."""
    host, clock = SlowHost(), ManualClock()
    receiver = HandoffReceiver(CLASS, host, clock)
    await receiver.reserve(replace(an_offer(), is_live=True))
    part = a_part(0, 0, NUM_TOKENS)
    commit = ("t", a_state(), [part.checksum], carried(part))
    commits = [asyncio.create_task(receiver.commit(*commit)) for _ in range(2)]
    await asyncio.to_thread(host.is_writing.wait, 20)
    aborting = asyncio.create_task(receiver.abort("t"))
    clock.advance(6.0 if lapses else 4.0)
    assert await receiver.sweep() == 0
    assert host.held == {"s"}, "nobody else may have a row that is written"
    host.may_end.set()
    ends = await asyncio.gather(*commits, return_exceptions=True)
    await settled()
    code = LeaseState.LAPSED if lapses else None
    assert [getattr(end, "code", None) for end in ends] == [code] * 2
    assert await aborting is (code or LeaseState.COMMITTED)
    assert (len(host.joined), host.held) == ((0, set()) if lapses else (1, {"s"}))


async def test_a_second_try_waits_for_a_row_that_was_asked_for_in_vain() -> None:
    """The engine stands still, the source gives up, and comes back before the engine does."""

    class StandingHost(SlowHost):
        goes_on = asyncio.Event()

        async def reserve_row(self, offer: TransferOffer) -> tuple[int, int]:
            await self.goes_on.wait()
            return await super().reserve_row(offer)

    host = StandingHost()
    receiver = HandoffReceiver(CLASS, host, SystemClock())
    first = asyncio.create_task(receiver.reserve(an_offer()))
    await asyncio.sleep(0)
    assert await receiver.abort("t") is LeaseState.ABORTED
    with pytest.raises(Overloaded) as refused:
        await receiver.reserve(an_offer("u"))
    assert refused.value.code == "busy"
    host.goes_on.set()
    with pytest.raises(MigrationFailed):
        await first
    await until_taken(receiver, an_offer("u"))
    assert host.held == {"s"}


@pytest.mark.parametrize(
    ("turns_s", "num_open"),
    [([2.5] * 4, 1), ([2.5] * 5, 0), ([60.0, 2.5], 1), ([60.0] + [2.5] * 4, 0)],
)
async def test_a_replica_that_stalled_does_not_count_it_as_its_sources_silence(
    turns_s: list[float], num_open: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewals of a time in which it read nothing may be there unread."""
    clock, left = ManualClock(1000.0), list(turns_s)
    receiver = HandoffReceiver(CLASS, TakingHost(), clock)
    await receiver.reserve(replace(an_offer(), lease_s=10.0))

    async def sleep(_: float) -> None:
        if not left:
            raise asyncio.CancelledError
        clock.advance(left.pop(0))

    monkeypatch.setattr(quadriga.background, "asyncio", SimpleNamespace(sleep=sleep))
    replica: Any = SimpleNamespace(
        clock=clock,
        config=QuadrigaConfig(),
        engine=SimpleNamespace(is_ready=True),
        receiver=receiver,
    )
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await DecodeReplica._sweep(replica)
    assert receiver.leases.num_open == num_open


async def test_a_second_try_waits_for_what_lapsed_with_others() -> None:
    clock = ManualClock()
    host = SlowHost()
    receiver = HandoffReceiver(CLASS, host, clock)
    for i in range(3):
        await receiver.reserve(replace(an_offer(f"t{i}"), sequence_id=f"s{i}", lease_s=1.0))
    clock.advance(2.0)
    sweeping = asyncio.create_task(receiver.sweep())
    await asyncio.sleep(0)
    await until_taken(receiver, replace(an_offer("u"), sequence_id="s2"))
    assert await sweeping == 3
    assert host.held == {"s2"}


class KeepingHost(TakingHost):
    """An engine that has the first two positions of a prompt."""

    async def reserve_row(self, offer: TransferOffer) -> tuple[int, int]:
        row, _ = await super().reserve_row(offer)
        return row, 2 if offer.block_keys else 0


async def test_what_the_destination_has_is_neither_sent_nor_written_over() -> None:
    receiver = HandoffReceiver(CLASS, KeepingHost(), SystemClock())
    offer = replace(an_offer(), block_keys=(b"k",))
    assert await receiver.reserve(offer) == 2
    assert await receiver.reserve(offer) == 2, "a repeated offer gets the same answer"
    with pytest.raises(KVTransportError, match="2 positions were there before"):
        receiver.store("source", a_part(0, 0, NUM_TOKENS), KV)
    with pytest.raises(MigrationFailed, match="lacks layer 0 from position 2 on"):
        await receiver.commit("t", a_state(), ())
    part = a_part(0, 2, 1)
    receiver.store("source", part, KV[:, :, :, 2:].contiguous())
    await receiver.commit("t", a_state(), (part.checksum,))
    assert receiver.leases.state("t") is LeaseState.COMMITTED
