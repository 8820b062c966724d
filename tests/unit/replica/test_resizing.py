"""Orders to change depth: what waits, what is refused, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from quadriga.clock import SystemClock
from quadriga.errors import ConfigError
from quadriga.replica.resizing import Resizing


@dataclass
class FakeRunner:
    """Loads by itself what it is asked for."""

    num_layers: int = 8
    depths: tuple[int, ...] = (2, 4, 8)
    failure: Exception | None = None
    closed: int = 0

    @property
    def kv_capacity_tokens(self) -> int:
        return 800 // self.num_layers

    @property
    def weights(self) -> Any:
        return SimpleNamespace(embed=SimpleNamespace(nbytes=10), layers=[])

    @property
    def spec(self) -> Any:
        return SimpleNamespace(depth=self.num_layers)

    def prepare_depth(self, depth: int, *, timeout_s: float) -> Any:
        if self.failure is not None:
            raise self.failure

        @contextlib.contextmanager
        def prepared() -> Iterator[None]:
            yield
            self.closed += 1

        made = prepared()
        made.load_s = 0.5  # type: ignore[attr-defined]
        return made


@dataclass
class FakeHost:
    """A replica and its core in one."""

    resizable: FakeRunner | None
    blockers: list[list[str]] = field(default_factory=list)
    at_change: list[list[str]] = field(default_factory=list)
    given_up: int = 0
    served: list[int] = field(default_factory=list)
    clock: SystemClock = field(default_factory=SystemClock)

    async def on_engine(self, command: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(0)
        return command(self)

    def in_the_way(self, depth: int) -> list[str]:
        if len(self.blockers) > 1:
            return self.blockers.pop(0)
        return self.blockers[0] if self.blockers else []

    def change(self, depth: int, prepared: Any) -> list[str]:
        if self.at_change:
            return self.at_change.pop(0)
        assert self.resizable is not None
        self.resizable.num_layers = depth
        return []

    def give_up(self) -> None:
        self.given_up += 1

    def resized(self, engine: Any) -> None:
        self.served.append(engine.depth)


async def test_a_replica_drops_layers_and_loads_them_again() -> None:
    runner = FakeRunner()
    host = FakeHost(runner)
    resizing = Resizing(host)
    down = await resizing.resize(4, 5.0)
    assert (down.outcome, down.before, down.depth) == ("resized", 8, 4)
    assert down.kv_capacity_tokens == 200 and down.load_s == 0.0
    up = await resizing.resize(8, 5.0)
    assert (up.outcome, up.load_s, runner.closed) == ("resized", 0.5, 1)
    assert (await resizing.resize(8, 5.0)).outcome == "unchanged"
    assert host.served == [4, 8]


async def test_sequences_that_need_the_layers_are_waited_for() -> None:
    host = FakeHost(FakeRunner(), blockers=[["a"], ["a"], []], at_change=[["late"]])
    report = await Resizing(host).resize(4, 5.0)
    assert report.outcome == "resized" and report.held_s > 0.0


async def test_a_sequence_that_stays_blocks_the_change() -> None:
    host = FakeHost(FakeRunner(), blockers=[["a", "b"]])
    report = await Resizing(host).resize(4, 0.05)
    assert report.outcome == "blocked" and report.depth == 8
    assert "2 sequences" in report.reason and host.given_up == 1 and host.served == []


async def test_layers_that_cannot_be_loaded_leave_the_old_ones_serving() -> None:
    runner = FakeRunner(num_layers=4, failure=ConfigError("model: layer 5 is damaged"))
    host = FakeHost(runner)
    report = await Resizing(host).resize(8, 5.0)
    assert report.outcome == "failed" and "layer 5 is damaged" in report.reason
    assert report.depth == 4 and host.served == []


async def test_orders_that_cannot_be_carried_out_are_refused() -> None:
    host = FakeHost(FakeRunner(), blockers=[["a"]])
    resizing = Resizing(host)
    first = asyncio.create_task(resizing.resize(4, 0.2))
    await asyncio.sleep(0.02)
    assert (await resizing.resize(2, 1.0)).reason.startswith("under_way")
    assert (await first).outcome == "blocked"
    assert (await resizing.resize(3, 1.0)).reason.startswith("no_such_depth")
    fixed = await Resizing(FakeHost(None)).resize(4, 1.0)
    assert fixed.reason.startswith("not_resizable")
