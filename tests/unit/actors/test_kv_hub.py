"""Which transport takes a part, when, and for how long one is left out."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from actors.kv_transfer.transport_hub import NO_ROUTE_RETRY_S, NOT_HERE, RETRY_S, TransportHub
from quadriga.clock import Clock, ManualClock, SystemClock
from quadriga.core.kv import KVPart
from quadriga.errors import ConfigError, KVTransportError
from quadriga.kv_transport import nccl_library, nixl
from quadriga.kv_transport.channel import NO_ROUTE, TOO_LARGE, NixlOffer
from quadriga.kv_transport.nccl_library import find_nccl
from tests.fake_nccl import FakeNccl

KV = torch.zeros(1, 2, 1, 4, 4)
PART = KVPart("t", 0, 0, 1, 0, 4, tuple(KV.shape), "float32", 0)


class RoutingDecision:
    """A transport that fails as it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.code: str | None = None
        self.deadlines_s: list[float] = []

    async def send(self, peer: str, part: KVPart, kv: Any, *, deadline_s: float) -> None:
        self.deadlines_s.append(deadline_s)
        if self.code is not None:
            raise KVTransportError(f"{self.name} failed", code=self.code)

    async def abort(self, peer: str, transfer_id: str) -> None: ...

    async def close(self) -> None: ...


def hub(kind: Any, clock: Clock | None = None, **options: Any) -> TransportHub:
    """One without a sink."""
    return TransportHub(
        kind, "me", None, lambda _: "127.0.0.1", clock=clock or SystemClock(), **options
    )


class Bench:
    """A hub over three such transports, and its clock."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.hub = hub("object_store", self.clock)
        self.ways = {name: RoutingDecision(name) for name in ("nccl", "gloo", "object_store")}
        self.hub._ways = list(self.ways.values())

    async def send(self, peer: str = "p", deadline_s: float = 8.0) -> list[str]:
        """Who was tried."""
        before = {name: len(way.deadlines_s) for name, way in self.ways.items()}
        await self.hub.send(peer, PART, KV, deadline_s=deadline_s)
        return [name for name, way in self.ways.items() if len(way.deadlines_s) > before[name]]


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_transport_that_failed_is_left_out_for_a_while_for_that_peer(bench: Bench) -> None:
    bench.ways["nccl"].code = "timeout"
    assert await bench.send() == ["nccl", "gloo"]
    assert await bench.send() == ["gloo"]
    assert await bench.send("another") == ["nccl", "gloo"]
    assert bench.hub.num_fallbacks == 2
    bench.clock.advance(RETRY_S)
    bench.ways["nccl"].code = None
    assert await bench.send() == ["nccl"]


async def test_a_transport_without_a_route_is_left_out_for_long(bench: Bench) -> None:
    bench.ways["nccl"].code = NO_ROUTE
    assert await bench.send() == ["nccl", "gloo"]
    bench.clock.advance(10 * RETRY_S)
    assert await bench.send() == ["gloo"]
    assert bench.hub.num_fallbacks == 1
    bench.clock.advance(NO_ROUTE_RETRY_S)
    await bench.send("another")
    assert set(bench.hub._again_s) == {("nccl", "another")}, "what is over is forgotten"


@pytest.mark.parametrize(("code", "deadline_s"), [(TOO_LARGE, 8.0), ("timeout", 3.0)])
async def test_a_part_too_large_or_too_urgent_for_a_transport_leaves_it_usable_for_the_next(
    bench: Bench, code: str, deadline_s: float
) -> None:
    bench.ways["nccl"].code = code
    assert await bench.send(deadline_s=deadline_s) == ["nccl", "gloo"]
    bench.ways["nccl"].code = None
    assert await bench.send() == ["nccl"]
    assert bench.hub.num_fallbacks == 0


@pytest.mark.parametrize("code", ["refused", "aborted"])
async def test_a_refused_part_is_sent_by_no_other_transport(bench: Bench, code: str) -> None:
    bench.ways["nccl"].code = code
    with pytest.raises(KVTransportError):
        await bench.send()
    assert bench.ways["gloo"].deadlines_s == []
    bench.ways["nccl"].code = None
    assert await bench.send() == ["nccl"]


async def test_each_transport_leaves_time_for_the_next(bench: Bench) -> None:
    for name in ("nccl", "gloo"):
        bench.ways[name].code = "timeout"
    await bench.send()
    # The clock stands still here: a share of what is left, and the last has all of it.
    assert [way.deadlines_s[-1] for way in bench.ways.values()] == [4.0, 4.0, 8.0]


async def test_a_transport_that_was_chosen_gives_way_only_where_the_peer_has_none(
    bench: Bench,
) -> None:
    """As in a roll-out to another kind; elsewhere its failures are told."""
    bench.hub.name = "nccl"
    bench.ways["nccl"].code = NO_ROUTE
    with pytest.raises(KVTransportError, match="nccl failed"):
        await bench.send()
    assert bench.ways["nccl"].deadlines_s == [8.0]
    assert bench.ways["gloo"].deadlines_s == []
    bench.ways["nccl"].code = NOT_HERE
    bench.ways["gloo"].code = "timeout"
    assert await bench.send() == ["nccl", "gloo", "object_store"]
    assert await bench.send() == ["object_store"]
    bench.ways["nccl"].code = None
    assert await bench.send("another") == ["nccl"]


async def test_each_kind_sends_by_its_transports_and_receives_by_two_more() -> None:
    def ways(kind: Any, **options: Any) -> tuple[str, ...]:
        made = hub(kind, **options)
        assert {"gloo", "object_store"} <= {*made.names}
        return tuple(way.name for way in made._ways)

    library = FakeNccl("A").library()
    assert ways("auto") == ("gloo", "object_store")
    assert ways("auto", nccl=library) == ("nccl", "gloo", "object_store")
    assert ways("gloo") == ("gloo",)
    assert ways("object_store") == ("object_store",)
    assert ways("nccl", nccl=library) == ("nccl", "gloo", "object_store")
    assert ways("nixl") == ("nixl", "gloo", "object_store")


def test_nccl_that_is_asked_for_and_missing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU") as refusal:
        hub("nccl", device="cuda")
    assert refusal.value.param == "transport.kind"
    made = hub("auto", device="cuda")
    assert made.names == ("gloo", "object_store")
    assert "without NCCL: torch sees no GPU" in caplog.text


async def test_an_offer_of_a_transport_that_is_not_here_is_told_so() -> None:
    made = hub("gloo")
    with pytest.raises(KVTransportError, match="receives over gloo, object_store alone") as refusal:
        made.connect(NixlOffer("p", "127.0.0.1", 1, 1, "token"))
    assert refusal.value.code == NOT_HERE


def test_nixl_that_is_asked_for_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"pip install .\.\[nixl\]") as refusal:
        hub("nixl")
    assert refusal.value.param == "transport.kind"


def test_a_missing_nccl_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KVTransportError, match="CuPy cannot be imported") as refusal:
        find_nccl()
    assert refusal.value.code == NO_ROUTE

    cupy, cuda, nccl = (ModuleType(n) for n in ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
    cupy.cuda, cuda.nccl = cuda, nccl  # type: ignore[attr-defined]
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    nccl.available = False  # type: ignore[attr-defined]
    with pytest.raises(KVTransportError, match="CuPy finds no NCCL"):
        find_nccl()
    nccl.available = True  # type: ignore[attr-defined]
    nccl.get_build_version = lambda: 22707  # type: ignore[attr-defined]
    nccl.get_version = lambda: 22605  # type: ignore[attr-defined]
    with pytest.raises(KVTransportError, match="version 22605"):
        find_nccl()
    nccl.get_version = lambda: 22703  # type: ignore[attr-defined]
    nccl.NCCL_UINT8 = 1  # type: ignore[attr-defined]
    monkeypatch.setattr(nccl_library, "gpu_name", lambda index: f"boot/{index}")
    assert find_nccl().device.gpu == "boot/3"
