"""What the scheduler answers while it does not know all, and how long it lives."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import actors.scheduler.scheduler
import quadriga.background
from actors.kv_transfer.placement import DecodePlacement
from actors.scheduler.scheduler import Scheduler
from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.clock import ManualClock
from quadriga.config.loader import load_config
from quadriga.control.model_routing import Route
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import AUTO_MODEL
from quadriga.core.routing import Admission, AdmitRequest, ClusterView, PlaceRequest
from quadriga.errors import MigrationFailed, Overloaded, ReplicaDied, Unavailable, UnknownModel
from quadriga.policies.load import STRANDED_S
from quadriga.scheduling.prefixes.affinity import prefix_marks
from quadriga.scheduling.transfer.placement_turns import PlacementTurns
from serve_app.request.cluster_client import ClusterStateCache
from tests.unit.policies.test_ares_governor import uneven


def plain(**settings: Any) -> dict[str, Any]:
    return load_config(settings).model_dump(mode="json", exclude={"auth"})


CHOOSES = plain(**{"helios.enabled": True})


def request(name: str = "a", model: str = AUTO_MODEL) -> AdmitRequest:
    return AdmitRequest(name, model, 8, 32, 0, time.time() + 60.0)


async def admitted(by: Scheduler | ClusterStateCache, one: AdmitRequest) -> Admission:
    """Where a request of one sequence goes first."""
    (admission,) = await by.admit([one])
    return admission


async def test_a_new_scheduler_asks_clients_to_retry_until_its_first_route() -> None:
    scheduler = Scheduler(CHOOSES)
    with pytest.raises(Unavailable):
        await admitted(scheduler, request())
    await scheduler.configure(CHOOSES, ["quadriga-s"], 0.0)
    with pytest.raises(Unavailable, match="no model is chosen yet"):
        await admitted(scheduler, request())
    with pytest.raises(UnknownModel):
        await admitted(scheduler, request(model="other"))


async def test_what_is_known_of_lengths_goes_with_their_model() -> None:
    scheduler = Scheduler(plain())
    made = scheduler._rescheduling
    for models in (["old", "quadriga-s"], ["quadriga-s"]):
        for model in models:
            made.governor.ended_lengths(model, [])
        await scheduler.configure(plain(), models, 0.0)
        made.metrics.gauges(made.governor)
    assert set(made.status()["lengths"]) == {"quadriga-s"}
    assert b'"quadriga-s"' in made.metrics.registry.snapshot()
    assert b'"old"' not in made.metrics.registry.snapshot(), "a coverage of 0 would be a failure"


async def test_who_ends_with_its_first_token_waits_for_no_decode_replica() -> None:
    scheduler = Scheduler(plain())
    await scheduler.report(snapshot("p0", Role.PREFILL, FULL))
    await scheduler.report(snapshot("d0", Role.DECODE, FULL))
    for name, max_tokens in (("embedding", 0), ("score", 1), ("chat", 2)):
        await admitted(scheduler, replace(request(name, "quadriga-s"), max_tokens=max_tokens))
    assert scheduler._waiting.num_pending("quadriga-s@8") == 1


async def test_without_helios_the_model_auto_is_unknown() -> None:
    scheduler = Scheduler(plain())
    await scheduler.configure(plain(), ["quadriga-s"], 0.0)
    with pytest.raises(UnknownModel):
        await admitted(scheduler, request())


async def test_only_a_changed_configuration_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(plain())
    with monkeypatch.context() as patched:
        patched.setattr(actors.scheduler.scheduler, "QuadrigaConfig", None)
        await scheduler.configure(plain(), ["quadriga-s"], 0.0)
    await scheduler.configure(plain(**{"scheduler.max_wait_s": 7, "prefill_replicas": 3}), [], 0.0)
    assert (scheduler._config.scheduler.max_wait_s, scheduler._num_queues) == (7.0, 3)


async def test_a_report_that_was_overtaken_is_ignored() -> None:
    """By the replica's own clock, whatever the machines' clocks say."""
    scheduler = Scheduler(plain())
    later = snapshot("d0", Role.DECODE, SMALL, age_s=3.0, num_running=2, sent_s=8.0)
    earlier = snapshot("d0", Role.DECODE, SMALL, age_s=0.0, num_running=5, sent_s=7.0)
    await scheduler.report(later)
    await scheduler.report(earlier)
    assert [s.num_running for s in await scheduler.loads()] == [2]


@pytest.mark.parametrize(
    ("turns_s", "lives"), [([1.0] * 60, True), ([1.0] * 62, False), ([1.0, 300.0, 1.0], True)]
)
async def test_a_scheduler_that_stalled_does_not_count_it_as_silence(
    turns_s: list[float], lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ended = ManualClock(1000.0), asyncio.Event()
    left = list(turns_s)

    async def sleep(_: float) -> None:
        if not left:
            await asyncio.Event().wait()
        clock.advance(left.pop(0))

    async def end(*_: Any) -> None:
        ended.set()

    patched = SimpleNamespace(get_running_loop=asyncio.get_running_loop, sleep=sleep)
    monkeypatch.setattr(quadriga.background, "asyncio", patched)
    monkeypatch.setattr(actors.scheduler.scheduler, "SystemClock", lambda: clock)
    monkeypatch.setattr(Scheduler, "_end", end)
    Scheduler(plain())
    while left and not ended.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ended.is_set() is not lives


FULL, SMALL = DepthClass("quadriga-s", 8), DepthClass("quadriga-s", 4)
ROUTE = Route((SMALL,), frozenset({"p1", "d1"}), profile=FULL, profile_decode="d1", places=1)


def snapshot(
    name: str, role: Role, depth_class: DepthClass, age_s: float = 0.0, **load: Any
) -> ReplicaSnapshot:
    info = ReplicaInfo(name, role, depth_class, "n", name, 8, 4096)
    return ReplicaSnapshot(info, time.time() - age_s, **load)


async def told(scheduler: Scheduler, *snapshots: ReplicaSnapshot) -> None:
    await scheduler.report(snapshot("p0", Role.PREFILL, SMALL))
    await scheduler.report(snapshot("d0", Role.DECODE, SMALL))
    for one in snapshots:
        await scheduler.report(one)
    await scheduler.set_route(ROUTE)


@pytest.mark.parametrize(
    "scouts",
    [
        [("p1", Role.PREFILL, {"age_s": 20.0}), ("d1", Role.DECODE, {})],
        [("p1", Role.PREFILL, {}), ("d1", Role.DECODE, {"draining": True})],
        [("p1", Role.PREFILL, {"num_waiting": 10_000}), ("d1", Role.DECODE, {})],
    ],
    ids=["silent", "draining", "full"],
)
async def test_a_request_that_no_scout_can_take_is_served(
    scouts: list[tuple[str, Role, dict[str, Any]]],
) -> None:
    scheduler = Scheduler(CHOOSES)
    await told(scheduler, *(snapshot(name, role, FULL, **load) for name, role, load in scouts))
    served = await admitted(scheduler, replace(request(), visitor="v"))
    assert (served.prefill_replica, served.profile) == ("p0", None)
    await told(scheduler, *(snapshot(name, role, FULL) for name, role, _ in scouts))
    profiled = await admitted(scheduler, request("b"))
    assert (profiled.prefill_replica, profiled.profile) == ("p1", "d1"), "the place is still there"


async def test_scouts_are_marked_and_no_part_of_rescheduling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = Scheduler(CHOOSES)
    seen: list[str] = []

    def tick(snapshots: list[ReplicaSnapshot], **_: float) -> list[MigrationOrder]:
        seen.extend(s.info.name for s in snapshots)
        return []

    monkeypatch.setattr(scheduler._rescheduling.governor, "tick", tick)
    await told(scheduler, snapshot("p1", Role.PREFILL, FULL), snapshot("d1", Role.DECODE, FULL))
    assert {s.info.name: s.is_scout for s in await scheduler.loads()} == {
        "p0": False,
        "d0": False,
        "p1": True,
        "d1": True,
    }
    scheduler._rescheduling.tick()
    assert sorted(seen) == ["d0", "p0"]
    await scheduler.set_route(None)
    assert not any(s.is_scout for s in await scheduler.loads())


async def test_layers_at_silent_replicas_serve_no_strict_request() -> None:
    scheduler = Scheduler(CHOOSES)
    strict = replace(request(), needs_depth=8)
    await told(scheduler, snapshot("p1", Role.PREFILL, FULL))
    await scheduler.set_route(replace(ROUTE, profile=None))
    assert (await admitted(scheduler, strict)).prefill_replica == "p1"
    for gone in ({"age_s": 20.0}, {"draining": True}):
        scheduler = Scheduler(CHOOSES)
        await told(scheduler, snapshot("p1", Role.PREFILL, FULL, **gone))
        await scheduler.set_route(replace(ROUTE, profile=None))
        assert (await admitted(scheduler, strict)).prefill_replica == "p0"


async def test_without_helios_strict_requests_go_where_all_layers_are() -> None:
    scheduler = Scheduler(plain())
    strict = replace(request(model="quadriga-s"), needs_depth=MAX_LAYERS)

    async def report(name: str, role: Role, depth_class: DepthClass, **load: Any) -> None:
        one = snapshot(name, role, depth_class, **load)
        await scheduler.report(replace(one, info=replace(one.info, num_layers=8)))

    for role in Role:
        await report(f"{role}4", role, SMALL)
    with pytest.raises(Unavailable, match="with all layers"):
        await admitted(scheduler, strict)
    assert (await admitted(scheduler, replace(strict, needs_depth=0))).depth_class == SMALL
    for role in Role:
        await report(f"{role}8", role, FULL, num_waiting=2, waiting_tokens=99)
    assert (await admitted(scheduler, strict)).depth_class == FULL, "however busy they are"
    assert (await admitted(scheduler, replace(strict, needs_depth=0))).depth_class == SMALL
    assert (await admitted(scheduler, replace(strict, needs_depth=4))).depth_class == SMALL


PREFILLED = PlaceRequest("a", FULL, 9, 40)


async def test_without_a_route_any_depth_of_the_model_will_do() -> None:
    scheduler = Scheduler(CHOOSES)
    await scheduler.configure(CHOOSES, ["quadriga-s"], 0.0)
    await scheduler.report(snapshot("p0", Role.PREFILL, FULL))
    await scheduler.report(snapshot("d0", Role.DECODE, SMALL))
    assert (await admitted(scheduler, request(model="quadriga-s"))).prefill_replica == "p0"
    assert await scheduler.place_now(PREFILLED) == "d0"
    await scheduler.report(snapshot("d1", Role.DECODE, FULL))
    assert await scheduler.place_now(PREFILLED) == "d1", "the prefill's own class comes first"
    assert await scheduler.place_now(replace(PREFILLED, exclude=("d1",))) == "d0"


async def test_a_malformed_forecast_is_left_out_and_all_else_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = plain(**{"scheduler.placement": "ares", "scheduler.ares.mode": "ares"})
    scheduler = Scheduler(config)
    for one in uneven(num_idle=3):
        assert one.forecast is not None
        if one.info.name == "idle0":
            one = replace(one, forecast=replace(one.forecast, rows=b"cut"))
        for _ in range(3):
            await scheduler.report(replace(one, taken_unix_s=time.time()))
    assert caplog.text.count("forecasts of idle0 are left out") == 1
    assert {s.info.name for s in await scheduler.loads() if s.forecast is None} == {"idle0"}
    scheduler._rescheduling._send = AsyncMock(return_value=MigrationReport("", "finished"))
    (order,) = scheduler._rescheduling.tick()
    assert (order.source, order.destination) == ("busy", "idle1")
    asked = replace(PREFILLED, depth_class=order.depth_class)
    assert (await scheduler.place_now(asked)).startswith("idle")


async def test_no_room_is_kept_for_a_sequence_that_was_given_up_while_it_waited() -> None:
    """Its slot is free for the next one at once."""
    scheduler = Scheduler(plain())
    full: dict[str, Any] = {"num_running": 8, "used_tokens": 4096, "reserved_tokens": 4096}
    await scheduler.report(snapshot("d0", Role.DECODE, SMALL, **full))
    asked = replace(PREFILLED, depth_class=SMALL)
    waiting = asyncio.create_task(scheduler.place(asked))
    await asyncio.sleep(0)
    await scheduler.finished([], lost=[asked.sequence_id])
    await scheduler.report(snapshot("d0", Role.DECODE, SMALL))
    with pytest.raises(Overloaded):
        await waiting
    assert [s.num_waiting for s in await scheduler.loads()] == [0]
    assert await scheduler.place(replace(asked, sequence_id="next")) == "d0"
    assert [s.num_waiting for s in await scheduler.loads()] == [1]


async def test_without_helios_depths_are_kept_apart() -> None:
    scheduler = Scheduler(plain())
    await scheduler.report(snapshot("d0", Role.DECODE, SMALL))
    with pytest.raises(Unavailable):
        await scheduler.place_now(PREFILLED)


async def test_a_prompt_that_nobody_decodes_any_more_is_begun_anew_by_those_who_would() -> None:
    """As the last decode replica of its depth is exchanged for one of another depth."""
    scheduler = Scheduler(plain())

    async def ask(_: str, method: str, asked: PlaceRequest, **__: Any) -> str:
        return await getattr(scheduler, method)(asked)

    calls: Any = SimpleNamespace(call=ask, call_alone=ask)
    placement = DecodePlacement(load_config({}), calls, PlacementTurns({}, time.monotonic))
    waits = replace(PREFILLED, depth_class=SMALL, waited_s=STRANDED_S, source="p0")
    await scheduler.report(snapshot("p0", Role.PREFILL, SMALL))
    await scheduler.report(snapshot("d0", Role.DECODE, FULL))
    assert await placement.find(waits) is None, "a decode replica alone cannot begin it"
    await scheduler.report(snapshot("p1", Role.PREFILL, FULL))
    assert await placement.find(waits) is None, "at first some have not reported"
    scheduler._began_s -= STRANDED_S
    assert await placement.find(replace(waits, waited_s=0.0)) is None
    assert await placement.find(replace(waits, max_total_tokens=9999)) is None, "nor have they room"
    with pytest.raises(MigrationFailed, match="as p0 computes it any more") as refusal:
        await placement.find(waits)
    assert refusal.value.code == "stranded"
    await scheduler.report(snapshot("d1", Role.DECODE, SMALL, age_s=60.0))
    assert await placement.find(waits) is None, "it is late, and may come back"
    await scheduler.report(snapshot("d1", Role.DECODE, SMALL, draining=True))
    assert await placement.find(waits) is None, "another may come in its place"
    await scheduler.report(snapshot("d1", Role.DECODE, SMALL))
    assert await placement.find(waits) == "d1"
    assert await placement.find(replace(waits, exclude=("d1",))) is None


async def test_a_prompt_waits_for_its_depth_where_others_have_fewer_layers() -> None:
    scheduler = Scheduler(plain())
    scheduler._began_s -= STRANDED_S
    await scheduler.report(snapshot("p0", Role.PREFILL, SMALL))
    await scheduler.report(snapshot("d0", Role.DECODE, SMALL))
    with pytest.raises(Unavailable):
        await scheduler.place_now(replace(PREFILLED, waited_s=STRANDED_S))


@pytest.mark.parametrize(("config", "second"), [(CHOOSES, "d0"), (plain(), None)])
async def test_without_a_scheduler_depths_are_chosen_alike(
    config: dict[str, Any], second: str | None
) -> None:
    calls: Any = None
    placement = DecodePlacement(load_config(config), calls, PlacementTurns({}, time.monotonic))
    placement._is_scheduler_away = True
    placement._view = ClusterView(
        time.time(), [snapshot("d0", Role.DECODE, SMALL), snapshot("d1", Role.DECODE, FULL)]
    )
    assert [await placement.find(PREFILLED) for _ in range(2)] == ["d1", "d1"]
    assert await placement.find(replace(PREFILLED, exclude=("d1",))) == second


async def test_ordinary_sequences_stay_off_scouts_without_a_scheduler_and_without_a_route() -> None:
    """Scouts are idle, and say themselves what they are."""
    scheduler, busy = Scheduler(CHOOSES), {"num_running": 5, "waiting_tokens": 50}
    await scheduler.configure(CHOOSES, ["quadriga-s"], 0.0)
    for number, load in enumerate((busy, {"is_scout": True})):
        await scheduler.report(snapshot(f"p{number}", Role.PREFILL, FULL, **load))
        await scheduler.report(snapshot(f"d{number}", Role.DECODE, FULL, **load))
    placement = DecodePlacement(
        load_config(CHOOSES), SimpleNamespace(), PlacementTurns({}, time.monotonic)
    )  # type: ignore[arg-type]
    ingress = ClusterStateCache(
        SimpleNamespace(admit=AsyncMock(side_effect=ReplicaDied("away"))),  # type: ignore[arg-type]
        ManualClock(),
        max_age_s=10.0,
    )
    placement._is_scheduler_away = True
    placement._view = ingress.view = await scheduler.directory()
    for admits in (scheduler, ingress):
        assert (await admitted(admits, request(model="quadriga-s"))).prefill_replica == "p0"
    assert [await scheduler.place_now(PREFILLED), await placement.find(PREFILLED)] == ["d0"] * 2
    await scheduler.replica_died("d0")
    placement._view = await scheduler.directory()
    assert await placement.find(PREFILLED) == "d1", "no other has the model"


async def test_a_sequence_is_placed_where_rows_are_long_enough() -> None:
    """An idle replica with less memory looks best, and would refuse it for good."""
    scheduler, calls = Scheduler(plain()), None
    placement = DecodePlacement(load_config({}), calls, PlacementTurns({}, time.monotonic))  # type: ignore[arg-type]
    placement._is_scheduler_away = True
    views = []
    for name, length, load in (("d0", 32, {}), ("d1", 64, {"num_running": 7})):
        one = snapshot(name, Role.DECODE, FULL, **load)
        views.append(replace(one, info=replace(one.info, max_model_len=length)))
        await scheduler.report(views[-1])
    placement._view = ClusterView(time.time(), views)
    for length, chosen in ((32, "d0"), (40, "d1"), (64, "d1")):
        asked = replace(PREFILLED, max_total_tokens=length)
        assert [await scheduler.place_now(asked), await placement.find(asked)] == [chosen] * 2
    longer = replace(PREFILLED, max_total_tokens=65)
    with pytest.raises(Unavailable, match="with rows of 65 tokens or more"):
        await scheduler.place_now(longer)
    assert await placement.find(longer) is None


async def test_copies_of_a_prompt_go_to_one_prefill_replica_and_other_prompts_to_others() -> None:
    scheduler = Scheduler(plain())
    await scheduler.configure(plain(), ["quadriga-s"], 0.0)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        await scheduler.report(snapshot(name, role, FULL))

    async def replica(name: str, prompt: list[int], salt: str = "") -> str:
        asked = replace(request(name, "quadriga-s"), num_prompt_tokens=len(prompt))
        marks = prefix_marks(prompt, salt)
        return (await admitted(scheduler, replace(asked, prefix_marks=marks))).prefill_replica

    prompt = list(range(300))
    first = await replica("a", prompt)
    assert [await replica(name, prompt) for name in "bcd"] == [first] * 3
    assert await replica("e", prompt, "another") != first
    assert await replica("f", prompt[:256] + [7] * 50) == first
