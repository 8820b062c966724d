"""Two transports in one process, and what every transport over pairs of replicas must do.

Without Ray, so that it also runs on a bare GPU machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quadriga.core.kv import KVPart
from quadriga.errors import KVCacheExhausted, KVTransportError
from quadriga.kv_transport import channel_ends
from quadriga.kv_transport.channel import ChannelOffer
from quadriga.kv_transport.pairs import Invite, PairTransport
from quadriga.kv_transport.payload import checksum, to_host
from tests.waiting import wait_until

Maker = Callable[[str, "Sink", Invite], PairTransport]
WAIT_S = 60.0


class Sink:
    """Keeps what arrives.

    Attributes:
        known: Sources from which something is expected.
        unwanted: Transfers that are refused.
        gate: Closed, `store` waits.
        has_begun: Set when `store` is called.
    """

    def __init__(self) -> None:
        self.known = {"a", "b"}
        self.unwanted: set[str] = set()
        self.parts: list[tuple[KVPart, torch.Tensor]] = []
        self.digests: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()
        self.error: Exception | None = None

    def knows(self, source: str) -> bool:
        return source in self.known

    def accept(self, source: str, part: KVPart) -> None:
        if part.transfer_id in self.unwanted:
            raise KVTransportError(f"{part.transfer_id} is over", code="refused")

    def store(self, source: str, part: KVPart, kv: torch.Tensor) -> None:
        self.has_begun.set()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.parts.append((part, to_host(kv).clone()))
        self.digests.append(checksum(kv))


class Rig:
    """Transports a and b on an event loop of their own; a is the one that sends, mostly."""

    def __init__(self, make: Maker, device: torch.device) -> None:
        self.device = device
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.sinks = {"a": Sink(), "b": Sink()}
        self.offers: list[ChannelOffer] = []
        self.refuse_invitations = False
        self.ends = {name: make(name, self.sinks[name], self._invite) for name in "ab"}
        self._index = itertools.count()

    @property
    def a(self) -> PairTransport:
        return self.ends["a"]

    @property
    def b(self) -> PairTransport:
        return self.ends["b"]

    @property
    def sink(self) -> Sink:
        return self.sinks["b"]

    async def _invite(self, peer: str, offer: ChannelOffer) -> None:
        self.offers.append(offer)
        if self.refuse_invitations:
            raise KVTransportError("no route to host")
        self.ends[peer].connect(offer)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result(WAIT_S)

    def make(
        self, num_tokens: int, transfer_id: str = "t", dtype: torch.dtype = torch.float32
    ) -> tuple[KVPart, torch.Tensor]:
        """A part of random KV [2, 2, 2, num_tokens, 16], with its digest."""
        index = next(self._index)
        generator = torch.Generator().manual_seed(index)
        kv = torch.randn(2, 2, 2, num_tokens, 16, generator=generator).to(dtype).to(self.device)
        name = str(dtype).removeprefix("torch.")
        shape = tuple(kv.shape)
        part = KVPart(transfer_id, index, 0, 2, 0, num_tokens, shape, name, checksum(kv))
        return part, kv

    def send(
        self, piece: tuple[KVPart, torch.Tensor], *, source: str = "a", deadline_s: float = 50.0
    ) -> Any:
        """Start sending; a future."""
        peer = "b" if source == "a" else "a"
        return self.start(self.ends[source].send(peer, *piece, deadline_s=deadline_s))

    def deliver(self, num_tokens: int = 50, *, source: str = "a", **options: Any) -> None:
        """Send a part and see that it is there, byte for byte."""
        piece = self.make(num_tokens, **options)
        self.send(piece, source=source).result(WAIT_S)
        sink = self.sinks["b" if source == "a" else "a"]
        # By its index: a part that was given up may be stored in between.
        ((part, kv),) = [(p, kv) for p, kv in sink.parts if p.index == piece[0].index]
        assert part == piece[0]
        assert torch.equal(kv, piece[1].cpu())
        assert part.checksum in sink.digests

    def generation(self) -> int:
        """Of the channel from a to b; 0 when there is none."""
        return self.a.describe()["sending"].get("b", 0)

    def close_ends(self) -> None:
        for future in [self.start(end.close()) for end in self.ends.values()]:
            future.result(WAIT_S)

    def close(self) -> None:
        for sink in self.sinks.values():
            sink.gate.set()
        self.close_ends()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@contextmanager
def make_rig(make: Maker, device: torch.device | None = None) -> Iterator[Rig]:
    rig = Rig(make, device or torch.device("cpu"))
    try:
        yield rig
    finally:
        rig.close()


class LinesContract:
    """Subclass it in a module that has a fixture `rig`."""

    @pytest.mark.parametrize("num_tokens", [1, 60, 5_000, 40_000])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_part_arrives_whole(self, rig: Rig, num_tokens: int, dtype: torch.dtype) -> None:
        """From 256 bytes to 20 MB."""
        rig.deliver(num_tokens, dtype=dtype)

    def test_parts_arrive_in_order_over_one_channel(self, rig: Rig) -> None:
        pieces = [rig.make(size) for size in (3000, 1, 700, 20_000, 2, 1, 1)]
        for future in [rig.send(piece) for piece in pieces]:
            future.result(WAIT_S)
        assert [part.index for part, _ in rig.sink.parts] == [p.index for p, _ in pieces]
        assert rig.generation() == 1

    def test_both_directions_at_once(self, rig: Rig) -> None:
        there = [rig.make(size) for size in (4000, 10, 9000)]
        back = [rig.make(size) for size in (10, 8000, 5000)]
        futures = [rig.send(p) for p in there] + [rig.send(p, source="b") for p in back]
        for future in futures:
            future.result(WAIT_S)
        for sink, pieces in ((rig.sinks["b"], there), (rig.sinks["a"], back)):
            assert sink.digests == [p.checksum for p, _ in pieces]

    def test_a_stranger_is_refused_at_the_door(self, rig: Rig) -> None:
        rig.sink.known.clear()
        with pytest.raises(KVTransportError) as refusal:
            rig.send(rig.make(100)).result(WAIT_S)
        assert refusal.value.code == "refused"
        assert rig.b.describe()["receiving"] == {}

    def test_an_older_channel_is_never_joined(self, rig: Rig) -> None:
        rig.deliver()
        with pytest.raises(KVTransportError, match="newer") as refusal:
            rig.run(rig._invite("b", rig.offers[0]))
        assert refusal.value.code == "refused"
        rig.deliver()

    @pytest.mark.parametrize("num_tokens", [10, 5000])
    def test_what_is_not_wanted_is_refused_and_the_line_goes_on(
        self, rig: Rig, num_tokens: int
    ) -> None:
        rig.deliver()
        rig.sink.unwanted.add("over")
        for _ in range(3):
            with pytest.raises(KVTransportError) as refusal:
                rig.send(rig.make(num_tokens, "over")).result(WAIT_S)
            assert refusal.value.code == "refused"
        rig.deliver()
        assert rig.generation() == 1
        assert {part.transfer_id for part, _ in rig.sink.parts} == {"t"}

    def test_a_sink_that_fails_is_the_senders_news(self, rig: Rig) -> None:
        for error in (KVTransportError("no such row"), KVCacheExhausted("full"), ValueError("bug")):
            rig.sink.error = error
            with pytest.raises(KVTransportError, match=r"no such row|full|bug") as refusal:
                rig.send(rig.make(3000)).result(WAIT_S)
            assert refusal.value.code == "refused", "no other transport would do better"
        rig.sink.error = None
        rig.deliver()
        assert rig.generation() == 1

    def test_a_part_of_another_size_than_its_header_is_not_sent(self, rig: Rig) -> None:
        part, kv = rig.make(100)
        with pytest.raises(KVTransportError, match="its header says"):
            rig.send((part, kv[:1])).result(WAIT_S)
        assert rig.offers == []

    def test_a_slow_peer_costs_a_deadline_and_a_new_channel_follows(self, rig: Rig) -> None:
        rig.deliver()
        rig.sink.gate.clear()
        # That it ends at all while the gate is shut is the deadline's doing: how late it was told
        # is the machine's, which may stand still.
        with pytest.raises(KVTransportError) as late:
            rig.send(rig.make(5000), deadline_s=0.5).result(WAIT_S)
        assert late.value.code == "timeout"
        rig.sink.gate.set()
        rig.deliver()
        assert rig.generation() == 2

    def test_an_idle_channel_gives_its_files_back_and_is_made_again(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel_ends, "PING_INTERVAL_S", 0.05)
        monkeypatch.setattr(channel_ends, "MAX_IDLE_S", 0.2)
        num_open = 0
        for generation in range(1, 7):
            rig.deliver()
            # By the offers: the channel may be idle again already.
            assert [o.generation for o in rig.offers] == list(range(1, generation + 1))
            wait_until(lambda: not any(t.name.startswith("kv-") for t in threading.enumerate()))
            if generation == 2:  # the first one may open what all share
                num_open = len(os.listdir("/proc/self/fd"))
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_open)  # aborts end by themselves

    def test_an_abort_in_mid_part_ends_it_and_spares_the_others(self, rig: Rig) -> None:
        rig.deliver()
        rig.sink.gate.clear()
        rig.sink.has_begun.clear()
        doomed = rig.send(rig.make(5000, "doomed"))
        assert rig.sink.has_begun.wait(WAIT_S)
        others = [rig.send(rig.make(3000, "other")) for _ in range(3)]
        rig.run(rig.a.abort("b", "doomed"))
        with pytest.raises(KVTransportError) as end:
            doomed.result(WAIT_S)
        assert end.value.code == "aborted"
        rig.sink.gate.set()
        for future in others:
            future.result(WAIT_S)
        assert [p.transfer_id for p, _ in rig.sink.parts].count("other") == 3
        assert rig.generation() == 2

    def test_a_peer_that_cannot_be_asked_is_an_error_and_asked_again(self, rig: Rig) -> None:
        rig.refuse_invitations = True
        with pytest.raises(KVTransportError, match="no route"):
            rig.send(rig.make(100)).result(WAIT_S)
        rig.refuse_invitations = False
        rig.deliver()

    def test_closing_ends_the_threads(self, rig: Rig) -> None:
        others = set(threading.enumerate())  # an earlier rig's that was given up may yet end

        def num_channels() -> int:
            return sum(t.name.startswith("kv-") for t in set(threading.enumerate()) - others)

        rig.deliver()
        rig.deliver(source="b")
        assert num_channels() == 4
        rig.close_ends()
        wait_until(lambda: num_channels() == 0)
        with pytest.raises(KVTransportError, match="closed"):
            rig.send(rig.make(10)).result(WAIT_S)
