"""KV between GPUs over NCCL: both ends on one GPU as a loop, and two processes where that can be.

NCCL takes one rank a GPU, so one GPU tests the loop: `tests/loopback_nccl.py`. Two processes need
two GPUs, or NCCL 2.30 and `NCCL_MULTI_RANK_GPU_ENABLE=1`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError
from quadriga.kv_transport.nccl import NcclChannels
from quadriga.kv_transport.nccl_library import (
    SHARE_VARIABLE,
    CudaDevice,
    CudaStream,
    NcclLibrary,
    find_nccl,
)
from quadriga.kv_transport.pairs import Invite, PairTransport
from quadriga.kv_transport.payload import DEVICE_DIGEST, checksum, device_digest, where_digested
from tests.contract.lines import WAIT_S, LinesContract, Rig, Sink, make_rig
from tests.fake_nccl import FakeDevice, FakeNccl
from tests.gpu.devices import DEVICE, HAS_GPU, IS_REHEARSAL, gpu, gpu_itself
from tests.loopback_nccl import Loopback

pytestmark = gpu


def localhost(_: str) -> str:
    return "127.0.0.1"


def need_nccl() -> Any:
    """`cupy.cuda.nccl`; skips where it cannot be had. A rehearsal has the stand-in."""
    if IS_REHEARSAL:
        return FakeNccl("rehearsal")
    try:
        return find_nccl()._module
    except KVTransportError as exc:
        pytest.skip(f"no NCCL: {exc.message}")


@pytest.fixture
def rig() -> Iterator[Rig]:
    module = need_nccl()
    loopback = Loopback(module)

    def make(me: str, sink: Sink, invite: Invite) -> PairTransport:
        device: Any = FakeDevice(me) if IS_REHEARSAL else CudaDevice(torch.cuda.current_device())
        device.gpu = me  # the two ends are on one GPU, which a loop may
        channels = NcclChannels(me, localhost, NcclLibrary(loopback, device))
        return PairTransport(me, sink, channels, invite)

    with make_rig(make, DEVICE) as rig:
        yield rig
    if IS_REHEARSAL:
        module.close()


class TestLoop(LinesContract):
    """See `LinesContract`: KV on the device, all through NCCL's kernels."""


def test_digests_are_the_same_on_every_device() -> None:
    kv = torch.randn(3, 2, 4, 1001, 16, device=DEVICE).to(torch.bfloat16)
    assert device_digest(kv) == device_digest(kv.cpu())
    if HAS_GPU:
        assert checksum(kv) == DEVICE_DIGEST + device_digest(kv)
        digest = checksum(kv)
        kv.view(torch.uint8).view(-1)[12_345] ^= 1
        assert checksum(kv) != digest


def test_kv_is_put_where_its_digest_was_taken() -> None:
    kv = torch.randn(1, 2, 1, 10, 4)
    shape = tuple(kv.shape)
    for origin in (kv, kv.to(DEVICE)):
        part = KVPart("t", 0, 0, 1, 0, 10, shape, "float32", checksum(origin))
        for arrived in (kv, kv.to(DEVICE)):
            placed = where_digested(arrived, part)
            assert placed.device.type == origin.device.type
            assert checksum(placed) == part.checksum


def test_kv_in_host_memory_goes_through_staging(rig: Rig) -> None:
    rig.deliver()
    here = rig.device
    rig.device = torch.device("cpu")
    rig.deliver(3000)  # stored in host memory again, where its digest was taken
    rig.device = here
    assert rig.a._channels.staging.taken_bytes == 0  # type: ignore[attr-defined]


@gpu_itself
def test_transfers_do_not_wait_for_the_engines_stream(rig: Rig) -> None:
    """A pass of two seconds is under way; parts go by on streams of their own."""
    rig.deliver(4000)
    piece = rig.make(4000)
    busy: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]
    busy.record()
    rig.send(piece).result(WAIT_S)
    assert not busy.query(), "the part waited for the pass, or the pass was too short"
    torch.cuda.synchronize()


@gpu_itself
def test_streams_are_our_own() -> None:
    need_nccl()
    streams = [CudaStream(DEVICE) for _ in range(40)]  # torch's pool has 32
    assert len({stream.ptr for stream in streams}) == 40
    done = streams[0].record()
    streams[0].synchronize()
    assert done()


@gpu_itself
def test_failures_leave_no_memory_behind(rig: Rig) -> None:
    rig.deliver(20_000)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        rig.sink.gate.clear()
        with pytest.raises(KVTransportError):
            rig.send(rig.make(20_000), deadline_s=0.5).result(WAIT_S)
        rig.sink.gate.set()
        rig.deliver(20_000)
    rig.sink.parts.clear()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert rig.b._channels.staging.taken_bytes == 0  # type: ignore[attr-defined]


async def invite_nobody(peer: str, offer: Any) -> None:
    """The other process only receives: it opens no channel."""
    raise KVTransportError(f"{peer} is not to be invited", code="refused")


def other_process(rank: int, pipe: Connection, dry_run: bool) -> None:
    """Receive what the test's process sends; tell its digests."""
    if dry_run:
        library = FakeNccl("gpu-b").library()
    else:
        torch.cuda.set_device(rank)
        library = find_nccl()
    sink = Sink()

    async def main() -> None:
        transport = PairTransport("b", sink, NcclChannels("b", localhost, library), invite_nobody)
        pipe.send("ready")
        while True:
            word, content = await asyncio.to_thread(pipe.recv)
            if word == "offer":
                try:
                    transport.connect(content)
                    pipe.send(None)
                except KVTransportError as exc:
                    pipe.send(exc)
            elif word == "digests":
                pipe.send(sink.digests)
            elif word == "gate":
                (sink.gate.set if content else sink.gate.clear)()
            else:
                await transport.close()
                return

    asyncio.run(main())


class Processes:
    """This process sends, another one receives."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        rank = 1 if torch.cuda.device_count() > 1 else 0
        self.process = context.Process(
            target=other_process, args=(rank, theirs, IS_REHEARSAL), daemon=True
        )
        self.process.start()
        assert self.pipe.poll(120) and self.pipe.recv() == "ready"
        self.library = FakeNccl("gpu-a").library() if IS_REHEARSAL else find_nccl()

    def make(self, me: str, sink: Sink, invite: Invite) -> PairTransport:
        channels = NcclChannels(me, localhost, self.library)
        return PairTransport(me, sink, channels, self._invite)

    async def _invite(self, peer: str, offer: Any) -> None:
        self.pipe.send(("offer", offer))
        answer = await asyncio.to_thread(self.pipe.recv)
        if answer is not None:
            raise answer

    def digests(self) -> list[int]:
        self.pipe.send(("digests", None))
        digests: list[int] = self.pipe.recv()
        return digests


@pytest.fixture
def processes() -> Iterator[tuple[Rig, Processes]]:
    need_nccl()
    if not IS_REHEARSAL:
        is_able = find_nccl()._module.get_version() >= 23_000
        can_share = is_able and os.environ.get(SHARE_VARIABLE) == "1"
        if torch.cuda.device_count() < 2 and not can_share:
            pytest.skip(f"one GPU: set {SHARE_VARIABLE}=1 with NCCL 2.30 or later")
    pair = Processes()
    with make_rig(pair.make, DEVICE) as rig:
        yield rig, pair
    pair.process.kill()
    pair.process.join(WAIT_S)
    pair.pipe.close()


def test_parts_between_processes(processes: tuple[Rig, Processes]) -> None:
    rig, pair = processes
    pieces = [rig.make(size) for size in (1, 3000, 100_000, 5)]
    for piece in pieces:
        rig.send(piece, deadline_s=30.0).result(60)
    assert pair.digests() == [part.checksum for part, _ in pieces]


def test_death_of_the_other_process(processes: tuple[Rig, Processes]) -> None:
    rig, pair = processes
    rig.send(rig.make(1000), deadline_s=30.0).result(60)
    pair.pipe.send(("gate", False))
    future = rig.send(rig.make(100_000))
    with pytest.raises(TimeoutError):
        future.result(0.5)  # it is under way
    started_s = time.monotonic()
    os.kill(pair.process.pid or 0, signal.SIGKILL)
    with pytest.raises(KVTransportError):
        future.result(WAIT_S)
    assert time.monotonic() - started_s < 2.0


def test_a_stopped_process_costs_a_deadline(processes: tuple[Rig, Processes]) -> None:
    rig, pair = processes
    rig.send(rig.make(1000), deadline_s=30.0).result(60)
    os.kill(pair.process.pid or 0, signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(KVTransportError):
        rig.send(rig.make(100_000), deadline_s=1.0).result(WAIT_S)
    assert time.monotonic() - started_s < 3.0
    os.kill(pair.process.pid or 0, signal.SIGCONT)
    rig.send(rig.make(1000), deadline_s=30.0).result(60)
