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
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from actors import kept
from actors.auto_routing import Route
from actors.calls import call
from actors.fleet import Fleet, Key, Member, Phase
from actors.lifecycle import scheduler_name
from actors.resizing import failure
from actors.tasks import background
from quadriga.catalogue.inspection import inspect
from quadriga.clock import Clock
from quadriga.config import QuadrigaConfig
from quadriga.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.exits import ExitCounters
from quadriga.policies.helios import (
    Choose,
    Device,
    Event,
    Helios,
    HistoryTable,
    Keep,
    Order,
    OrderDone,
    OrderFailed,
    Output,
    RequestFinished,
    RequestLost,
    RequestStarted,
    Resize,
    Tick,
    TokensServed,
    history_file,
)
from quadriga.policies.helios import Member as Held
from quadriga.policies.helios.start import start_helios
from quadriga.resolve import Hardware, ReplicaSpec, resolve
from quadriga.types import (
    AutoReport,
    DepthClass,
    MigrationCause,
    MigrationOrder,
    MigrationReport,
    ResizeReport,
    Role,
)

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
KEEP_EVERY_S = 2.0
ANSWER_SLACK_S = 10.0
"""Over a resize's deadline, for its report to arrive."""
ESCALATE_AGAIN_S = 1.0
SHOWN_DECISIONS = 50
_BREACH_WEIGHT = 0.3


def place_name(key: Key) -> str:
    """What the machine calls the replica of a place."""
    return f"{key[0].value}:{key[1]}"


@dataclass(slots=True)
class _Seen:
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


@dataclass(frozen=True, slots=True)
class HeliosSetup:
    """All that is found out with files and cluster before the machine may run.

    Attributes:
        specs: What to spawn for every class a place may hold.
        base: What the places hold at first.
    """

    config: QuadrigaConfig
    machine: Helios
    refusals: Mapping[str, str]
    specs: Mapping[tuple[Role, DepthClass], ReplicaSpec]
    base: Mapping[Key, DepthClass]
    scouts: frozenset[Key]


def set_up(
    app: str, config: QuadrigaConfig, hardware: Hardware, places: Mapping[Key, ReplicaSpec]
) -> HeliosSetup:
    """Read the catalogue and the history, and say what may run; blocks on files and on Ray.

    Raises:
        ConfigError: The configuration cannot be served by choosing, or the catalogue is unusable.
    """
    if len(config.pools) != 1:
        raise ConfigError(
            f"helios.enabled: it chooses the models itself, and there are {len(config.pools)} "
            "pools; describe one",
            param="pools",
        )
    if config.decode.rebatching == "off":
        raise ConfigError(
            "helios.enabled: it chooses by what leaves early, and decode.rebatching is 'off'; set "
            "it to 'drex'",
            param="decode.rebatching",
        )
    decode = next(s for (role, _), s in places.items() if role is Role.DECODE).engine
    checkpoint = decode.checkpoint
    started = start_helios(
        config.helios,
        _device(decode),
        context_tokens=decode.row_capacity_tokens,
        table=_load_history(app, config),
    )
    specs: dict[tuple[Role, DepthClass], ReplicaSpec] = {}
    for model in started.picked.candidates:
        for depth in model.exit_depths:
            for spec in _specs_at(config, hardware, str(model.path), depth):
                like = next(s for (role, _), s in places.items() if role is spec.role)
                specs[spec.role, DepthClass(model.id, depth)] = replace(
                    spec,
                    num_cpus=like.num_cpus,
                    num_gpus=like.num_gpus,
                    node_labels=like.node_labels,
                )
    base = {key: spec.engine.depth_class for key, spec in places.items()}
    for key, spec in places.items():
        specs.setdefault((key[0], spec.engine.depth_class), spec)
    scouts: set[Key] = set()
    if config.helios.scout:
        full = DepthClass(checkpoint.id, checkpoint.num_layers)
        for role in Role:
            key = (role, sum(k[0] is role for k in places))
            scouts.add(key)
            base[key] = full if (role, full) in specs else next(c for r, c in specs if r is role)
    refusals = {r.model: r.reason for r in started.picked.refusals}
    return HeliosSetup(config, started.machine, refusals, specs, base, frozenset(scouts))


def _device(decode: EngineSpec) -> Device:
    """What a decode replica has: the KV memory it was given, beside the weights it starts with."""
    width = DTYPE_BYTES[decode.dtype]
    memory = decode.kv_memory_bytes
    if memory is not None:
        sizes = inspect(str(decode.checkpoint.path)).sizes
        memory += sizes.weight_bytes(decode.checkpoint.num_layers, width)
    return Device(memory, width, decode.num_rows)


def _specs_at(
    config: QuadrigaConfig, hardware: Hardware, model: str, depth: int
) -> tuple[ReplicaSpec, ...]:
    """What each role runs at a class. Raises: ConfigError."""
    pool = config.pools[0].model_copy(
        update={"model": model, "depth": depth, "prefill_replicas": 1, "decode_replicas": 1}
    )
    return resolve(config.model_copy(update={"pools": (pool,)}), hardware).replicas


def _load_history(app: str, config: QuadrigaConfig) -> HistoryTable:
    path = config.helios.history_path
    if path is not None:
        return history_file.load(Path(path).expanduser())
    raw = kept.load(app, "history")
    if raw is None:
        return HistoryTable()
    try:
        return history_file.unpack(raw)
    except ConfigError as exc:
        logger.warning("the history that was kept is of no use, and begins anew: %s", exc)
        return HistoryTable()


def _save_file(path: str, table: HistoryTable) -> None:
    history_file.save(Path(path).expanduser(), table)


class HeliosControl:
    """One deployment's machine, and what carries its orders out; on the controller's event loop.

    Attributes:
        held: What each place shall hold; changes with the orders.
    """

    def __init__(self, app: str, setup: HeliosSetup, fleet: Fleet, clock: Clock) -> None:
        self.setup = setup
        self.held: dict[Key, DepthClass] = {}
        self._app = app
        self._fleet = fleet
        self._clock = clock
        self._machine = setup.machine
        self._under_way: _UnderWay | None = None
        self._seen: dict[str, _Seen] = {}
        self._escalated_s: dict[str, float] = {}
        self._kept_s = clock.now_s()
        self._kept = history_file.pack(self._machine.table)
        self._is_saving = False
        self._decisions: list[dict[str, Any]] = []
        self.num_escalated = 0

    # What the controller's loop asks

    def places(self) -> dict[Key, ReplicaSpec]:
        """What shall run now; a replica that was found running keeps what it holds."""
        return {key: self.setup.specs[key[0], self._wanted(key)] for key in self.setup.base}

    def _wanted(self, key: Key) -> DepthClass:
        if key not in self.held:
            found = [m for m in self._fleet.of(key) if m.status is not None and _is_ready(m)]
            known = [c for c in map(_class_of, found) if (key[0], c) in self.setup.specs]
            if not known and self._fleet.of(key):
                return self.setup.base[key]  # it has not answered yet
            self.held[key] = known[0] if known else self.setup.base[key]
        return self.held[key]

    def may_go(self, member: Member) -> bool:
        """Whether a replica that was replaced may be retired: nobody is left without his model.

        The last prefill replica of a model stays until every place of decode has gone over to
        another; the last decode replica of a model until nobody computes its prompts any more.
        """
        if member.status is None or not _is_ready(member):
            return True
        model = _class_of(member).model
        living = [m for m in self._fleet.members.values() if m is not member and m.status]
        same = [m for m in living if _class_of(m).model == model]
        if any(m.key[0] is member.key[0] and _is_ready(m) and self._is_current(m) for m in same):
            return True
        if member.key[0] is Role.DECODE:
            return not any(m.key[0] is Role.PREFILL for m in same)
        return all(
            any(self._is_current(m) and _class_of(m).model != model for m in self._ready_at(key))
            for key in self.setup.base
            if key[0] is Role.DECODE and key not in self.setup.scouts
        )

    def _is_current(self, member: Member) -> bool:
        wanted = self.held.get(member.key)
        return wanted is None or _class_of(member).model == wanted.model

    def _ready_at(self, key: Key) -> list[Member]:
        return [m for m in self._fleet.of(key) if _is_ready(m)]

    def member_of(self, key: Key) -> Member | None:
        """The replica that fills a place; what the place shall hold comes first."""
        ready = self._ready_at(key)
        return min(
            ready, key=lambda m: (_class_of(m) != self.held.get(key), m.since_s), default=None
        )

    # What happens

    def report(self, reports: Sequence[AutoReport]) -> None:
        """What ingresses tell of requests whose model was chosen for them."""
        names = {m.name: place_name(m.key) for m in self._fleet.members.values()}
        for report in reports:
            place = names.get(report.replica, report.replica)
            if report.kind == "started":
                self._handle(RequestStarted(place))
            elif report.kind == "lost" or report.depth_class is None:
                self._handle(RequestLost(place))
            else:
                self._handle(self._finished(place, report, report.depth_class))

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
        members = {key: m for key in self.setup.base if (m := self.member_of(key)) is not None}
        self._look_at_switch(members)
        serving = [m for k, m in members.items() if k[0] is Role.DECODE and self._serves(k)]
        loads = [m.status.load for m in serving if m.status is not None]
        strict: dict[str, int] = {}
        for member in self._fleet.members.values():
            if member.status is not None and member.status.load.strict_depth:
                model = _class_of(member).model
                strict[model] = max(strict.get(model, 0), member.status.load.strict_depth)
        self._handle(
            Tick(
                fleet={place_name(k): Held(k[0], _class_of(m)) for k, m in members.items()},
                scouts=frozenset(place_name(k) for k in self.setup.scouts if k in members),
                in_flight=sum(load.num_held for load in loads),
                in_flight_tokens=sum(load.used_tokens for load in loads),
                strict=strict,
            )
        )
        for member in serving:
            self._count_tokens(member)
        self._seen = {name: s for name, s in self._seen.items() if name in self._fleet.members}
        self._escalate()
        background(self._send_route())
        if self._clock.now_s() - self._kept_s >= KEEP_EVERY_S:
            background(self.keep())

    def _serves(self, key: Key) -> bool:
        return key not in self.setup.scouts

    def _count_tokens(self, member: Member) -> None:
        """Tokens and breaches of a serving replica since the last tick."""
        assert member.status is not None
        load, depth_class = member.status.load, _class_of(member)
        if load.exits is None:
            return
        seen = self._seen.get(member.name)
        if seen is None:
            self._seen[member.name] = _Seen(load.exits)
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
        key = next(k for k in self.setup.base if place_name(k) == order.replica)
        member = self.member_of(key)
        assert member is not None  # the machine was told of it in the last tick
        now_s = self._clock.now_s()
        before = _class_of(member)
        under_way = _UnderWay(order, now_s, self._fleet.num_failures(key), before)
        self._under_way = under_way
        if isinstance(order, Resize):
            background(self._resize(member, order))
        else:
            self.held[key] = order.depth_class  # the loop spawns it, and retires the other

    async def _resize(self, member: Member, order: Resize) -> None:
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
        self._under_way = None
        if report.outcome not in ("resized", "unchanged"):
            self._handle(OrderFailed(order.order_id, report.reason))
            return
        self.held[member.key] = order.depth_class
        if member.status is not None:  # until the next heartbeat says so itself
            info = replace(member.status.info, depth_class=order.depth_class)
            info = replace(info, kv_capacity_tokens=report.kv_capacity_tokens)
            member.status = replace(member.status, info=info)
        self._seen.pop(member.name, None)
        self._handle(
            OrderDone(order.order_id, report.load_s, report.weight_bytes, self._max_batch(member))
        )

    def _look_at_switch(self, members: Mapping[Key, Member]) -> None:
        """Whether the new process of a switch is there, or will not be."""
        under_way = self._under_way
        if under_way is None or isinstance(under_way.order, Resize):
            return
        order, now_s = under_way.order, self._clock.now_s()
        key = next(k for k in self.setup.base if place_name(k) == order.replica)
        member = members.get(key)
        if member is not None and _class_of(member) == order.depth_class:
            self._under_way = None
            took_s = now_s - under_way.since_s
            self._handle(OrderDone(order.order_id, took_s, None, self._max_batch(member)))
            return
        num_failures = self._fleet.num_failures(key) - under_way.failures
        if num_failures > 0 or now_s >= order.deadline_s - 1.0:
            self._under_way = None
            self.held[key] = under_way.before  # what came of it is retired, the old one stays
            why = f"{num_failures} processes died" if num_failures else "it was not there in time"
            self._handle(OrderFailed(order.order_id, why))

    def _max_batch(self, member: Member) -> int | None:
        """Sequences it can hold, at the length they have now."""
        if member.status is None:
            return None
        info, load = member.status.info, member.status.load
        usual = load.reserved_tokens / load.num_held if load.num_held else 0.0
        return min(info.num_slots, int(info.kv_capacity_tokens / usual)) if usual else None

    # Strict sequences

    def _escalate(self) -> None:
        """Move those that can go no further where they are to a replica with more layers."""
        now_s = self._clock.now_s()
        ready = [m for m in self._fleet.members.values() if _is_ready(m)]
        self._escalated_s = {
            i: s for i, s in self._escalated_s.items() if now_s - s < ESCALATE_AGAIN_S
        }
        for source in ready:
            assert source.status is not None
            here = _class_of(source)
            for parked in source.status.load.parked:
                if parked.sequence_id in self._escalated_s:
                    continue
                deeper = [
                    m
                    for m in ready
                    if m.key[0] is Role.DECODE
                    and _class_of(m).model == here.model
                    and _class_of(m).depth > here.depth
                    and _has_room(m, parked.max_total_tokens)
                ]
                best = min(deeper, key=lambda m: (-_class_of(m).depth, _held(m)), default=None)
                if best is None:
                    continue
                self._escalated_s[parked.sequence_id] = now_s
                order = MigrationOrder(
                    sequence_id=parked.sequence_id,
                    depth_class=here,
                    source=source.name,
                    destination=best.name,
                    cause=MigrationCause.ESCALATE,
                    gain=0.0,
                    num_tokens=parked.num_tokens,
                    remaining_tokens=0.0,
                )
                background(self._migrate(order))

    async def _migrate(self, order: MigrationOrder) -> None:
        timeout_s = self.setup.config.transport.deadline_s + ANSWER_SLACK_S
        try:
            report: MigrationReport = await call(
                order.source, "migrate", order, timeout_s=timeout_s
            )
        except QuadrigaError as exc:
            logger.info("escalation of %s: %s", order.sequence_id, exc)
            return
        self.num_escalated += report.outcome == "moved"
        if report.outcome != "moved":
            logger.info("escalation of %s: %s", order.sequence_id, report)

    # What others are told

    def route(self) -> Route:
        """Where the scheduler shall send requests."""
        routing = self._machine.routing
        scouts = {m.name for m in self._fleet.members.values() if m.key in self.setup.scouts}
        profiling = next(
            (k for k in self.setup.base if place_name(k) == routing.profile_replica), None
        )
        member = self.member_of(profiling) if profiling is not None else None
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
            packed = history_file.pack(self._machine.table)
            if packed == self._kept:
                return
            path = self.setup.config.helios.history_path
            if path is None:
                await asyncio.to_thread(kept.save, self._app, "history", packed)
            else:
                await asyncio.to_thread(_save_file, path, self._machine.table)
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
            "counters": asdict(status.counters) | {"escalated": self.num_escalated},
            "refused": dict(self.setup.refusals),
            "places": {
                place_name(key): {
                    "holds": str(_class_of(m)) if (m := self.member_of(key)) else None,
                    "shall_hold": str(self.held.get(key, self.setup.base[key])),
                    "is_scout": key in self.setup.scouts,
                }
                for key in self.setup.base
            },
            "rows": self._machine.table.columns(),
            "decisions": self._decisions,
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)


def _class_of(member: Member) -> DepthClass:
    assert member.status is not None
    return member.status.info.depth_class


def _is_ready(member: Member) -> bool:
    return member.phase is Phase.READY and member.status is not None


def _held(member: Member) -> int:
    assert member.status is not None
    return member.status.load.num_held


def _has_room(member: Member, tokens: int) -> bool:
    assert member.status is not None
    info, load = member.status.info, member.status.load
    fits = load.reserved_tokens + tokens <= info.kv_capacity_tokens
    return load.num_held < info.num_slots and fits
