"""What the controller's book decides about a replica that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayError

import actors.controller.replica_manager
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
from quadriga.errors import ReplicaError
from quadriga.policies.liveness import STALL_PATIENCE

LIMIT_S = 8.0


def verdicts(silences_s: Sequence[float]) -> list[str | None]:
    """What the fleet decides of replicas that were last heard of so long ago."""
    clock = ManualClock(1000.0)
    fleet = ReplicaManager("app", clock, lambda: None, lambda: 0.0)
    handle: Any = None
    members = [
        ReplicaHandle(
            (Role.DECODE, i),
            f"d{i}",
            0.0,
            "same",
            ReplicaPhase.READY,
            clock.now_s() - silence_s,
            handle=handle,
        )
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


class Handle:
    """A replica's process: it has no place at first, and is well once it `is_placed`."""

    def __init__(self) -> None:
        self.is_placed = False
        self.heartbeat = self._Method(self._beat)
        self.wait_forever = self._Method(asyncio.Event().wait)

    class _Method:
        def __init__(self, answer: Any) -> None:
            self._answer = answer

        async def remote(self, *_: Any) -> Any:
            return await self._answer()

    async def _beat(self) -> ReplicaStatus:
        if not self.is_placed:
            raise ActorUnavailableError("it has no place", None)
        info: Any = None
        return ReplicaStatus(info, True, False, None, ReplicaLoad(), "same")


async def test_a_replica_is_watched_on_while_the_control_store_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One look that fails must not leave a place that nobody looks after."""
    handle: Any = Handle()
    failures = [RayError("the control store is away"), RuntimeError("still")]

    def groups() -> list[tuple[str, str]]:
        if failures:
            raise failures.pop()
        handle.is_placed = True
        return [("d0", "CREATED")]

    monkeypatch.setattr(actors.controller.replica_manager, "groups", groups)
    ready = asyncio.Event()
    clock = ManualClock(1000.0)
    fleet = ReplicaManager("app", clock, ready.set, lambda: 0.0)
    fleet.lifecycle = LifecycleConfig(heartbeat_interval_s=0.01)
    member = ReplicaHandle((Role.DECODE, 0), "d0", clock.now_s(), "same", handle=handle)
    fleet._watch(member)
    try:
        async with asyncio.timeout(5):
            await ready.wait()
        assert member.phase is ReplicaPhase.READY
    finally:
        for task in member.tasks:
            task.cancel()


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
    monkeypatch.setattr(actors.controller.replica_manager, "remove", remove)
    monkeypatch.setattr(actors.controller.replica_manager, "call", told)
    monkeypatch.setattr(actors.controller.replica_manager, "REMOVE_PAUSE_S", 0.001)
    fleet = ReplicaManager("app", ManualClock(1000.0), changed.set, lambda: 0.0)
    handle: Any = None
    member = ReplicaHandle((Role.DECODE, 0), "d0", 0.0, "same", ReplicaPhase.READY, handle=handle)
    fleet.replicas["d0"] = member
    await fleet._gone(member, "died")
    assert changed.is_set(), "a replacement does not wait for it"
    async with asyncio.timeout(20):
        await removed.wait()
    assert tried == ["d0"] * 3


@pytest.mark.parametrize("is_placed", [True, False])
async def test_an_adopted_replica_that_never_answers_is_hung_once_it_is_placed(
    is_placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for its place cannot answer, and one that was just placed loads its code."""
    placed = is_placed
    state = {True: "CREATED", False: "PENDING"}
    monkeypatch.setattr(
        actors.controller.replica_manager, "groups", lambda: [("d0", state[placed])]
    )
    monkeypatch.setattr(
        actors.controller.replica_manager, "background", lambda coroutine: coroutine.close()
    )
    clock = ManualClock(1000.0)
    fleet = ReplicaManager("app", clock, lambda: None, lambda: 0.0)
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
    assert late is None and member.phase is ReplicaPhase.PENDING
    placed = True
    assert await verdict(1.0) is None
    assert await verdict(ADOPTED_SILENCE_S - 1.0) is None
    assert "hung" in (await verdict(2.0) or "")


async def test_a_controller_that_stalled_marks_no_replica_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its timers are over when it wakes, and the answer that lies there comes too late."""
    clock, beats = ManualClock(1000.0), 0
    done = asyncio.Event()

    async def heartbeat(*_: Any, **options: Any) -> ReplicaStatus:
        nonlocal beats
        beats += 1
        if beats == 2:
            clock.advance(500.0)
            raise ReplicaError("no answer", code="timeout")
        if beats == 5:
            done.set()
        status: Any = ReplicaStatus(None, True, False, None, ReplicaLoad(), "same")  # type: ignore[arg-type]
        return status

    monkeypatch.setattr(actors.controller.replica_manager, "call_handle", heartbeat)
    fleet = ReplicaManager("app", clock, lambda: None, lambda: 0.0)
    fleet.lifecycle = LifecycleConfig(heartbeat_interval_s=0.01)
    handle: Any = None
    member = ReplicaHandle(
        (Role.DECODE, 0), "d0", clock.now_s(), "same", ReplicaPhase.STARTING, handle=handle
    )
    fleet._watch(member)
    try:
        async with asyncio.timeout(5):
            await done.wait()
        assert fleet.replicas == {"d0": member}
    finally:
        for task in member.tasks:
            task.cancel()


async def test_a_partitioned_controller_marks_no_replica_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither while the link is broken, nor for the silence of that time once it is mended."""
    clock = ManualClock(1000.0)
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

    monkeypatch.setattr(actors.controller.replica_manager, "call_handle", heartbeat)
    fleet = ReplicaManager("app", clock, lambda: None, lambda: 0.0, is_held=held)
    fleet.lifecycle = LifecycleConfig(heartbeat_interval_s=0.01)
    monkeypatch.setattr(fleet, "_gone", note_gone)
    handle: Any = Handle()
    member = ReplicaHandle(
        (Role.DECODE, 0), "d0", 1000.0, "same", ReplicaPhase.READY, clock.now_s(), handle=handle
    )
    fleet._watch(member)
    try:
        async with asyncio.timeout(5):
            await gone.wait()
        assert gone_at[0] == 33, "two more were within the limit"
    finally:
        for task in member.tasks:
            task.cancel()


@pytest.mark.parametrize("call", ["heartbeat", "wait_forever"])
async def test_an_unexpected_error_ends_no_watch(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom nobody watches any more is never ready, and never hung."""
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
    monkeypatch.setattr(actors.controller.replica_manager.asyncio, "sleep", lambda _: sleep(0.001))
    ready = asyncio.Event()
    fleet = ReplicaManager("app", ManualClock(1000.0), ready.set, lambda: 0.0)
    member = ReplicaHandle((Role.DECODE, 0), "d0", 1000.0, "same", handle=handle)
    fleet._watch(member)
    try:
        async with asyncio.timeout(5):
            await ready.wait()
            while asked < 2:
                await sleep(0.001)
        assert member.phase is ReplicaPhase.READY
        assert not any(task.done() for task in member.tasks)
    finally:
        for task in member.tasks:
            task.cancel()


async def test_a_partitioned_controller_ends_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even one whose engine has failed: another controller may have replaced it by now."""
    is_held, gone = False, []

    async def held() -> bool:
        return is_held

    async def note_gone(member: ReplicaHandle, reason: str) -> None:
        gone.append(reason)

    async def heartbeat(*_: Any, **__: Any) -> ReplicaStatus:
        info: Any = None
        return ReplicaStatus(info, True, False, ReplicaError("broken"), ReplicaLoad(), "same")

    monkeypatch.setattr(actors.controller.replica_manager, "call_handle", heartbeat)
    fleet = ReplicaManager("app", ManualClock(1000.0), lambda: None, lambda: 0.0, is_held=held)
    monkeypatch.setattr(fleet, "_gone", note_gone)
    handle: Any = Handle()
    member = ReplicaHandle(
        (Role.DECODE, 0), "d0", 1000.0, "same", ReplicaPhase.READY, 1000.0, handle=handle
    )
    await fleet._heartbeat(member)
    assert gone == []
    is_held = True
    await fleet._heartbeat(member)
    assert gone == ["its engine failed: broken"]
