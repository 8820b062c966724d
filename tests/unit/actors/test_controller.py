"""The controller's loop outlives what fails in one turn; nobody else would take it up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import RayError

from actors.controller import controller as module
from actors.controller.controller import Controller
from actors.controller.replica_manager import ReplicaHandle
from quadriga.clock import ManualClock
from quadriga.config.ingress import LifecycleConfig
from quadriga.config.loader import load_config
from quadriga.config.resolve import Deployment, Hardware, ReplicaSpec
from quadriga.control.desired import Desired, resolve_on
from quadriga.control.replica_names import fingerprint
from quadriga.control.replica_record import PlaceKey, ReplicaLoad, ReplicaPhase, ReplicaStatus
from quadriga.control.rollout import FIRST_ANSWER_S
from quadriga.core.replica import DepthClass, ReplicaInfo, Role
from quadriga.errors import ConfigError, ReplicaDied
from tests.waiting import until


def plain(config: dict[str, Any]) -> dict[str, Any]:
    return load_config(config).model_dump(mode="json", exclude={"auth"})


CONFIG = plain({})
NOTHING = Desired(CONFIG, Deployment(load_config(CONFIG), (), ()), {}, Hardware(2.0))


def resolved(config: dict[str, Any], _: float) -> Desired:
    """On some machine; what a controller starts with asks for nothing."""
    return NOTHING if config == CONFIG else resolve_on(config, Hardware(8.0))


class Failing:
    """A function that fails so often before it answers."""

    def __init__(self, answer: Any, *failures: Exception) -> None:
        self.num_calls = 0
        self._answer = answer
        self._failures = list(failures)

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.num_calls += 1
        if self._failures:
            raise self._failures.pop(0)
        return self._answer


async def unheard(*_: Any, **__: Any) -> None:
    """A call whose answer nobody needs."""


@asynccontextmanager
async def controller(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> AsyncIterator[Controller]:
    """One over no cluster; `parts` of its module are exchanged."""
    usual = {
        "living_replicas": Failing([]),
        "groups_of": Failing([]),
        "resolve_here": Failing(NOTHING),
        "remove": lambda name, _: None,
        "end_this_actor": unheard,
        "TICK_S": 0.001,
    }
    for name, part in (usual | parts).items():
        monkeypatch.setattr(module, name, part)
    kept: dict[str, bytes] = {}
    monkeypatch.setattr("actors.controller.controller_store.load", lambda _, what: kept.get(what))
    monkeypatch.setattr(
        "actors.controller.controller_store.save", lambda _, what, value: kept.update({what: value})
    )
    monkeypatch.setattr("actors.controller.watchdogs.call", unheard)
    monkeypatch.setattr("actors.controller.drain.LeavingNodes.look", unheard)
    monkeypatch.setattr("actors.controller.replica_manager.ReplicaManager.tell_scheduler", unheard)
    made = Controller("app", CONFIG)
    try:
        yield made
    finally:
        made._is_ending = True
        made._wake.set()


async def test_the_controller_adopts_replicas_once_the_control_store_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    living = Failing([], RayError("away"), RuntimeError("still away"))
    async with controller(monkeypatch, living_replicas=living) as made:
        await made.ensure(CONFIG)
        assert living.num_calls == 3
        await until(lambda: made._desired is not None and made._error is None)


async def test_a_replica_that_ray_does_not_find_now_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its placement group must not be taken for one whose replica is gone: it would die with it."""
    living = Failing(["app:decode:0:abc"])
    lost = ReplicaDied("the store is slow", code="unreachable")
    found = Failing(None, lost, lost, ReplicaDied("it died"))
    removed: list[str] = []

    async def find_actor(*_: Any) -> Any:
        return found()

    async with controller(
        monkeypatch,
        remove=lambda name, _: removed.append(name),
        living_replicas=living,
        find_actor=find_actor,
        groups_of=lambda *_: ["app:decode:0:abc"],
    ) as made:
        await until(lambda: living.num_calls >= 2)
        assert removed == []
        await until(lambda: removed == ["app:decode:0:abc"])
        await until(lambda: made._desired is not None)


async def test_what_cannot_be_served_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes with the GPUs may join later than the controller is back."""
    missing = [ConfigError("the cluster has no GPU")] * 3
    async with controller(monkeypatch, resolve_here=Failing(NOTHING, *missing)) as made:
        await until(lambda: made._error == "the cluster has no GPU")
        await until(lambda: made._desired is NOTHING)
        await until(lambda: made._error is None)


async def test_gpus_that_are_away_for_a_moment_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither when another ingress starts, nor when the controller restarts."""
    monkeypatch.setattr("actors.controller.replica_manager.ReplicaManager.may_spawn", Failing(None))
    there, resolve_here = [Hardware(8.0, 3.0)], module.resolve_here
    monkeypatch.setattr(module, "cluster_hardware", lambda: there[-1])
    async with controller(monkeypatch, resolve_here=resolve_here) as made:
        await until(lambda: made._desired is not None)
        first = made._desired
        assert first is not None and len(first.places) == 3
        for num_gpus in (0.0, 1.0):
            there.append(Hardware(8.0, num_gpus))
            await made.ensure(CONFIG)
            assert made._desired == first
            monkeypatch.setattr(made, "_desired", None)
            await until(lambda: made._desired is not None)
            assert made._desired == first
        await made.ensure(plain({"decode.max_slots": 4}))
        other = made._desired
        assert other is not None and len(other.places) == 1, "another goes by what is there"


async def test_turns_follow_and_a_route_is_sent_whatever_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with controller(monkeypatch) as made:
        await until(lambda: made._desired is not None)
        helios = SimpleNamespace(tick=Failing(None))

        async def reconcile() -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(made, "_reconcile", reconcile)
        monkeypatch.setattr(made, "_helios", helios)
        await until(lambda: helios.tick.num_calls > 2)
        assert made._error == "'a bug'"
        monkeypatch.setattr(made, "_reconcile", AsyncMock())
        await until(lambda: made._error is None)


async def test_a_partitioned_controller_acts_on_nothing_and_marks_no_replica_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it asked Ray for would be done when the link is mended: all would be ended."""
    acted: list[str] = []

    async def act(*_: Any) -> None:
        acted.append("something")

    async with controller(monkeypatch) as made:
        await until(lambda: made._desired is not None)
        is_held, num_asked = False, 0

        async def held() -> bool:
            nonlocal num_asked
            num_asked += 1
            return is_held

        monkeypatch.setattr(made._leader_lease, "is_held", held)
        await until(lambda: num_asked > 0)  # the turn before is over
        clock = ManualClock(1000.0)
        monkeypatch.setattr(made, "_clock", clock)
        monkeypatch.setattr(made._scheduler, "_clock", clock)
        made._acted_s = made._heard_s = made._scheduler._heard_s = clock.now_s()
        for part in ("_reconcile", "_end", "_adopt"):
            monkeypatch.setattr(made, part, act)
        for _ in range(20):
            clock.advance(50.0)
            await asyncio.sleep(0.005)
        await until(lambda: clock.now_s() - made._acted_s < 1.0)
        assert acted == []
        assert made._ingress_age_s() < 1.0
        assert made._scheduler.silence_s < 1.0
        is_held = True
        await until(lambda: bool(acted))


async def test_a_store_that_raises_anything_does_not_end_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with controller(monkeypatch) as made:
        await until(lambda: made._desired is not None)
        looks = 0

        async def held() -> bool:
            nonlocal looks
            looks += 1
            raise MemoryError("none left")

        monkeypatch.setattr(made._leader_lease, "is_held", held)
        await until(lambda: looks > 3)
        assert made._error == "none left"


async def test_a_controller_that_ends_accepts_no_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be gone a moment later, with nobody left to make another one."""
    ending = asyncio.Event()
    forgotten: list[str] = []
    monkeypatch.setattr("actors.controller.controller_store.forget", forgotten.append)
    async with controller(monkeypatch) as made:
        await until(lambda: made._desired is not None)
        saving = asyncio.Event()
        may_save = asyncio.Event()
        saved = made._want

        async def want(desired: Desired) -> None:
            saving.set()
            await may_save.wait()
            await saved(desired)

        monkeypatch.setattr(made, "_want", want)
        monkeypatch.setattr(made._manager, "stop_all", ending.wait)
        early = asyncio.create_task(made.ensure(CONFIG))
        await saving.wait()
        closing = asyncio.create_task(made._end("no ingress"))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(made.ensure(CONFIG))
        assert forgotten == [], "not before the other one has stored what it wants"
        may_save.set()
        await until(lambda: bool(forgotten))
        ending.set()
        await closing
        await asyncio.sleep(0.01)
        assert not early.done()
        assert not late.done()
        for task in (early, late):
            task.cancel()


def some_places(*ordinals: int) -> dict[str, Any]:
    """Parts of a controller that shall keep these decode replicas."""
    spec: Any = None
    desired = replace(NOTHING, places={(Role.DECODE, n): spec for n in ordinals})
    desired._fingerprints[id(spec)] = (spec, "same")
    return {"resolve_here": Failing(desired)}


async def test_a_controller_that_ends_leaves_no_replica_that_it_was_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    may_spawn = asyncio.Event()

    async def spawn(*_: Any) -> None:
        done.append("begun")
        await may_spawn.wait()
        done.append("spawned")

    async def stop_all() -> None:
        done.append("stopped")

    monkeypatch.setattr("actors.controller.controller_store.forget", Failing(None))
    async with controller(monkeypatch, **some_places(0, 1)) as made:
        monkeypatch.setattr(made._manager, "spawn", spawn)
        monkeypatch.setattr(made._manager, "stop_all", stop_all)
        await until(lambda: bool(done))
        ending = asyncio.create_task(made._end("stopped"))
        await asyncio.sleep(0.05)
        may_spawn.set()
        await ending
        assert done == ["begun", "spawned", "stopped"]


@pytest.mark.parametrize("answers", [True, False])
async def test_an_empty_place_waits_for_an_adopted_replica_of_its_role(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the earlier controller knew which place it had taken over."""
    parts = some_places(0) | {"call": AsyncMock(return_value=[])}
    async with controller(monkeypatch, **parts) as made:
        clock, spawn, handle = ManualClock(made._clock.now_s()), AsyncMock(), AsyncMock()
        monkeypatch.setattr(made, "_clock", clock)
        monkeypatch.setattr(made._manager, "spawn", spawn)
        adopted = ReplicaHandle((Role.DECODE, 1), "d1", clock.now_s(), None, handle=handle)
        made._manager.replicas["d1"] = adopted
        await until(lambda: made._desired is not None and made._error is None)
        await asyncio.sleep(0.01)
        spawn.assert_not_awaited()
        adopted.fingerprint = "same" if answers else None
        clock.advance(FIRST_ANSWER_S)
        await until(lambda: adopted.key == (Role.DECODE, 0) or spawn.await_count > 0)
        assert (spawn.await_count > 0) is not answers


async def test_replicas_unknown_to_the_controller_are_found_later_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another controller may have ended in the middle of something; those that end are let be."""
    names: list[str] = []
    groups: list[str] = []  # as they are where the names are looked up
    found: list[str] = []
    removed: list[str] = []

    def living_replicas(app: str) -> list[str]:
        groups[:] = [*names, "app:prefill:0:left"] if names else []
        return list(names)

    async def find_actor(name: str, timeout_s: float) -> Any:
        found.append(name)
        if len(found) == 1:
            raise ReplicaDied("the store is slow", code="unreachable")

    async with controller(
        monkeypatch,
        remove=lambda name, _: removed.append(name),
        find_actor=find_actor,
        living_replicas=living_replicas,
        groups_of=lambda _: [g for g in groups if g.startswith("app:")],
        ADOPT_EVERY_S=0.01,
    ) as made:
        await until(lambda: made._desired is not None)
        adopted: list[str] = []
        monkeypatch.setattr(made._manager, "adopt", lambda _, name, __: adopted.append(name))
        monkeypatch.setattr(
            made._manager, "knows", lambda name: name in ["app:decode:1:e", *adopted]
        )
        names[:] = ["app:decode:0:abc", "app:decode:1:e", "other:decode:0:x"]
        await until(lambda: bool(removed))
        assert found == ["app:decode:0:abc"] * 2
        assert adopted == ["app:decode:0:abc"]
        assert set(removed) == {"app:prefill:0:left"}
        assert made._error is None


async def test_the_application_ends_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Failing(None)

    async def end() -> None:
        ended()

    async def fail(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(
        "actors.controller.controller_store.forget",
        Failing(None, RuntimeError("the store is away")),
    )
    async with controller(monkeypatch, end_this_actor=end) as made:
        told: list[str] = []

        async def call(_: str, method: str, *__: Any, **___: Any) -> None:
            told.append(method)

        monkeypatch.setattr("actors.controller.watchdogs.call", call)
        await made._end("stopped")
        assert "stop" in told and ended.num_calls == 1, "the scheduler is stopped all the same"
        make = Failing(None)

        async def gone(*_: Any, **__: Any) -> None:
            raise ReplicaDied("it was stopped")

        monkeypatch.setattr("actors.controller.watchdogs.call", gone)
        monkeypatch.setattr("actors.controller.watchdogs.create_or_get", make)
        await made._scheduler.configure(CONFIG, [], 0.0)
        assert make.num_calls == 0, "who ends makes no scheduler"
    async with controller(monkeypatch, end_this_actor=end) as made:
        monkeypatch.setattr(made._manager, "stop_all", fail)
        with pytest.raises(KeyError):
            await made._end("stopped")
        assert ended.num_calls == 2


async def test_a_configuration_whose_replicas_die_takes_the_room_of_one_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with controller(monkeypatch, **some_places(0, 1)) as made:
        fleet, clock = made._manager, ManualClock(1000.0)
        replicas, handle = fleet.replicas, AsyncMock()
        for part in (made, fleet):
            monkeypatch.setattr(part, "_clock", clock)

        async def spawn(key: PlaceKey, name: str, *_: Any) -> None:
            replicas[name] = ReplicaHandle(key, name, clock.now_s(), "same", handle=handle)

        monkeypatch.setattr(fleet, "spawn", spawn)
        monkeypatch.setattr(fleet, "retire", lambda one, *_, **__: replicas.pop(one.name))
        monkeypatch.setattr(fleet, "_remove", AsyncMock(return_value=True))
        await until(lambda: made._desired is not None)
        monkeypatch.setattr(made, "_turn", AsyncMock())
        replicas.clear()
        for n in (0, 1):
            name, phase = f"old{n}", ReplicaPhase.READY
            replicas[name] = ReplicaHandle((Role.DECODE, n), name, 0.0, "old", phase, handle=handle)
        for _ in range(600):
            clock.advance(1.0)
            await made._reconcile()
            for one in list(replicas.values()):
                num_placed = sum(m.phase is not ReplicaPhase.PENDING for m in replicas.values())
                if one.phase is ReplicaPhase.PENDING and num_placed < 2:
                    one.phase, one.since_s = ReplicaPhase.STARTING, clock.now_s()
                elif one.phase is ReplicaPhase.STARTING and clock.now_s() - one.since_s > 30.0:
                    await fleet._gone(one, "died")
                    await made._reconcile()  # which it asks for, before Ray gives the room away
        assert sum(m.fingerprint == "old" for m in replicas.values()) == 1


async def test_a_roll_out_that_waits_for_a_partner_says_so_once_and_is_an_error_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads = AsyncMock(return_value=[])
    async with controller(monkeypatch, call=loads, **some_places(0)) as made:
        clock, replicas = ManualClock(1000.0), made._manager.replicas
        for part in (made, made._manager, made._scheduler):
            monkeypatch.setattr(part, "_clock", clock)
        made._heard_s = clock.now_s()
        monkeypatch.setattr(made._manager, "retire", lambda *_, **__: None)
        monkeypatch.setattr(made, "_contexts", lambda _: {})
        caplog.set_level("INFO", "quadriga.control.rollout")
        for name, role, weights in (
            ("old", Role.DECODE, "a"),
            ("same", Role.DECODE, "b"),
            ("first", Role.PREFILL, "a"),
        ):
            one = ReplicaHandle((role, 0), name, 0.0, name, handle=AsyncMock())
            info = ReplicaInfo(name, role, DepthClass("m", 8), "node", "one", 8, 4096)
            info = replace(info, numerics=weights)
            one.status = ReplicaStatus(info, True, False, None, ReplicaLoad(), name)
            one.phase = ReplicaPhase.READY
            replicas[name] = one

        def waits() -> list[str]:
            return [one.doing(0.0) or made._rollouts.of(one.key) for one in replicas.values()]

        said = "same is ready in the place of old, and needs a prefill replica of m@8"
        await until(lambda: waits()[0].startswith(said))
        status = await made.status()
        assert said in status["replicas"][1]["doing"] and status["error"] is None
        clock.advance(made._manager.lifecycle.replica_start_timeout_s + 1)
        made._heard_s = clock.now_s()
        await until(lambda: said in (made._error or ""))
        levels = [record.levelname for record in caplog.records if said in record.message]
        assert levels == ["INFO", "ERROR"], "once each"
        replicas.pop("old")
        await until(lambda: made._error is None)


async def test_the_configuration_that_was_asked_for_last_stays_with_its_helios(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though an earlier one, whose model had still to be fetched, is resolved after it.

    A turn before HELIOS goes with it would start replicas of new places by another configuration.
    """
    first, last = plain({"decode.max_slots": 4}), plain({"helios.enabled": True})
    is_fetched, saving, may_save = (threading.Event() for _ in range(3))

    def resolve_here(config: dict[str, Any], least_gpus: float) -> Desired:
        assert config != first or is_fetched.wait(60)
        return resolved(config, least_gpus)

    def save(_: str, what: str, __: bytes) -> None:
        if what == "desired":
            saving.set()
            assert may_save.wait(60)

    async with controller(monkeypatch, resolve_here=resolve_here) as made:
        await until(lambda: made._desired is not None)
        monkeypatch.setattr(made, "_turn", AsyncMock())
        monkeypatch.setattr("actors.controller.controller_store.save", save)
        early = asyncio.create_task(made.ensure(first))
        asked = asyncio.create_task(made.ensure(last))
        await until(saving.is_set)
        assert vars(made)["_helios"] is None
        may_save.set()
        await asked
        is_fetched.set()
        await early
        assert vars(made)["_helios"] is not None and vars(made)["_desired"].config == last


async def test_ingresses_that_wait_for_a_model_hold_one_thread_and_end_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They ask again every two minutes; without threads nothing that runs would be looked after."""
    is_fetched, clock = threading.Event(), ManualClock(1000.0)
    fetching: list[dict[str, Any]] = []

    def resolve_here(config: dict[str, Any], _: float) -> Desired:
        fetching.append(config)
        assert is_fetched.wait(60)
        return NOTHING if config == CONFIG else resolve_on(config, Hardware(8.0))

    monkeypatch.setattr(module, "SystemClock", lambda: clock)
    async with controller(monkeypatch, resolve_here=resolve_here) as made:
        ended = AsyncMock()
        monkeypatch.setattr(made, "_end", ended)
        first = asyncio.create_task(made.ensure(CONFIG))
        await until(lambda: fetching == [CONFIG])
        looked = Failing([])
        monkeypatch.setattr(made._ingresses, "hung", looked)
        for _ in range(4):
            clock.advance(600.0)
            seen = looked.num_calls
            await until(lambda: looked.num_calls > seen + 1)  # noqa: B023
        assert fetching == [CONFIG] and made._scheduler.silence_s == 0.0
        is_fetched.set()
        await first
        await until(lambda: made._error is None and made._acted_s > 1000.0)
        await asyncio.sleep(0.01)
        ended.assert_not_awaited()
        is_fetched.clear()
        del fetching[:]
        other = plain({"decode.max_slots": 4})
        again = [asyncio.create_task(made.ensure(other)) for _ in range(20)]
        last = asyncio.create_task(made.ensure(CONFIG))
        await until(lambda: len(fetching) == 2)
        await asyncio.sleep(0.05)
        assert fetching == [other, CONFIG], "another one does not wait for it"
        is_fetched.set()
        await asyncio.gather(*again, last)
        assert vars(made)["_desired"].config == CONFIG


async def test_an_application_without_ingresses_ends_though_its_model_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away, ended = ConfigError("the hub does not answer"), AsyncMock()
    async with controller(monkeypatch, resolve_here=Failing(None, *[away] * 10_000)) as made:
        monkeypatch.setattr(made, "_end", ended)
        made._manager.lifecycle = LifecycleConfig(orphan_timeout_s=1.0)
        await until(lambda: ended.await_count > 0)


POOLS = [{"model": "quadriga-s"}, {"model": "quadriga-l"}]


@pytest.mark.parametrize(
    ("then", "num_started", "num_gone"),
    [
        ({"pools": POOLS[1:]}, 0, 3),
        ({"pools": [POOLS[0] | {"decode_replicas": 3}, POOLS[1]]}, 1, 0),
        ({"pools": POOLS[1:], "prefill.max_rows": 4, "decode.max_slots": 4}, 3, 6),
    ],
)
async def test_a_pool_serves_on_while_another_one_grows_or_goes(
    then: dict[str, Any], num_started: int, num_gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replicas lie behind those of the other, in places that shift."""
    started: list[str] = []
    gone: list[ReplicaHandle] = []
    gaps: set[tuple[Role, str]] = set()

    async def spawn(key: PlaceKey, name: str, spec: ReplicaSpec, config: dict[str, Any]) -> None:
        kind, phase, handle = fingerprint(spec, config), ReplicaPhase.STARTING, AsyncMock()
        info = ReplicaInfo(name, key[0], spec.engine.depth_class, "node", "one", 8, 4096)
        one = replicas[name] = ReplicaHandle(key, name, 0.0, kind, phase, handle=handle)
        one.status = ReplicaStatus(info, True, False, None, ReplicaLoad(), kind)
        started.append(name)

    def retire(one: ReplicaHandle, *_: Any, **__: Any) -> None:
        gone.append(replicas.pop(one.name))
        left = {(m.key[0], m.depth_class.model) for m in replicas.values() if m.is_ready}
        gaps.update({(one.key[0], "quadriga-l")} - left)

    loads = AsyncMock(return_value=[])
    async with controller(monkeypatch, resolve_here=resolved, call=loads) as made:
        await until(lambda: made._desired is not None)
        monkeypatch.setattr(made, "_turn", AsyncMock())
        replicas = made._manager.replicas
        monkeypatch.setattr(made._manager, "spawn", spawn)
        monkeypatch.setattr(made._manager, "retire", retire)
        for config in ({"pools": POOLS}, then):
            await made.ensure(plain(config))
            for _ in range(9):
                await made._reconcile()
                for one in replicas.values():
                    one.phase = ReplicaPhase.READY
        assert (len(started) - 6, len(gone), gaps) == (num_started, num_gone, set())
