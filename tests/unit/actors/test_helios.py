"""The machine in the controller: orders go to places, reports come back, models change hands."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import actors.controller.helios
import actors.controller.strict_requests
from actors.controller.helios import HeliosController, load_history
from actors.controller.replica_manager import ReplicaHandle, ReplicaManager, ReplicaPhase
from actors.controller.strict_requests import StrictRequests
from quadriga.checkpoint.exits import ExitCounters
from quadriga.checkpoint.folder import ASSETS
from quadriga.clock import ManualClock
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.control.helios_operator import MAX_INGRESSES
from quadriga.control.helios_setup import _device, set_up, with_a_choice
from quadriga.control.replica_record import ParkedSequence, ReplicaLoad, ReplicaStatus, place_name
from quadriga.control.strict_requests import escalations
from quadriga.core.migration import MigrationReport
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, ResizeReport, Role
from quadriga.core.routing import AutoReport
from quadriga.errors import ConfigError, ReplicaDied
from quadriga.policies.helios.history import unpack_table
from quadriga.policies.helios.messages import OrderDone, OrderFailed, Resize, Switch
from tests.waiting import settled

S2, S4, S8 = (DepthClass("quadriga-s", k) for k in (2, 4, 8))
L3, L12 = (DepthClass("quadriga-l", k) for k in (3, 12))
HARDWARE = Hardware(8)
PREFILL, SCOUT_P = (Role.PREFILL, 0), (Role.PREFILL, 1)
DECODE, SCOUT_D = (Role.DECODE, 0), (Role.DECODE, 1)
PLACES = (PREFILL, DECODE, SCOUT_P, SCOUT_D)
PENDING = ReplicaPhase.PENDING
SCALING = {
    "helios.models": ["quadriga-s"],
    "helios.scaling.enabled": True,
    "helios.scaling.down_after_s": 5.0,
    "helios.scaling.pending_timeout_s": 10.0,
}


class Stand:
    """A control over a fleet of records; calls to actors are written down and answered here.

    Attributes:
        running: Sequences that run, by replica, as the answered loads say.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.saved: dict[str, bytes] = {}
        self.running: dict[str, int] = {}
        self.answers: dict[str, Callable[..., Any]] = {"resize": resized, "loads": self._loads}
        for module in (actors.controller.helios, actors.controller.strict_requests):
            monkeypatch.setattr(module, "call", self._call)
        store = actors.controller.helios.controller_store
        monkeypatch.setattr(store, "load", lambda app, what: self.saved.get(what))
        monkeypatch.setattr(
            store, "save", lambda app, what, value: self.saved.update({what: value})
        )
        self.clock = ManualClock(100.0)
        self.fleet = ReplicaManager("app", self.clock, lambda: None, lambda: 0.0)
        self.config = config(**changes)
        self.control = self.again()
        self.num_told = 0

    def again(self) -> HeliosController:
        """A control as the next controller process makes it."""
        deployment = resolve(self.config, HARDWARE)
        ordinals = dict.fromkeys(Role, 0)
        places = {}
        for spec in deployment.replicas:
            places[spec.role, ordinals[spec.role]] = spec
            ordinals[spec.role] += 1
        setup = set_up(self.config, HARDWARE, places, load_history("app", self.config))
        self.strict = StrictRequests(self.fleet.replicas, self.clock)
        self.control = HeliosController("app", setup, self.fleet, self.strict, self.clock)
        return self.control

    def add(self, key: tuple[Role, int], depth_class: DepthClass, name: str = "") -> ReplicaHandle:
        """A replica that is ready."""
        name = name or place_name(key)
        info = ReplicaInfo(name, key[0], depth_class, "node", "one", 8, 4096)
        handle: Any = None
        member = ReplicaHandle(
            key, name, self.clock.now_s(), "same", ReplicaPhase.READY, handle=handle
        )
        member.status = ReplicaStatus(
            info, True, False, None, ReplicaLoad(exits=ExitCounters()), "same"
        )
        self.fleet.replicas[name] = member
        return member

    def add_all(self) -> None:
        """A whole replica at each place."""
        for key in PLACES:
            self.add(key, S8)

    async def tick(self) -> None:
        self.control.tick()
        self.strict.escalate(10.0)
        await settled()

    async def ticks(self, count: int) -> None:
        """Tick once a second."""
        for _ in range(count):
            self.clock.advance(1.0)
            await self.tick()

    def report(self, reports: list[AutoReport]) -> None:
        self.control.report("i", self.num_told, reports)
        self.num_told += len(reports)

    async def serve(self, at: DepthClass) -> None:
        """Have a class chosen, and everybody hold it."""
        self.add_all()
        await self.tick()
        exits = {"e2": 1, "e4": 1, "e8": 98} if at == S8 else {"e2": 30, "e4": 60, "e8": 10}
        self.report([finished("decode:1", S8, **exits)] * 2)
        await self.ticks(4)
        assert self.control.view()["target"] == str(at)

    @property
    def decode_places(self) -> set[int]:
        return {n for role, n in self.control.pools.specs() if role is Role.DECODE} - {1}

    def _loads(self, _: str) -> list[ReplicaSnapshot]:
        return [
            ReplicaSnapshot(m.status.info, 0.0, num_running=self.running.get(m.name, 0))
            for m in self.fleet.replicas.values()
            if m.status is not None
        ]

    async def _call(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((name, method, *args))
        answer = self.answers.get(method)
        return answer(name, *args) if answer is not None else None

    def of(self, method: str) -> list[tuple[Any, ...]]:
        return [c for c in self.calls if c[1] == method]


MakeStand = Callable[..., Stand]


@pytest.fixture
def make_stand(monkeypatch: pytest.MonkeyPatch) -> MakeStand:
    return partial(Stand, monkeypatch)


def config(**changes: Any) -> QuadrigaConfig:
    pool = {} if "pools" in changes else {"model": "quadriga-s", "decode_replicas": 1}
    return load_config(
        {
            **pool,
            "decode.rebatching": "drex",
            "helios.enabled": True,
            "helios.profile_requests": 2,
            "helios.max_changed_share": 1.0,
            **changes,
        }
    )


def load_of(member: ReplicaHandle) -> ReplicaLoad:
    assert member.status is not None
    return member.status.load


def resized(name: str, depth: int, deadline_s: float) -> ResizeReport:
    return ResizeReport("resized", depth=depth, kv_capacity_tokens=9000, load_s=0.1)


def finished(replica: str, depth_class: DepthClass, **exits: int) -> AutoReport:
    return AutoReport(
        kind="finished",
        replica=replica,
        depth_class=depth_class,
        exit_tokens={int(k[1:]): n for k, n in exits.items()},
        nll=10.0,
        scored_tokens=100,
        prompt_tokens=20,
        ttft_s=0.02,
        decode_s=0.5,
    )


async def test_profile_choose_resize_and_serve(make_stand: MakeStand) -> None:
    stand = make_stand(**{"helios.models": ["quadriga-s"]})
    stand.add_all()
    control = stand.control
    assert set(control.pools.specs()) == set(PLACES)
    await stand.tick()
    route = stand.of("set_route")[-1][2]
    assert (route.profile, route.profile_decode, route.places) == (S8, "decode:1", 2)
    assert route.scouts == {"prefill:1", "decode:1"} and route.serve == (S8,)
    stand.report([AutoReport("started", "decode:1")] * 2)
    stand.report([finished("decode:1", S8, e2=30, e4=60, e8=10)] * 2)
    await stand.ticks(6)
    target = control.view()["target"]
    assert target == "quadriga-s@4", control.view()["decisions"]
    assert {(c[0], c[2]) for c in stand.of("resize")} == {("prefill:0", 4), ("decode:0", 4)}
    assert control.pools.specs()[DECODE].engine.depth == 4, "a respawn comes at the new depth"
    assert stand.of("set_route")[-1][2].serve == (S4,)
    assert control.view()["counters"]["resizes"] == 2
    assert any(row["depth"] == 8 for row in control.view()["rows"])


async def test_a_route_that_is_under_way_does_not_overtake_the_last_one(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make_stand(**{"helios.models": ["quadriga-s"]})
    arrives, routes = asyncio.Event(), list[Any]()

    async def slowly(name: str, method: str, route: Any, timeout_s: float) -> None:
        await arrives.wait()
        routes.append(route)

    monkeypatch.setattr(actors.controller.helios, "call", slowly)
    sends = [asyncio.create_task(stand.control.send_route(r)) for r in ("first", "second", None)]
    await settled()
    arrives.set()
    await asyncio.gather(*sends)
    assert routes == ["first", None], "one that a later one replaces is not sent"


async def test_reports_that_are_told_again_count_once(make_stand: MakeStand) -> None:
    stand = make_stand(**{"helios.models": ["quadriga-s"]})
    stand.add_all()
    await stand.tick()
    for count in (1, 1, 2):
        stand.num_told = 0  # the answer to those before was lost
        stand.report([AutoReport("started", "decode:1")] * count)
        assert stand.control.operator.route().places == 2 - count
    for number in range(2 * MAX_INGRESSES):
        stand.control.report(f"i-{number}", 0, [])
    assert len(stand.control.operator._told) == MAX_INGRESSES


async def test_breaches_load_the_rest(make_stand: MakeStand) -> None:
    stand = make_stand(**{"helios.models": ["quadriga-s"], "helios.dwell_loads": 0.0})
    await stand.serve(S4)
    load = load_of(stand.fleet.replicas["decode:0"])
    for i in range(1, 8):
        # Of the last tokens, 80 in 100 below their threshold; a request's own limit is no breach.
        load.exits = ExitCounters(tokens={2: 5 * i, 4: 95 * i}, breaches=85 * i, limited=5 * i)
        await stand.ticks(1)
    assert stand.control.view()["target"] == "quadriga-s@8", stand.control.view()
    assert stand.of("resize")[-1][2] == 8


async def test_a_report_of_a_replica_that_is_gone_counts_for_its_place(
    make_stand: MakeStand,
) -> None:
    """Its ingress tells a moment after its death."""
    stand = make_stand(**{"helios.models": ["quadriga-s"]})
    for key in (PREFILL, DECODE, SCOUT_P):
        stand.add(key, S8)
    stand.add(SCOUT_D, S8, "app:decode:1:old")
    await stand.tick()
    stand.report([AutoReport("started", "app:decode:1:old")] * 2)
    assert stand.control.operator.route().places == 0
    del stand.fleet.replicas["app:decode:1:old"]
    stand.report([AutoReport("lost", "app:decode:1:old")] * 2)
    stand.add(SCOUT_D, S8, "app:decode:1:new")
    await stand.tick()
    assert stand.control.operator.route().places == 2


async def test_a_late_answer_leaves_the_next_order_alone(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make_stand(**{"helios.models": ["quadriga-s"]})
    stand.add_all()
    answered = asyncio.Event()

    async def answer(name: str, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "resize":
            await answered.wait()
            return ResizeReport("failed", reason="late")
        return None

    monkeypatch.setattr(actors.controller.helios, "call", answer)
    control = stand.control
    assert control.operator.rescorer("one that the catalogue has lost") is None
    control.operator.carry_out(Resize(1, "decode:0", S4, 10.0, "why"))
    await asyncio.sleep(0)
    control.operator.carry_out(Switch(2, "prefill:0", L12, 500.0, "why"))
    answered.set()
    await settled()
    assert control.pools.changing == PREFILL
    assert control.operator.under_way is not None and control.operator.under_way.order.order_id == 2


async def test_what_came_of_an_order_is_told_as_it_was(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make_stand()
    stand.add_all()
    operator, told = stand.control.operator, list[Any]()
    monkeypatch.setattr(operator.machine, "handle", lambda e, now_s: told.append(e) or [])
    stand.answers["resize"] = lambda *_: ResizeReport("blocked", reason="12 need the layers")
    operator.carry_out(Resize(1, "decode:0", S4, 500.0, "why"))
    await settled()
    operator.carry_out(Switch(2, "prefill:0", L12, 500.0, "why"))
    stand.add(PREFILL, L12, "p-l")
    operator.tick()
    assert OrderFailed(1, "12 need the layers", is_held_up=True) in told
    assert [e.is_start for e in told if isinstance(e, OrderDone)] == [True]


async def test_an_abandoned_switch_is_undone(make_stand: MakeStand) -> None:
    stand = make_stand()
    stand.add_all()
    control = stand.control
    control.operator.carry_out(Switch(1, "decode:0", L12, 500.0, "why"))
    assert control.pools.specs()[DECODE].engine.depth_class == L12
    control.operator.carry_out(Switch(2, "prefill:0", L12, 500.0, "why"))
    assert control.pools.specs()[DECODE].engine.depth_class == S8


async def test_a_switch_back_to_a_model_that_the_catalogue_has_lost(make_stand: MakeStand) -> None:
    """The loop goes on: what is there until then is left alone, and nothing else comes of it."""
    stand = make_stand(**{"helios.models": ["quadriga-s"]})
    for key in (PREFILL, SCOUT_P, SCOUT_D):
        stand.add(key, S8)
    stand.add(DECODE, DepthClass("lost", 8))
    control = stand.control
    control.operator.carry_out(Switch(1, "decode:0", S8, 500.0, "why"))
    control.operator.carry_out(Resize(2, "prefill:0", S4, 500.0, "why"))
    assert control.pools.specs()[DECODE].engine.depth_class == S8


async def test_a_load_that_fails_leaves_the_old_layers(make_stand: MakeStand) -> None:
    stand = make_stand(**{"helios.models": ["quadriga-s"]})

    def died(*_: Any) -> Any:
        raise ReplicaDied("gone")

    stand.answers["resize"] = died
    stand.add_all()
    await stand.tick()
    stand.report([finished("decode:1", S8, e2=30, e4=60, e8=10)] * 2)
    await stand.ticks(4)
    view = stand.control.view()
    assert view["counters"]["failures"] >= 1 and view["places"]["decode:0"]["holds"] == str(S8)
    assert stand.control.pools.specs()[DECODE].engine.depth == 8


async def test_a_switch_of_models_leaves_no_gap_in_service(make_stand: MakeStand) -> None:
    """The old prefill replica stays while old decode places do, and those for its prompts."""
    stand = make_stand(**{"helios.scout": False})
    old_p, old_d = stand.add(PREFILL, S8, "p-s"), stand.add(DECODE, S8, "d-s")
    control = stand.control
    control.pools.specs()
    assert control.pools.may_go(stand.add((Role.DECODE, 9), S8, "surplus"))
    del stand.fleet.replicas["surplus"]
    control.pools.held[PREFILL] = L12
    new_p = stand.add(PREFILL, L12, "p-l")
    assert control.pools.replica_at(PREFILL) is new_p
    assert not control.pools.may_go(old_p), "the decode place still has the old model"
    control.pools.held[DECODE] = L12
    assert not control.pools.may_go(old_p), "its successor is not there yet"
    assert not control.pools.may_go(old_d), "somebody computes prompts for it"
    stand.add(DECODE, L12, "d-l")
    assert control.pools.may_go(old_p) and not control.pools.may_go(old_d)
    del stand.fleet.replicas["p-s"]
    assert control.pools.may_go(old_d)


async def test_a_switch_is_done_when_the_new_process_is_ready(make_stand: MakeStand) -> None:
    stand = make_stand()
    stand.add_all()
    control = stand.control
    await stand.tick()
    stand.report([finished("decode:1", S8, e2=30, e4=60, e8=10)] * 2)
    await stand.tick()  # the next candidate is the larger model: the scouts change to it
    changing = [k for k in (SCOUT_P, SCOUT_D) if control.pools.specs()[k].engine.depth_class == L12]
    assert len(changing) == 1, "one order at a time"
    stand.add(changing[0], L12, "new")
    await stand.ticks(1)
    assert control.view()["counters"]["switches"] == 1
    assert {control.pools.specs()[k].engine.depth_class for k in (SCOUT_P, SCOUT_D)} == {L12}
    # The second one dies on its way: the place keeps what it has.
    other = next(k for k in (SCOUT_P, SCOUT_D) if k not in changing)
    stand.fleet._num_failures[other, "new"] = 1
    await stand.ticks(1)
    assert control.view()["counters"]["failures"] == 1


async def test_a_switch_back_finds_a_process_that_has_lost_layers(make_stand: MakeStand) -> None:
    """The old model's process has not left the place: it is no new one that is waited for.

    Observed once: it was waited for, in vain, and all that was to be ordered waited behind it.
    """
    stand = make_stand(**{"helios.scout": False})
    stand.add(PREFILL, S8)
    new, old = stand.add(DECODE, S8, "d-s"), stand.add(DECODE, L3, "d-l")
    operator = stand.control.operator
    operator.pools.held = {DECODE: S8}
    await stand.tick()
    assert operator.pools.replica_at(DECODE) is new
    operator.carry_out(Switch(0, "decode:0", L12, 300.0, "strict requests may need them"))
    await stand.ticks(2)
    assert [(c[0], c[2]) for c in stand.of("resize")] == [("d-l", 12)]
    assert old.depth_class == L12


async def test_parked_sequences_go_where_their_layers_are_loaded(make_stand: MakeStand) -> None:
    stand = make_stand(**{"decode_replicas": 2})
    stand.answers["migrate"] = lambda name, order: MigrationReport(order.sequence_id, "moved")
    *_, scout = (stand.add(key, S8) for key in (PREFILL, SCOUT_P, (Role.DECODE, 2)))
    shallow, deep = stand.add(DECODE, S4), stand.add((Role.DECODE, 1), S8)
    load_of(deep).num_running = 8  # full: it must be the scout
    load_of(shallow).parked = (ParkedSequence("s", 30, 90),)
    load_of(shallow).strict_depth = 8
    await stand.tick()
    (name, _, order), *more = stand.of("migrate")
    assert (name, order.destination, order.cause.value) == ("decode:0", "decode:2", "escalate")
    assert not more
    assert stand.control.view()["counters"]["escalated"] == 1
    shallow.phase = ReplicaPhase.RETIRING
    orders = escalations(stand.fleet.replicas.values(), set())
    assert [o.source for o in orders] == ["decode:0"], "from a replica that leaves as well"
    assert deep.status is not None
    info = deep.status.info
    load_of(deep).num_running, load_of(deep).reserved_tokens = 0, info.kv_capacity_tokens - 60
    load_of(scout).num_running = 1
    for fields, name in (
        ({"reservation": "longest"}, "decode:2"),
        ({"reservation": "used"}, "decode:1"),
        ({"reservation": "used", "numerics": "other"}, "decode:2"),
        ({"reservation": "used", "max_model_len": 89}, "decode:2"),
    ):
        deep.status = replace(deep.status, info=replace(info, **fields))  # type: ignore[arg-type]
        orders = escalations(stand.fleet.replicas.values(), set())
        assert [o.destination for o in orders] == [name]


async def test_prefill_loads_what_strict_sequences_wait_for(make_stand: MakeStand) -> None:
    stand = make_stand(**{"helios.models": ["quadriga-s"], "helios.scout": False})
    prefill, decode = stand.add(PREFILL, S8), stand.add(DECODE, S8)
    await stand.tick()
    stand.report([finished("decode:0", S8, e2=30, e4=60, e8=10)] * 2)
    await stand.ticks(4)
    assert {m.depth_class for m in (prefill, decode)} == {S4}
    load_of(prefill).strict_depth = 8
    await stand.ticks(4)
    assert {m.depth_class for m in (prefill, decode)} == {S8}, "decode will need them next"
    load_of(prefill).strict_depth = 0
    load_of(decode).strict_depth = 8
    await stand.tick()
    assert {m.depth_class for m in (prefill, decode)} == {S8}
    load_of(decode).strict_depth = 0
    await stand.ticks(34)
    assert {m.depth_class for m in (prefill, decode)} == {S4}
    assert stand.control.view()["target"] == str(S4)


@pytest.mark.parametrize("phase", [ReplicaPhase.READY, ReplicaPhase.RETIRING])
async def test_a_strict_request_that_came_in_the_middle_of_a_switch_gets_its_layers(
    make_stand: MakeStand, phase: ReplicaPhase
) -> None:
    """Its prefill replica's place is filled by the other model: no order reaches it any more."""
    stand = make_stand(**{"helios.retry_s": 5.0})
    for key in (SCOUT_P, SCOUT_D):
        stand.add(key, S8)
    stand.answers["migrate"] = lambda name, order: MigrationReport(order.sequence_id, "refused")
    stand.answers["resize"] = lambda name, depth, deadline_s: ResizeReport(
        "failed" if len(stand.of("resize")) == 1 else "resized", depth=depth
    )
    old_p, old_d = stand.add(PREFILL, S4, "p-s"), stand.add(DECODE, S4, "d-s")
    stand.control.pools.held = {PREFILL: L12, DECODE: L12}
    stand.add(PREFILL, L12, "p-l")
    stand.add(DECODE, L12, "d-l")
    await stand.tick()
    assert not stand.of("resize"), "nobody waits"
    old_p.phase = phase
    load_of(old_p).strict_depth = 7
    load_of(old_d).strict_depth = 8
    await stand.tick()
    assert [(c[0], c[2]) for c in stand.of("resize")] == [("p-s", 8)], "those that run may do"
    await stand.tick()
    assert len(stand.of("resize")) == 1, "it failed: not again at once"
    stand.clock.advance(5.0)
    load_of(old_d).parked = (ParkedSequence("s", 30, 90),)
    await stand.tick()
    assert {(c[0], c[2]) for c in stand.of("resize")[1:]} == {("p-s", 8), ("d-s", 8)}
    for member in (old_p, old_d):
        assert member.status is not None
        info = replace(member.status.info, depth_class=S8)
        member.status = replace(member.status, info=info)
    stand.clock.advance(5.0)
    await stand.tick()
    assert len(stand.of("resize")) == 3, "they have them"
    assert stand.control.pools.held[DECODE] == L12, "nobody goes back to the old model for it"


async def test_the_history_outlives_the_process(make_stand: MakeStand) -> None:
    stand = make_stand(**{"helios.models": ["quadriga-s"]})
    stand.add_all()
    await stand.tick()
    stand.report([finished("decode:1", S8, e2=30, e4=60, e8=10)] * 2)
    await stand.tick()
    await stand.control.keep()
    assert len(unpack_table(stand.saved["history"])) >= 1
    stand.fleet.replicas["decode:0"].status = stand.fleet.replicas["decode:1"].status
    again = stand.again()
    assert again.view()["rows"]
    again.tick()
    assert again.view()["phase"] == "serve", "nothing is profiled that is known"
    stand.saved["history"] = b"{broken"
    assert stand.again().view()["rows"] == []


def test_a_configuration_that_cannot_be_served_by_choosing_is_refused(
    make_stand: MakeStand,
) -> None:
    with pytest.raises(ConfigError, match="rebatching"):
        make_stand(**{"decode.rebatching": "off"})


async def test_pools_behind_the_first_stay_as_they_are(make_stand: MakeStand) -> None:
    """Two of quadriga-l are there by name; what is chosen takes the places of quadriga-s alone."""
    named = {"model": "quadriga-l", "decode_replicas": 2}
    first = {"model": "quadriga-s", "decode_replicas": 1}
    stand = make_stand(pools=[first, named])
    own, other = [PREFILL, DECODE], [SCOUT_P, SCOUT_D, (Role.DECODE, 2)]
    scouts = [(Role.PREFILL, 2), (Role.DECODE, 3)]
    pools = stand.control.pools
    assert set(pools.specs()) == {*own, *other, *scouts}
    assert set(pools.base) == {*own, *scouts} and pools.scouts == {*scouts}
    for key in (*own, *scouts):
        stand.add(key, S8)
    others = [stand.add(key, L12) for key in other]
    await stand.tick()
    assert set(stand.control.view()["places"]) == {place_name(key) for key in (*own, *scouts)}
    stand.control.operator.carry_out(Switch(1, "decode:0", L12, 500.0, "why"))
    specs = pools.specs()
    assert specs[DECODE].engine.depth_class == L12
    assert [specs[key].engine.depth_class for key in other] == [L12] * 3
    assert not any(pools.remove_place(replica.name) for replica in others), "scaling leaves them"
    assert [pools.who_decides(key) for key in (*other, DECODE)] == [None] * 3 + [pools.may_go]
    assert not pools.may_go(stand.fleet.replicas[place_name(PREFILL)]), (
        "another pool's replicas do not stand in for the last one of a model that is chosen"
    )
    pools.add_place(S8)
    assert (Role.DECODE, 4) in pools.specs()


def test_a_catalogue_without_the_model_that_is_named_is_refused(
    make_stand: MakeStand, tmp_path: Path
) -> None:
    """Also where the tokenizer is the same, or the name: other weights would answer."""
    for name in ("mine", "quadriga-s"):
        shutil.copytree(ASSETS / "quadriga-s", tmp_path / name)
        with pytest.raises(ConfigError, match=r"is not in the catalogue.*name a catalogue") as bad:
            make_stand(model=str(tmp_path / name))
        assert bad.value.param == "pools.0.model"
        assert str(tmp_path / name) in str(bad.value)
    with pytest.raises(ConfigError, match=r"quadriga-s is not in the catalogue"):
        make_stand(**{"helios.models": ["quadriga-l"]})


def test_where_a_catalogue_has_nothing_to_choose_helios_stands_aside_or_is_refused_if_asked_for(
    make_stand: MakeStand, tmp_path: Path
) -> None:
    folder = tmp_path / "alone"
    shutil.copytree(ASSETS / "quadriga-s", folder)
    for file in ("exits.json", "exits.safetensors"):
        (folder / file).unlink()
    with pytest.raises(ConfigError, match=r"nothing to choose.*alone.*set it to false"):
        make_stand(model=str(folder), **{"helios.catalogue": str(tmp_path)})
    named = {"model": str(folder), "helios.catalogue": str(tmp_path)}
    asked = load_config(named | {"helios.enabled": True})
    assert with_a_choice(asked) is asked, "who asks for it is told"
    assert not with_a_choice(load_config(named)).helios.enabled
    shutil.copytree(ASSETS / "quadriga-s", tmp_path / "another")
    for config in (
        load_config(named),
        load_config(named | {"model": "quadriga-l"}),
        load_config(named | {"helios.catalogue": str(tmp_path / "missing.yaml")}),
    ):
        assert with_a_choice(config) is config


def test_helios_is_on_where_a_catalogue_is_named(tmp_path: Path) -> None:
    assert not load_config({}).helios.enabled
    named = {"helios.catalogue": str(tmp_path)}
    assert load_config(named).helios.enabled
    assert not load_config({**named, "helios.enabled": False}).helios.enabled
    again = QuadrigaConfig.model_validate(load_config(named).model_dump(mode="json"))
    assert again.helios.enabled, "as every process reads it"


def test_a_pool_of_another_family_than_the_catalogue_is_refused(
    make_stand: MakeStand, tmp_path: Path
) -> None:
    folder = tmp_path / "another"
    shutil.copytree(ASSETS / "quadriga-s", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"] = tokenizer["added_tokens"][1:]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copytree(ASSETS / "quadriga-s", tmp_path / "a-first")
    with pytest.raises(ConfigError, match="another has another tokenizer than a-first"):
        make_stand(model=str(folder), **{"helios.catalogue": str(tmp_path)})


async def test_the_class_that_serves_grows_and_shrinks(make_stand: MakeStand) -> None:
    changes = {"helios.scaling.max_replicas": 2, "helios.scaling.down_after_s": 10.0}
    stand = make_stand(**SCALING | changes)
    stand.running["decode:0"] = 8
    await stand.serve(S8)
    added = (Role.DECODE, 2)
    assert set(stand.control.pools.specs()) - set(PLACES) == {added}
    stand.add(added, S8)
    stand.running = {"decode:0": 2, "decode:2": 1}
    await stand.ticks(15)
    assert len(stand.decode_places) == 1, "beside the scout's"
    assert (Role.DECODE, 1) in stand.control.pools.specs()
    assert stand.control.view()["counters"]["scaled"] == 2


async def test_a_replica_that_never_starts_does_not_stop_scaling(make_stand: MakeStand) -> None:
    stand = make_stand(**SCALING, **{"helios.scaling.max_replicas": 2, "helios.dwell_loads": 0.0})
    await stand.serve(S4)
    stand.running["decode:0"] = 8
    await stand.ticks(2)
    assert stand.decode_places == {0, 2}
    pending = stand.add((Role.DECODE, 2), S4)
    pending.phase, pending.status = ReplicaPhase.PENDING, None
    load = load_of(stand.fleet.replicas["decode:0"])
    for i in range(1, 6):  # meanwhile confidence breaks: the machine goes on
        load.exits = ExitCounters(tokens={4: 100 * i}, breaches=90 * i)
        await stand.ticks(1)
    assert stand.fleet.replicas["decode:0"].depth_class == S8
    assert stand.decode_places == {0, 2}, "no more are asked for than are wanted"
    await stand.ticks(9)
    assert stand.decode_places == {0, 3}, "it is given up, and another one is asked for"
    starting = stand.add((Role.DECODE, 3), S8)
    starting.phase, starting.status = ReplicaPhase.STARTING, None
    await stand.ticks(30)
    assert stand.decode_places == {0, 3}, "what is placed may take its time to load"
    stand.add((Role.DECODE, 3), S8)
    stand.running["decode:3"] = 1
    await stand.ticks(3)
    assert stand.decode_places == {0, 3}


async def test_scaling_retires_one_replica_at_a_time(make_stand: MakeStand) -> None:
    stand = make_stand(**SCALING, **{"decode_replicas": 1, "helios.scaling.max_replicas": 3})
    await stand.serve(S8)
    stand.running["decode:0"] = 15
    await stand.ticks(2)
    assert stand.decode_places == {0, 2, 3}
    for n in (2, 3):
        stand.add((Role.DECODE, n), S8)
    stand.running = {"decode:0": 2, "decode:2": 1, "decode:3": 1}
    for _ in range(30):
        if len(stand.decode_places) == 3:
            await stand.ticks(1)
    assert stand.decode_places == {2, 3}
    stand.fleet.replicas["decode:0"].phase = ReplicaPhase.RETIRING
    await stand.ticks(20)
    assert stand.decode_places == {2, 3}, "the first one is still leaving"
    del stand.fleet.replicas["decode:0"]
    await stand.ticks(20)
    assert len(stand.decode_places) == 1


async def test_a_replica_at_another_depth_carries_its_share(make_stand: MakeStand) -> None:
    stand = make_stand(**SCALING, **{"decode_replicas": 2, "helios.scaling.max_replicas": 4})
    stand.answers["resize"] = lambda name, *args, **options: (
        ResizeReport("failed", "no memory")
        if name == "decode:1"
        else resized(name, *args, **options)
    )
    for key in (*PLACES, (Role.DECODE, 2)):  # of which the last is the scout
        stand.add(key, S8)
    await stand.tick()
    stand.report([finished("decode:2", S8, e2=30, e4=60, e8=10)] * 2)
    stand.running = {"decode:0": 6, "decode:1": 5}
    await stand.ticks(30)
    assert stand.fleet.replicas["decode:1"].depth_class == S8, "its order fails again and again"
    places = {n for role, n in stand.control.pools.specs() if role is Role.DECODE}
    assert places == {0, 1, 2}, "two are wanted for eleven, and two there are"
    stand.running["decode:1"] = 8
    await stand.ticks(2)
    (added,) = stand.control.view()["scaling"]["decisions"]
    assert added["what"] == "AddReplicas" and added["count"] == 1, "its load counts, too"


async def test_a_sequence_that_waits_for_a_decode_replica_is_counted_once(
    make_stand: MakeStand,
) -> None:
    stand = make_stand(**SCALING, **{"helios.scaling.max_replicas": 4})
    await stand.serve(S8)

    def loads(_: str) -> list[ReplicaSnapshot]:
        infos = {m.name: m.status.info for m in stand.fleet.replicas.values() if m.status}
        return [
            # Of six that hold a row three are on their way, two look for room; three more queue.
            # The hundred beside them are embeddings, which need no decode replica.
            ReplicaSnapshot(
                infos["prefill:0"], 0.0, num_running=5, num_waiting=103, ending=(100, 0)
            ),
            ReplicaSnapshot(infos["decode:0"], 0.0, num_running=5, num_waiting=4, num_paused=1),
        ]

    stand.answers["loads"] = loads
    await stand.ticks(2)
    # 5 run, 1 is paused, 3 come, 5 wait: 14 of 6 each.
    assert stand.decode_places == {0, 2, 3}


async def test_the_next_controller_keeps_what_scaling_added(make_stand: MakeStand) -> None:
    stand = make_stand(**SCALING, **{"helios.scaling.max_replicas": 2})
    await stand.serve(S8)
    stand.add((Role.DECODE, 2), S8)
    leaving = stand.add((Role.DECODE, 3), S8)
    leaving.phase = ReplicaPhase.RETIRING
    stand.again()
    assert stand.decode_places == {0, 2}, "one that drains is no place to fill"


@pytest.mark.parametrize(
    ("prefill", "decode", "stays"),
    [
        ((L3, S8), (S8,), "quadriga-s"),
        ((S8, L3), (L3,), "quadriga-l"),
        ((L3,), (S8, L3), "quadriga-l"),
        ((L3, S8), (S8, L3), "quadriga-l"),
    ],
    ids=["begun", "nearly done", "done but for one", "both models at both"],
)
async def test_half_a_switch_is_undone_or_ended_by_the_next_controller(
    make_stand: MakeStand, prefill: Sequence[DepthClass], decode: Sequence[DepthClass], stays: str
) -> None:
    """Observed once: the roles held different models, and both of prefill's stayed for minutes."""
    stand = make_stand(**{"helios.scout": False})
    found = [stand.add(PREFILL, c, f"p-{c.model}") for c in prefill]
    found += [stand.add(DECODE, c, f"d-{c.model}") for c in decode]
    late = found[-1]  # that one has not answered yet
    answer, late.status, late.fingerprint, late.phase = late.status, None, None, PENDING
    stand.again().pools.specs()
    late.status, late.fingerprint, late.phase = answer, "same", ReplicaPhase.READY
    pools = stand.control.pools
    assert {pools.specs()[key].engine.depth_class.model for key in (PREFILL, DECODE)} == {stays}
    surplus = [r for r in found if r.depth_class.model != stays]
    while going := [r for r in surplus if pools.may_go(r)]:
        for replica in going:
            surplus.remove(replica)
            del stand.fleet.replicas[replica.name]
    assert not surplus


async def test_the_next_controller_leaves_out_what_scaling_took_away(make_stand: MakeStand) -> None:
    stand = make_stand(**SCALING, **{"decode_replicas": 3, "helios.scaling.max_replicas": 4})
    assert stand.decode_places == {0, 2, 3}
    stand.add((Role.DECODE, 2), S8)
    stand.again()
    assert stand.decode_places == {2, 3}, "and the scout's"


async def test_on_a_gpu_a_resize_is_carried_out_as_a_switch(make_stand: MakeStand) -> None:
    stand = make_stand()
    stand.add_all()
    control = stand.control
    specs = control.operator.setup.specs
    assert all(spec.changes_depth for spec in specs.values()), "on a CPU"
    for key, spec in specs.items():
        specs[key] = replace(spec, engine=replace(spec.engine, device="cuda"))
        assert _device(specs[key].engine).starts_anew and not _device(spec.engine).starts_anew
    control.operator.carry_out(Resize(1, "decode:0", S4, 500.0, "why"))
    await settled()
    assert not stand.of("resize"), "the engine would refuse it"
    assert control.pools.specs()[DECODE].engine.depth_class == S4
    assert control.operator.under_way is not None
    assert control.operator.under_way.order == Switch(1, "decode:0", S4, 500.0, "why")


async def test_what_a_gpu_has_is_known_from_its_replicas(make_stand: MakeStand) -> None:
    stand = make_stand()
    for key, usable in ((PREFILL, 1), (DECODE, 5 << 30), (SCOUT_D, 1)):
        member = stand.add(key, S8)
        assert member.status is not None
        info = replace(member.status.info, usable_bytes=usable)
        member.status = replace(member.status, info=info)
    planner = stand.control.operator.machine._planner
    named = planner._device.memory_bytes
    await stand.tick()
    assert named is not None and planner._device.memory_bytes == named, "a setting comes first"
    planner._is_named = False  # as where the setting is `auto`
    await stand.tick()
    assert planner._device.memory_bytes == 5 << 30
