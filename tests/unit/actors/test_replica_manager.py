"""What the controller's book decides about a replica that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import RayError

from actors.controller import replica_manager
from actors.controller.replica_manager import (
    ADOPTED_SILENCE_S,
    ReplicaHandle,
    ReplicaManager,
    ReplicaPhase,
)
from quadriga.clock import ManualClock
from quadriga.config.ingress import LifecycleConfig
from quadriga.control.replica_record import ReplicaLoad, ReplicaStatus
from quadriga.core.replica import Role
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError
from quadriga.policies.liveness import STALL_PATIENCE

LIMIT_S = 8.0
NOW_S = 1000.0


def fleet_of(
    clock: ManualClock | None = None, changed: Callable[[], None] = lambda: None, **options: Any
) -> ReplicaManager:
    fleet = ReplicaManager("app", clock or ManualClock(NOW_S), changed, lambda: 0.0, **options)
    fleet.lifecycle = LifecycleConfig(heartbeat_interval_s=0.01)
    return fleet


def replica_of(
    phase: ReplicaPhase, handle: Any = None, *, number: int = 0, silence_s: float | None = None
) -> ReplicaHandle:
    """A replica that was heard of so long ago, or never."""
    heard_s = None if silence_s is None else NOW_S - silence_s
    return ReplicaHandle(
        (Role.DECODE, number), f"d{number}", NOW_S, "same", phase, heard_s, handle=handle
    )


def status_of(error: QuadrigaError | None = None) -> ReplicaStatus:
    info: Any = None
    return ReplicaStatus(info, True, False, error, ReplicaLoad(), "same")


@asynccontextmanager
async def watched(fleet: ReplicaManager, member: ReplicaHandle) -> AsyncIterator[None]:
    """A replica that is watched; what a test waits for comes within a minute."""
    fleet._watch(member)
    try:
        async with asyncio.timeout(60):
            yield
    finally:
        for task in member.tasks:
            task.cancel()


def verdicts(silences_s: Sequence[float]) -> list[str | None]:
    """What the fleet decides of replicas that were last heard of so long ago."""
    fleet = fleet_of()
    members = [
        replica_of(ReplicaPhase.READY, number=i, silence_s=silence_s)
        for i, silence_s in enumerate(silences_s)
    ]
    fleet.replicas = {m.name: m for m in members}
    return [asyncio.run(fleet._verdict(m, LIMIT_S)) for m in members]


def test_a_hung_replica_is_replaced_and_a_stall_is_waited_out() -> None:
    healthy, hung = verdicts([0.5, LIMIT_S + 1])
    assert healthy is None
    assert hung is not None
    assert "hung" in hung
    assert verdicts([LIMIT_S + 1, LIMIT_S + 1]) == [None, None]
    beyond = LIMIT_S * STALL_PATIENCE + 1
    assert None not in verdicts([beyond, beyond]), "a stall is not waited for for ever"


async def test_who_was_not_ready_in_time_is_told_with_what_it_did_and_the_setting() -> None:
    fleet, member = fleet_of(), replica_of(ReplicaPhase.STARTING, silence_s=0.0)
    member.since_s -= fleet.lifecycle.replica_start_timeout_s + 1.0
    member.status = replace(status_of(), is_ready=False, loading="reads the weights: 21%")
    told = await fleet._verdict(member, LIMIT_S)
    assert told is not None and "at last: reads the weights: 21%" in told
    assert "raise lifecycle.replica_start_timeout_s" in told


class Handle:
    """A replica's process, which is well once it `is_placed`, and not to be asked before."""

    def __init__(self) -> None:
        self.is_placed = False
        self.num_early = 0
        self.heartbeat = self._Method(self._beat)
        self.wait_forever = self._Method(asyncio.Event().wait)

    class _Method:
        def __init__(self, answer: Any) -> None:
            self._answer = answer

        async def remote(self, *told: Any) -> Any:
            self.told = told
            return await self._answer()

    async def _beat(self) -> ReplicaStatus:
        self.num_early += not self.is_placed
        return status_of()


async def test_a_replica_is_watched_on_while_the_control_store_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One look that fails must not leave a place that nobody looks after.

    Ray keeps each call to a process that has no place: over weeks they would be many.
    """
    handle: Any = Handle()
    answers = [RayError("the control store is away"), RuntimeError("still"), False, False]

    def is_placed(name: str) -> bool:
        answer = answers.pop(0) if answers else True
        if isinstance(answer, Exception):
            raise answer
        handle.is_placed = bool(answer)
        return handle.is_placed

    monkeypatch.setattr(replica_manager, "is_placed", is_placed)
    ready = asyncio.Event()
    member = replica_of(ReplicaPhase.PENDING, handle)
    fleet = fleet_of(changed=ready.set, is_scout=lambda replica: replica is member)
    fleet.failing.add((member.key, "same"))
    async with watched(fleet, member):
        await ready.wait()
        assert member.phase is ReplicaPhase.READY and handle.num_early == 0
        assert handle.heartbeat.told == (0.0, True), "of ingresses, and that it is a scout"
        assert not fleet.failing


async def test_a_place_is_given_back_once_the_control_store_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    removed, changed = asyncio.Event(), asyncio.Event()

    def remove(name: str, handle: Any) -> None:
        tried.append(name)
        if len(tried) < 3:
            raise RayError("the control store is away")
        loop.call_soon_threadsafe(removed.set)

    async def told(*_: Any, **__: Any) -> None:
        return

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(replica_manager, "remove", remove)
    monkeypatch.setattr(replica_manager, "call", told)
    monkeypatch.setattr(replica_manager, "REMOVE_PAUSE_S", 0.001)
    fleet, member = fleet_of(changed=changed.set), replica_of(ReplicaPhase.READY)
    fleet.replicas["d0"] = member
    fleet._num_failures[member.key, "same"] = 2_000
    await fleet._gone(member, "died")
    assert not fleet.may_spawn(member.key)
    assert changed.is_set(), "a replacement does not wait for it"
    async with asyncio.timeout(20):
        await removed.wait()
    assert tried == ["d0"] * 3


@pytest.mark.parametrize("is_placed", [True, False, None])
async def test_an_adopted_replica_that_never_answers_is_hung_once_it_is_placed(
    is_placed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was just placed loads its code; one that has no place must not block another's."""
    placed = is_placed

    def has_place(name: str) -> bool:
        if placed is None:
            raise RayError("the control store is away")
        return placed

    monkeypatch.setattr(replica_manager, "is_placed", has_place)
    monkeypatch.setattr(replica_manager, "background", lambda coroutine: coroutine.close())
    clock = ManualClock(NOW_S)
    fleet = fleet_of(clock)
    handle: Any = Handle()
    fleet.adopt((Role.DECODE, 0), "d0", handle)
    member = fleet.replicas["d0"]

    async def verdict(after_s: float) -> str | None:
        clock.advance(after_s)
        return await fleet._verdict(member, LIMIT_S)

    assert await verdict(LIMIT_S) is None
    assert await verdict(LIMIT_S) is None
    late = await verdict(ADOPTED_SILENCE_S)
    if is_placed:
        assert late == f"hung: no answer for {LIMIT_S + ADOPTED_SILENCE_S:.1f} s"
        return
    if is_placed is False:
        assert late == "an earlier controller asked for it, without a place for 46 s"
        return
    assert late is None and member.phase is ReplicaPhase.PENDING
    placed = True
    assert await verdict(1.0) is None
    assert await verdict(ADOPTED_SILENCE_S - 1.0) is None
    assert "hung" in (await verdict(2.0) or "")


async def test_an_adopted_replica_that_drains_is_retired_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing undoes a drain: as a current replica it would keep its place and serve nobody.

    It is not ended with what it holds because it could not be reached for a moment.
    """
    status = replace(status_of(), is_draining=True)
    lost = ReplicaDied("the connection broke", code="unreachable")
    to_replica = AsyncMock(side_effect=[status, lost, True, None])
    monkeypatch.setattr(replica_manager, "call_handle", to_replica)
    monkeypatch.setattr(replica_manager, "call", AsyncMock())
    monkeypatch.setattr(replica_manager, "remove", lambda name, handle: None)
    monkeypatch.setattr(replica_manager, "STOP_GRACE_S", 0.01)
    monkeypatch.setattr(replica_manager, "REMOVE_PAUSE_S", 0.001)
    fleet, member = fleet_of(), replica_of(ReplicaPhase.PENDING)
    monkeypatch.setattr(replica_manager, "is_placed", lambda name: True)
    fleet.replicas["d0"] = member
    await fleet._heartbeat(member)
    assert member.phase is ReplicaPhase.RETIRING, "at the first look"
    await member.tasks[-1]
    asked = [one.args[2] for one in to_replica.mock_calls]
    assert asked == ["heartbeat", "drain", "drain", "stop"]
    assert not fleet.replicas


async def test_a_controller_that_stalled_marks_no_replica_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its timers are over when it wakes, and the answer that lies there comes too late."""
    clock, beats = ManualClock(NOW_S), 0
    done = asyncio.Event()

    async def heartbeat(*_: Any, **options: Any) -> ReplicaStatus:
        nonlocal beats
        beats += 1
        if beats == 2:
            clock.advance(500.0)
            raise ReplicaError("no answer", code="timeout")
        if beats == 5:
            done.set()
        return status_of()

    monkeypatch.setattr(replica_manager, "call_handle", heartbeat)
    fleet, member = fleet_of(clock), replica_of(ReplicaPhase.STARTING)
    async with watched(fleet, member):
        await done.wait()
        assert fleet.replicas == {"d0": member}


async def test_a_partitioned_controller_marks_no_replica_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither while the link is broken, nor for the silence of that time once it is mended."""
    clock = ManualClock(NOW_S)
    is_held, beats, gone = False, 0, asyncio.Event()
    gone_at: list[int] = []

    async def heartbeat(*_: Any, **options: Any) -> ReplicaStatus:
        nonlocal is_held, beats
        beats += 1
        clock.advance(4.0)
        is_held = beats > 30
        raise ReplicaError("no answer", code="timeout")

    async def held() -> bool:
        return is_held

    async def note_gone(member: ReplicaHandle, reason: str) -> None:
        gone_at.append(beats)
        gone.set()

    monkeypatch.setattr(replica_manager, "call_handle", heartbeat)
    fleet = fleet_of(clock, is_held=held)
    monkeypatch.setattr(fleet, "_gone", note_gone)
    async with watched(fleet, replica_of(ReplicaPhase.READY, Handle(), silence_s=0.0)):
        await gone.wait()
        assert gone_at[0] == 33, "two more were within the limit"


@pytest.mark.parametrize("call", ["heartbeat", "wait_forever"])
async def test_an_unexpected_error_ends_no_watch(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom nobody watches any more is never ready, and never hung."""
    monkeypatch.setattr(replica_manager, "is_placed", lambda name: True)
    handle: Any = Handle()
    handle.is_placed = True
    asked = 0
    method: Any = getattr(handle, call)

    class Failing:
        async def remote(self, *args: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise MemoryError("none left")
            return await method.remote(*args)

    setattr(handle, call, Failing())
    sleep = asyncio.sleep
    monkeypatch.setattr(replica_manager.asyncio, "sleep", lambda _: sleep(0.001))
    ready = asyncio.Event()
    member = replica_of(ReplicaPhase.PENDING, handle)
    async with watched(fleet_of(changed=ready.set), member):
        await ready.wait()
        while asked < 2:
            await sleep(0.001)
        assert member.phase is ReplicaPhase.READY
        assert not any(task.done() for task in member.tasks[:2])


async def test_a_partitioned_controller_ends_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one whose engine has failed: another controller may have replaced it by now."""
    broken, held, gone = status_of(ReplicaError("broken")), AsyncMock(), AsyncMock()
    monkeypatch.setattr(replica_manager, "call_handle", AsyncMock(return_value=broken))
    fleet, member = fleet_of(is_held=held), replica_of(ReplicaPhase.READY, Handle(), silence_s=0.0)
    monkeypatch.setattr(fleet, "_gone", gone)
    held.return_value = False
    await fleet._heartbeat(member)
    gone.assert_not_awaited()
    held.return_value = True
    await fleet._heartbeat(member)
    gone.assert_awaited_once_with(member, "its engine failed: broken")
