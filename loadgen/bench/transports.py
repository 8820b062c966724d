"""`python -m loadgen bench transports`: what KV costs from one process to another, by transport.

Two processes of this machine; parts of float32 KV as a hand-off sends them, with their digests,
which are computed before the clock runs on the sender's side and checked within it on the other.
Transports take turns. Beside them the floor: the same bytes copied once in this process's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import multiprocessing
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from loadgen.options import whole
from loadgen.report.experiment import print_line, say, show
from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError
from quadriga.kv_transport.channel import ChannelOffer
from quadriga.kv_transport.gloo import GlooChannels
from quadriga.kv_transport.nixl import PACKAGES, NixlChannels, find_nixl
from quadriga.kv_transport.pairs import PairTransport
from quadriga.kv_transport.payload import checksum

KINDS = ("gloo", "nixl")
SIZES_MIB = (1, 16, 256)
START_S, PART_S = 120.0, 60.0
HEADS, DIM = 4, 64


@dataclass(frozen=True, slots=True)
class PartCost:
    """Of one part.

    Attributes:
        gb_per_s: Median, from the call to the peer's word that it is stored.
        cpu_us: Median processor time of both processes.
        floor_gb_per_s: Median of a copy in memory.
    """

    transport: str
    mib: int
    gb_per_s: float
    cpu_us: float
    floor_gb_per_s: float


class Discard:
    """A sink that checks nothing but digests, which the transport does, and keeps nothing."""

    def knows(self, source: str) -> bool:
        return True

    def accept(self, source: str, part: KVPart) -> None:
        """Every part."""

    def store(self, source: str, part: KVPart, kv: torch.Tensor) -> None:
        if checksum(kv) != part.checksum:
            raise KVTransportError(f"part {part.index} arrived as something else")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    found = KINDS if any(map(importlib.util.find_spec, PACKAGES)) else KINDS[:1]
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(found), help="to compare")
    parser.add_argument(
        "--mib", nargs="+", type=whole(1, 256), default=list(SIZES_MIB), help="sizes of a part"
    )
    parser.add_argument("--repeats", type=whole(1), default=9, help="parts of each kind and size")


def run(args: argparse.Namespace) -> int:
    """Send parts by every transport in turns; prints a table and one JSON line."""
    costs = asyncio.run(_measure(args))
    show(
        costs,
        {
            "transport": lambda c: c.transport,
            "MiB": lambda c: c.mib,
            "GB/s": lambda c: f"{c.gb_per_s:.2f}",
            "CPU µs, both": lambda c: f"{c.cpu_us:,.0f}",
            "a copy's GB/s": lambda c: f"{c.floor_gb_per_s:.2f}",
        },
        title="KV from process to process",
    )
    print_line(
        "transports",
        headline={f"{c.transport}_{c.mib}_mib_gb_per_s": round(c.gb_per_s, 3) for c in costs},
        costs=[asdict(c) for c in costs],
        packages=("torch",),
    )
    return 0


async def _measure(args: argparse.Namespace) -> list[PartCost]:
    peers = [_Peer(kind) for kind in args.kinds]
    costs = []
    try:
        for mib in args.mib:
            part, kv = _part(mib << 20)
            times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in args.kinds}
            floor_s, copy = [], torch.empty_like(kv)
            for index in range(-1, args.repeats):
                say(f"{mib} MiB, {index + 1} of {args.repeats}")
                began_s = time.perf_counter()
                copy.copy_(kv)
                if index >= 0:
                    floor_s.append(time.perf_counter() - began_s)
                for peer in peers:
                    took = await peer.send(replace(part, index=index + 1), kv)
                    if index >= 0:
                        times[peer.kind].append(took)
            floor = kv.nbytes / statistics.median(floor_s) / 1e9
            for kind, took_s in times.items():
                wall_s, cpu_s = (statistics.median(column) for column in zip(*took_s, strict=True))
                costs.append(PartCost(kind, mib, kv.nbytes / wall_s / 1e9, 1e6 * cpu_s, floor))
    finally:
        for peer in peers:
            await peer.close()
    return costs


def _part(num_bytes: int) -> tuple[KVPart, torch.Tensor]:
    num_tokens = num_bytes // (2 * HEADS * DIM * 4)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(1, 2, HEADS, num_tokens, DIM, generator=generator)
    return KVPart("t", 0, 0, 1, 0, num_tokens, tuple(kv.shape), "float32", checksum(kv)), kv


class _Peer:
    """A transport here, and the process that it sends to."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(kind, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that its death is the end of the pipe
        if not self._pipe.poll(START_S) or self._pipe.recv() != "ready":
            raise RuntimeError(f"the receiving process of {kind} did not start")
        self._transport = _make(kind, "a", None, self._invite)

    async def send(self, part: KVPart, kv: torch.Tensor) -> tuple[float, float]:
        """Returns seconds of wall time, and of processor time in both processes."""
        cpu_s = self._peer_cpu_s() + time.process_time()
        began_s = time.perf_counter()
        await self._transport.send("b", part, kv, deadline_s=PART_S)
        wall_s = time.perf_counter() - began_s
        return wall_s, self._peer_cpu_s() + time.process_time() - cpu_s

    async def close(self) -> None:
        await self._transport.close()
        self._process.kill()
        self._process.join(START_S)

    async def _invite(self, peer: str, offer: ChannelOffer) -> None:
        self._pipe.send(offer)

    def _peer_cpu_s(self) -> float:
        self._pipe.send(None)
        if not self._pipe.poll(PART_S):
            raise RuntimeError(f"the receiving process of {self.kind} does not answer")
        return float(self._pipe.recv())


def _make(
    kind: str, me: str, sink: Discard | None, invite: Callable[[str, ChannelOffer], Awaitable[None]]
) -> PairTransport:
    def here(_: str) -> str:
        return "127.0.0.1"

    if kind == "gloo":
        return PairTransport(me, sink, GlooChannels(me, here), invite)
    channels = NixlChannels(me, here, find_nixl(), torch.device("cpu"))
    return PairTransport(me, sink, channels, invite)


def _receive(kind: str, pipe: Connection[Any, Any]) -> None:
    """The receiving process: joins what is offered, and says what processor time it has used."""

    async def serve() -> None:
        async def nobody(peer: str, offer: ChannelOffer) -> None:
            raise KVTransportError("this end only receives")

        transport = _make(kind, "b", Discard(), nobody)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            pipe.send("ready")
            try:
                while True:
                    offer = pipe.recv()
                    if offer is None:
                        pipe.send(time.process_time())
                    else:
                        loop.call_soon_threadsafe(transport.connect, offer)
            except (EOFError, OSError):
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()

    asyncio.run(serve())
