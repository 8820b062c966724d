"""One scheduler, which is blamed for nobody's silence but its own."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayError

from actors.controller import watchdogs
from actors.controller.watchdogs import CALL_TIMEOUT_S, SchedulerWatch
from quadriga.clock import ManualClock
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError
from quadriga.policies.liveness import SCHEDULER_SILENCE_S as SILENCE_S

LATE = ReplicaError("no answer", code="timeout")


class World:
    """A scheduler as its watch meets it.

    Attributes:
        failure: What whoever calls it gets.
        call_takes_s: Until then.
        make_failure: What whoever starts one gets.
        did: Everything that was asked of Ray.
        is_held: Whether the controller may act.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock(1000.0)
        self.failure: QuadrigaError | None = None
        self.call_takes_s = 0.0
        self.make_failure: Exception | None = None
        self.did: list[str] = []
        self.is_held = True
        monkeypatch.setattr(watchdogs, "call", self._call)
        monkeypatch.setattr(watchdogs, "restart", self._restart)
        monkeypatch.setattr(watchdogs, "create_or_get", self._make)
        self.watch = SchedulerWatch("app", self.clock, self._may_act)

    async def configure(self, times: int = 1) -> None:
        for _ in range(times):
            await self.watch.configure({"a": 1}, ["m"], 0.5)

    async def _call(self, name: str, method: str, *args: Any, timeout_s: float) -> None:
        assert name == "app:scheduler" and timeout_s == CALL_TIMEOUT_S
        assert args == (({"a": 1}, ["m"], 0.5) if method == "configure" else ())
        self.clock.advance(self.call_takes_s)
        if self.failure is not None:
            raise self.failure

    async def _restart(self, name: str) -> None:
        self.did.append(f"restart {name}")

    def _make(self, cls: type, name: str, config: dict[str, Any]) -> None:
        self.did.append(f"make {name} {config}")
        if self.make_failure is not None:
            raise self.make_failure

    async def _may_act(self) -> bool:
        return self.is_held


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_a_scheduler_that_answers_is_kept(world: World) -> None:
    world.call_takes_s = 1.0
    await world.configure(times=100)
    await world.watch.stop()
    assert world.did == []


async def test_a_scheduler_that_is_gone_for_good_is_made_again(world: World) -> None:
    """Ray starts one that died anew, but none that ended itself."""
    world.failure = ReplicaDied("it died")
    world.make_failure = RayError("the control store is away")
    await world.configure(times=2)
    assert world.did == ["make app:scheduler {'a': 1}"] * 2


async def test_a_scheduler_that_cannot_be_reached_is_not_made_again(world: World) -> None:
    world.failure = ReplicaDied("away for now", code="unreachable")
    world.call_takes_s = CALL_TIMEOUT_S
    await world.configure(times=100)
    assert world.did == []


async def test_an_application_that_ends_makes_no_scheduler(world: World) -> None:
    world.failure = ReplicaDied("it was stopped")
    world.watch.retire()
    await world.configure()
    await world.watch.stop()
    assert world.did == []


@pytest.mark.parametrize("call_takes_s", [CALL_TIMEOUT_S, 15 * CALL_TIMEOUT_S])
async def test_only_a_schedulers_own_silence_counts(world: World, call_takes_s: float) -> None:
    """A call has two seconds; in what it takes beyond them this process stood still itself."""
    world.failure = LATE
    world.call_takes_s = call_takes_s
    await world.configure(times=int(SILENCE_S / CALL_TIMEOUT_S))
    assert world.did == []
    await world.configure()
    assert world.did == ["restart app:scheduler"]
    await world.configure()
    assert len(world.did) == 1, "it has as long again to come back"


async def test_a_controller_without_the_lease_restarts_no_scheduler(world: World) -> None:
    world.failure = LATE
    world.call_takes_s = CALL_TIMEOUT_S
    world.is_held = False
    await world.configure(times=100)
    world.is_held = True
    await world.configure(times=int(SILENCE_S / CALL_TIMEOUT_S))
    assert world.did == []


async def test_an_excuse_reaches_no_further_than_now(world: World) -> None:
    world.failure = LATE
    world.call_takes_s = CALL_TIMEOUT_S
    world.watch.excuse(1e6)
    assert world.watch.silence_s == 0.0
    await world.configure(times=int(SILENCE_S / CALL_TIMEOUT_S) + 1)
    assert world.did == ["restart app:scheduler"]
