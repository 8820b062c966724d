"""HELIOS in the controller: what happens goes into the state machine, its orders into the fleet.

A replica goes by the place it fills (`decode:0`): a change of layers happens in its process, a
change of model in a new process that takes the place over once it is ready, so that to the machine
both are the same. What a place shall hold is written down here; the controller's one loop makes it
so. Reports of ingresses come in batches, and the fleet's state with its heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ray.exceptions import RayError

from actors.controller import controller_store as kept
from actors.controller.helios_pools import HeliosPools
from actors.controller.helios_setup import HeliosSetup, save_history_file
from actors.controller.replica_handles import class_of, place_name
from actors.controller.replica_manager import Key, ReplicaHandle, ReplicaManager
from actors.controller.scaling import Scaling
from actors.replica.escalation import Escalation
from actors.replica.full_depth_rescorer import FullDepthRescorer
from actors.replica.resizing import ANSWER_SLACK_S, failure
from actors.replica.strict_depth_loader import StrictDepthLoader
from actors.rpc.lifecycle import parse_replica_name, scheduler_name
from actors.rpc.ray_rpc import call
from actors.rpc.tasks import background
from actors.scheduler.auto_routing import Route
from quadriga.checkpoint.exits import ExitCounters
from quadriga.clock import Clock
from quadriga.core.replica import DepthClass, ResizeReport, Role
from quadriga.core.routing import AutoReport
from quadriga.errors import QuadrigaError
from quadriga.policies.helios import (
    Choose,
    ControllerTick,
    Event,
    Keep,
    Order,
    OrderDone,
    OrderFailed,
    Output,
    ReplicaReport,
    RequestFinished,
    RequestLost,
    RequestStarted,
    Resize,
    TokensServed,
)
from quadriga.policies.helios.history import pack_table

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
KEEP_EVERY_S = 2.0
SHOWN_DECISIONS = 50
_BREACH_WEIGHT = 0.3


@dataclass(slots=True)
class _ReplicaSeen:
    """Exit counters of a replica at the last tick, and how often its deepest exit was a breach."""

    exits: ExitCounters
    breach_share: float = 0.0


@dataclass(slots=True)
class _UnderWay:
    """The order that is being carried out.

    Attributes:
        failures: Of its place when a switch was ordered.
    """

    order: Order
    since_s: float
    failures: int
    before: DepthClass


class HeliosController:
    """One deployment's machine, and what carries its orders out; on the controller's event loop.

    Attributes:
        book: What each place shall hold; changes with the orders.
    """

    def __init__(self, app: str, setup: HeliosSetup, fleet: ReplicaManager, clock: Clock) -> None:
        self.setup = setup
        self.book = HeliosPools(setup, fleet, clock)
        is_scaled = setup.config.helios.scaling.enabled
        self._scaling = Scaling(app, setup.config, self.book, clock) if is_scaled else None
        answer_s = setup.config.transport.deadline_s + ANSWER_SLACK_S
        self._escalation = Escalation(fleet, clock, answer_s)
        self._waiting_strict = StrictDepthLoader(setup, fleet, clock)
        self._app = app
        self._fleet = fleet
        self._clock = clock
        self._machine = setup.machine
        self._under_way: _UnderWay | None = None
        self._seen: dict[str, _ReplicaSeen] = {}
        self._kept_s = clock.now_s()
        self._kept = pack_table(self._machine.table)
        self._is_saving = False
        self._decisions: list[dict[str, Any]] = []
        self._teacher = FullDepthRescorer(app, clock)

    # What happens

    def report(self, reports: Sequence[AutoReport]) -> None:
        """What ingresses tell of requests whose model was chosen for them."""
        for report in reports:
            place = self._place_of(report.replica)
            if report.kind == "started":
                self._handle(RequestStarted(place))
            elif report.kind == "lost" or report.depth_class is None:
                self._handle(RequestLost(place))
            else:
                self._handle(self._finished(place, report, report.depth_class))
                if report.output_ids and not self._teacher.is_reading:
                    background(self._read_again(report, report.depth_class.model))

    def _place_of(self, replica: str) -> str:
        """The place of a replica, which may be gone."""
        parsed = parse_replica_name(self._app, replica)
        return replica if parsed is None else place_name(parsed)

    async def _read_again(self, report: AutoReport, model: str) -> None:
        """Have a scout at full depth read an answer, where there is one of the model."""
        full = max(c.depth for _, c in self.setup.specs if c.model == model)
        scouts = [m for k in self.book.scouts if (m := self.book.member_of(k)) is not None]
        wanted = (Role.PREFILL, DepthClass(model, full))
        scout = next((m for m in scouts if (m.key[0], class_of(m)) == wanted), None)
        if scout is not None:
            sample = await self._teacher.read(report, scout.name, model)
            if sample is not None and sample.exits:
                self._handle(sample)

    def _finished(self, place: str, report: AutoReport, depth_class: DepthClass) -> RequestFinished:
        seen = self._seen.get(report.replica)
        share = seen.breach_share if seen is not None else 0.0
        member = self._fleet.members.get(report.replica)
        running = member.status.load.num_running if member and member.status else 1
        return RequestFinished(
            replica=place,
            depth_class=depth_class,
            exit_tokens=report.exit_tokens,
            breaches=round(share * report.exit_tokens.get(depth_class.depth, 0)),
            nll=report.nll,
            scored_tokens=report.scored_tokens,
            prompt_tokens=report.prompt_tokens,
            ttft_s=report.ttft_s,
            decode_s=report.decode_s,
            mean_batch=float(max(1, running)),
        )

    def tick(self) -> None:
        """Tell the machine how things are, and look after what was ordered."""
        members = {key: m for key in self.book.base if (m := self.book.member_of(key)) is not None}
        self._look_at_switch(members)
        serving = [m for k, m in members.items() if k[0] is Role.DECODE and self._serves(k)]
        loads = [m.status.load for m in serving if m.status is not None]
        strict: dict[str, int] = {}
        for member in members.values():  # of those that leave, `StrictDepthLoader` takes care
            if member.status is not None and member.status.load.strict_depth:
                model = class_of(member).model
                strict[model] = max(strict.get(model, 0), member.status.load.strict_depth)
        self._handle(
            ControllerTick(
                fleet={place_name(k): ReplicaReport(k[0], class_of(m)) for k, m in members.items()},
                scouts=frozenset(place_name(k) for k in self.book.scouts if k in members),
                in_flight=sum(load.num_held for load in loads),
                in_flight_tokens=sum(load.used_tokens for load in loads),
                strict=strict,
                waiting={
                    place_name(k): m.status.load.strict_depth
                    for k, m in members.items()
                    if k[0] is Role.PREFILL and m.status and m.status.load.strict_depth
                },
            )
        )
        for member in serving:
            self._count_tokens(member)
        self._seen = {name: s for name, s in self._seen.items() if name in self._fleet.members}
        self._escalation.tick()
        self._waiting_strict.tick(members)
        if self._scaling is not None:
            self._scaling.tick(self._machine.status().target)
        background(self._send_route())
        if self._clock.now_s() - self._kept_s >= KEEP_EVERY_S:
            background(self.keep())

    def _serves(self, key: Key) -> bool:
        return key not in self.book.scouts

    def _count_tokens(self, member: ReplicaHandle) -> None:
        """Tokens and breaches of a serving replica since the last tick."""
        assert member.status is not None
        load, depth_class = member.status.load, class_of(member)
        if load.exits is None:
            return
        seen = self._seen.get(member.name)
        if seen is None:
            self._seen[member.name] = _ReplicaSeen(load.exits)
            return
        tokens = sum(load.exits.tokens.values()) - sum(seen.exits.tokens.values())
        breaches = (load.exits.breaches - load.exits.limited) - (
            seen.exits.breaches - seen.exits.limited
        )
        depth = depth_class.depth
        deepest = load.exits.tokens.get(depth, 0) - seen.exits.tokens.get(depth, 0)
        seen.exits = load.exits
        if deepest > 0:
            share = min(1.0, max(0, breaches) / deepest)
            seen.breach_share += _BREACH_WEIGHT * (share - seen.breach_share)
        if tokens > 0:
            batch = max(1, load.num_running)
            self._handle(TokensServed(depth_class, tokens, min(tokens, max(0, breaches)), batch))

    def _handle(self, event: Event) -> None:
        for output in self._machine.handle(event, self._clock.now_s()):
            self._log(output)
            if isinstance(output, Choose | Keep):
                continue
            self._carry_out(output)

    def _log(self, output: Output) -> None:
        entry = {"at_unix_s": self._clock.unix_s(), "what": type(output).__name__.lower()}
        entry |= {k: _plain(v) for k, v in asdict(output).items()}
        if not isinstance(output, Keep):
            entry["depth_class"] = str(output.depth_class)
        self._decisions = [*self._decisions[-SHOWN_DECISIONS + 1 :], entry]
        logger.info("helios: %s", entry)

    # Orders

    def _carry_out(self, order: Order) -> None:
        key = self._key_of(order.replica)
        member = self.book.member_of(key) if key is not None else None
        if key is None or member is None:
            self._handle(OrderFailed(order.order_id, f"nobody fills {order.replica} now"))
            return
        now_s, before = self._clock.now_s(), class_of(member)
        if self._under_way is not None:  # the machine has given it up
            self._put_back(self._under_way)
        self._under_way = _UnderWay(order, now_s, self._fleet.num_failures(key), before)
        self.book.changing = key
        if isinstance(order, Resize):
            background(self._resize(member, order))
        else:
            self.book.held[key] = order.depth_class  # the loop spawns it, and retires the other

    def _key_of(self, place: str | None) -> Key | None:
        return next((k for k in self.book.base if place_name(k) == place), None)

    async def _resize(self, member: ReplicaHandle, order: Resize) -> None:
        left_s = max(0.1, order.deadline_s - self._clock.now_s() - ANSWER_SLACK_S)
        try:
            report: ResizeReport = await call(
                member.name,
                "resize",
                order.depth_class.depth,
                left_s,
                timeout_s=left_s + ANSWER_SLACK_S,
            )
        except QuadrigaError as exc:
            report = failure(exc)
        if self._under_way is not None and self._under_way.order is order:
            self._under_way = self.book.changing = None
        if report.outcome not in ("resized", "unchanged"):
            self._handle(OrderFailed(order.order_id, report.reason))
            return
        self.book.held[member.key] = order.depth_class
        if member.status is not None:  # until the next heartbeat says so itself
            info = replace(member.status.info, depth_class=order.depth_class)
            info = replace(info, kv_capacity_tokens=report.kv_capacity_tokens)
            member.status = replace(member.status, info=info)
        self._seen.pop(member.name, None)
        self._handle(
            OrderDone(order.order_id, report.load_s, report.weight_bytes, self._max_batch(member))
        )

    def _look_at_switch(self, members: Mapping[Key, ReplicaHandle]) -> None:
        """Whether the new process of a switch is there, or will not be."""
        under_way = self._under_way
        if under_way is None or isinstance(under_way.order, Resize):
            return
        order, now_s = under_way.order, self._clock.now_s()
        key = self._key_of(order.replica)
        if key is None:
            self._under_way = self.book.changing = None
            return  # the machine sees that its replica is gone
        member = members.get(key)
        if member is not None and class_of(member) == order.depth_class:
            self._under_way = self.book.changing = None
            took_s = now_s - under_way.since_s
            self._handle(OrderDone(order.order_id, took_s, None, self._max_batch(member)))
            return
        num_failures = self._fleet.num_failures(key) - under_way.failures
        if num_failures > 0 or now_s >= order.deadline_s - 1.0:
            self._under_way = self.book.changing = None
            self._put_back(under_way)
            why = f"{num_failures} processes died" if num_failures else "it was not there in time"
            self._handle(OrderFailed(order.order_id, why))

    def _put_back(self, under_way: _UnderWay) -> None:
        """After a switch that failed: what came of it is retired, what was there stays."""
        key = self._key_of(under_way.order.replica)
        if key is None or isinstance(under_way.order, Resize):
            return
        if (key[0], under_way.before) in self.setup.specs:
            self.book.held[key] = under_way.before
        else:  # the catalogue has lost it meanwhile
            self.book.held.pop(key, None)

    def _max_batch(self, member: ReplicaHandle) -> int | None:
        """Sequences it can hold, at the length they have now."""
        if member.status is None:
            return None
        info, load = member.status.info, member.status.load
        usual = load.reserved_tokens / load.num_held if load.num_held else 0.0
        return min(info.num_slots, int(info.kv_capacity_tokens / usual)) if usual else None

    # What others are told

    def route(self) -> Route:
        """Where the scheduler shall send requests."""
        routing = self._machine.routing
        scouts = {m.name for m in self._fleet.members.values() if m.key in self.book.scouts}
        profiling = self._key_of(routing.profile_replica)
        member = self.book.member_of(profiling) if profiling is not None else None
        return Route(
            serve=tuple(routing.serve),
            scouts=frozenset(scouts),
            profile=routing.profile,
            profile_decode=member.name if member is not None else None,
            places=routing.profile_places,
        )

    async def _send_route(self) -> None:
        try:
            await call(
                scheduler_name(self._app), "set_route", self.route(), timeout_s=CALL_TIMEOUT_S
            )
        except QuadrigaError as exc:
            logger.info("the scheduler was not told where requests go: %s", exc)

    async def withdraw(self) -> None:
        """Nobody chooses any more: let the scheduler treat all requests alike."""
        try:
            await call(scheduler_name(self._app), "set_route", None, timeout_s=CALL_TIMEOUT_S)
        except QuadrigaError as exc:
            logger.info("the scheduler was not told that nobody chooses: %s", exc)

    async def keep(self) -> None:
        """Store the history where the next controller finds it, if it has changed."""
        if self._is_saving:
            return
        self._is_saving = True
        self._kept_s = self._clock.now_s()
        try:
            packed = pack_table(self._machine.table)
            if packed == self._kept:
                return
            path = self.setup.config.helios.history_path
            if path is None:
                await asyncio.to_thread(kept.save, self._app, "history", packed)
            else:
                await asyncio.to_thread(save_history_file, path, self._machine.table)
            self._kept = packed
        except (RayError, RuntimeError, OSError) as exc:
            logger.warning("the history was not kept: %s", exc)
        finally:
            self._is_saving = False

    def view(self) -> dict[str, Any]:
        """The history and the machine as plain values, for operators."""
        status = self._machine.status()
        routing = self._machine.routing
        return {
            "at_unix_s": self._clock.unix_s(),
            "slo": self.setup.config.helios.slo,
            "phase": status.phase.value,
            "target": str(status.target) if status.target else None,
            "profiling": str(status.profiling) if status.profiling else None,
            "profile_places": routing.profile_places,
            "serve": [str(c) for c in routing.serve],
            "order": str(status.order.depth_class) if status.order else None,
            "served": status.served,
            "window": {"breaches": status.window_breaches, "tokens": status.window_tokens},
            "barred": status.barred,
            "counters": asdict(status.counters) | {"escalated": self._escalation.num_moved},
            "refused": dict(self.setup.refusals),
            "places": {
                place_name(key): {
                    "holds": str(class_of(m)) if (m := self.book.member_of(key)) else None,
                    "shall_hold": str(self.book.held.get(key, self.book.base[key])),
                    "is_scout": key in self.book.scouts,
                }
                for key in self.book.base
            },
            "rows": self._machine.table.columns(),
            "decisions": self._decisions,
            "scaling": self._scaling.view() if self._scaling is not None else None,
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)
