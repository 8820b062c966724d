"""Between the HELIOS machine and the replicas: reports become events, orders change the places.

To the machine a replica is the place it fills (`decode:0`): a change of layers happens in its
process, a change of model in a new process that takes the place over once it is ready. What a place
shall hold is kept in `HeliosPools`; the controller's one loop makes it so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from quadriga.checkpoint.exits import ExitCounters
from quadriga.clock import Clock
from quadriga.control.helios_pools import HeliosPools
from quadriga.control.helios_setup import HeliosSetup
from quadriga.control.model_routing import Route
from quadriga.control.replica_record import PlaceKey, ReplicaRecord, place_name
from quadriga.core.replica import DepthClass, ResizeReport, Role
from quadriga.core.routing import AutoReport
from quadriga.policies.helios.messages import (
    ChangeOrder,
    Choose,
    ControllerTick,
    Event,
    Keep,
    OrderDone,
    OrderFailed,
    Output,
    ReplicaReport,
    RequestFinished,
    RequestLost,
    RequestStarted,
    Resize,
    Switch,
    TokensServed,
)

logger = logging.getLogger(__name__)

SHOWN_DECISIONS = 50
MAX_INGRESSES = 256
"""Whose reports are told from those that come again."""
_BREACH_WEIGHT = 0.3


@dataclass(slots=True)
class _ExitsSeen:
    """Exit counters of a replica at the last tick, and how often its deepest exit was a breach."""

    exits: ExitCounters
    breach_share: float = 0.0


@dataclass(slots=True)
class _UnderWay:
    """The order that is being carried out.

    Attributes:
        failures: Of its place when a switch was ordered.
    """

    order: ChangeOrder
    since_s: float
    failures: int
    before: DepthClass


class HeliosOperator:
    """One deployment's machine, and what its orders mean for the places.

    Args:
        replicas: The controller's table of replicas by name, which it keeps up to date.
        num_failures: Processes of a place that died, one after the other.
        resize: Asks a replica for a resize; `resized` is called with its report.

    Attributes:
        pools: What each place shall hold; changes with the orders.
    """

    def __init__(
        self,
        setup: HeliosSetup,
        replicas: Mapping[str, ReplicaRecord],
        clock: Clock,
        *,
        num_failures: Callable[[PlaceKey], int],
        resize: Callable[[ReplicaRecord, Resize], object],
        place_of: Callable[[str], PlaceKey | None],
    ) -> None:
        self.setup = setup
        self.pools = HeliosPools(setup, replicas, clock)
        self.machine = setup.machine
        self.under_way: _UnderWay | None = None
        self._replicas = replicas
        self._clock = clock
        self._num_failures = num_failures
        self._resize = resize
        self._place_of = place_of
        self._seen: dict[str, _ExitsSeen] = {}
        self._told: dict[str, int] = {}  # ingress → its reports so far
        self._decisions: deque[dict[str, Any]] = deque(maxlen=SHOWN_DECISIONS)

    # Events

    def untold(self, ingress_id: str, first: int, reports: list[AutoReport]) -> list[AutoReport]:
        """Of an ingress's reports, numbered from `first`, those that it tells for the first time.

        What was told without an answer is told again, and perhaps with more.
        """
        told = self._told.pop(ingress_id, 0)
        self._told[ingress_id] = max(told, first + len(reports))
        if len(self._told) > MAX_INGRESSES:  # the one that was silent for longest
            del self._told[next(iter(self._told))]
        return reports[max(0, told - first) :]

    def report(self, report: AutoReport) -> None:
        """Take an ingress's report of a request whose model was chosen for it."""
        key = self._place_of(report.replica)
        place = report.replica if key is None else place_name(key)  # it may be gone
        if report.kind == "started":
            self.handle(RequestStarted(place))
        elif report.kind == "lost" or report.depth_class is None:
            self.handle(RequestLost(place))
        else:
            self.handle(self._finished(place, report, report.depth_class))

    def _finished(self, place: str, report: AutoReport, depth_class: DepthClass) -> RequestFinished:
        seen = self._seen.get(report.replica)
        share = seen.breach_share if seen is not None else 0.0
        replica = self._replicas.get(report.replica)
        running = replica.load.num_running if replica and replica.status else 1
        return RequestFinished(
            replica=place,
            depth_class=depth_class,
            exit_tokens=report.exit_tokens,
            sure_tokens=report.sure_tokens,
            breaches=share * report.exit_tokens.get(depth_class.depth, 0),
            nll=report.nll,
            scored_tokens=report.scored_tokens,
            prompt_tokens=report.prompt_tokens,
            ttft_s=report.ttft_s,
            decode_s=report.decode_s,
            mean_batch=float(max(1, running)),
        )

    def tick(self) -> dict[PlaceKey, ReplicaRecord]:
        """Tell the machine the state of the replicas; returns the replica that fills each place."""
        filling = {k: r for k in self.pools.base if (r := self.pools.replica_at(k)) is not None}
        self._look_at_switch(filling)
        serving = [
            r for k, r in filling.items() if k[0] is Role.DECODE and k not in self.pools.scouts
        ]
        told = [b for r in serving if r.status and (b := r.status.info.usable_bytes)]
        strict: dict[str, int] = {}
        for replica in filling.values():  # those that leave are left to `strict_requests`
            depth, model = replica.load.strict_depth, replica.depth_class.model
            if depth:
                strict[model] = max(strict.get(model, 0), depth)
        self.handle(
            ControllerTick(
                replicas={
                    place_name(k): ReplicaReport(k[0], r.depth_class) for k, r in filling.items()
                },
                scouts=frozenset(place_name(k) for k in self.pools.scouts if k in filling),
                in_flight=sum(r.load.num_held for r in serving),
                in_flight_tokens=sum(r.load.used_tokens for r in serving),
                strict=strict,
                waiting={
                    place_name(k): r.load.strict_depth
                    for k, r in filling.items()
                    if k[0] is Role.PREFILL and r.load.strict_depth
                },
                usable_bytes=min(told, default=None),
            )
        )
        for replica in serving:
            self._count_tokens(replica)
        self._seen = {name: s for name, s in self._seen.items() if name in self._replicas}
        return filling

    def _count_tokens(self, replica: ReplicaRecord) -> None:
        """Tokens and breaches of a serving replica since the last tick."""
        load, depth_class = replica.load, replica.depth_class
        if load.exits is None:
            return
        seen = self._seen.get(replica.name)
        if seen is None:
            self._seen[replica.name] = _ExitsSeen(load.exits)
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
            self.handle(TokensServed(depth_class, tokens, min(tokens, max(0, breaches)), batch))

    def handle(self, event: Event) -> None:
        """Give the machine an event, and carry out what it orders."""
        for output in self.machine.handle(event, self._clock.now_s()):
            self._log(output)
            if not isinstance(output, Choose | Keep):
                self.carry_out(output)

    def _log(self, output: Output) -> None:
        entry = {"at_unix_s": self._clock.unix_s(), "what": type(output).__name__.lower()}
        entry |= {k: _plain(v) for k, v in asdict(output).items()}
        if not isinstance(output, Keep):
            entry["depth_class"] = str(output.depth_class)
        self._decisions.append(entry)
        logger.info("helios: %s", entry)

    # Orders

    def carry_out(self, order: ChangeOrder) -> None:
        """Begin an order: ask for a resize, or let the place hold another model."""
        key = self._key_of(order.replica)
        replica = self.pools.replica_at(key) if key is not None else None
        if key is None or replica is None:
            self.handle(OrderFailed(order.order_id, f"no replica fills {order.replica} now"))
            return
        if self.under_way is not None:  # the machine has given it up
            self._put_back(self.under_way)
        self.under_way = _UnderWay(
            order, self._clock.now_s(), self._num_failures(key), replica.depth_class
        )
        self.pools.changing = key
        spec = self.setup.specs.get((key[0], order.depth_class))
        if isinstance(order, Resize) and spec is not None and spec.engine.device == "cuda":
            # An engine on a GPU keeps its layers: a process at the new depth takes its place.
            order = Switch(
                order.order_id, order.replica, order.depth_class, order.deadline_s, order.reason
            )
            self.under_way.order = order
        if isinstance(order, Resize):
            self._resize(replica, order)
        else:
            self.pools.held[key] = order.depth_class  # the loop spawns it, and retires the other

    def _key_of(self, place: str | None) -> PlaceKey | None:
        return next((k for k in self.pools.base if place_name(k) == place), None)

    def resized(self, replica: ReplicaRecord, order: Resize, report: ResizeReport) -> None:
        """Take the report of a resize; the next heartbeat will show the same."""
        if self.under_way is not None and self.under_way.order is order:
            self.under_way = self.pools.changing = None
        if report.outcome not in ("resized", "unchanged"):
            is_held_up = report.outcome == "blocked"
            self.handle(OrderFailed(order.order_id, report.reason, is_held_up))
            return
        self.pools.held[replica.key] = order.depth_class
        if replica.status is not None:
            info = replace(
                replica.status.info,
                depth_class=order.depth_class,
                kv_capacity_tokens=report.kv_capacity_tokens,
            )
            replica.status = replace(replica.status, info=info)
        self._seen.pop(replica.name, None)
        self.handle(
            OrderDone(order.order_id, report.load_s, report.weight_bytes, _max_batch(replica))
        )

    def _look_at_switch(self, filling: Mapping[PlaceKey, ReplicaRecord]) -> None:
        """See whether the new process of a switch is there, or will not be."""
        under_way = self.under_way
        if under_way is None or isinstance(under_way.order, Resize):
            return
        order, now_s = under_way.order, self._clock.now_s()
        key = self._key_of(order.replica)
        if key is None:
            self.under_way = self.pools.changing = None
            return  # the machine sees that its replica is gone
        replica = filling.get(key)
        if replica is not None and replica.depth_class == order.depth_class:
            self.under_way = self.pools.changing = None
            took_s = now_s - under_way.since_s
            done = OrderDone(order.order_id, took_s, None, _max_batch(replica), is_start=True)
            self.handle(done)
            return
        spec = self.setup.specs.get((key[0], order.depth_class))
        changes_depth = spec is not None and spec.changes_depth
        if replica and replica.depth_class.model == order.depth_class.model and changes_depth:
            # Back to a model whose process has not left the place, and has another depth by now.
            under_way.order = resize = Resize(
                order.order_id, order.replica, order.depth_class, order.deadline_s, order.reason
            )
            self._resize(replica, resize)
            return
        num_failures = self._num_failures(key) - under_way.failures
        if num_failures > 0 or now_s >= order.deadline_s - 1.0:
            self.under_way = self.pools.changing = None
            self._put_back(under_way)
            why = f"{num_failures} processes died" if num_failures else "it was not there in time"
            self.handle(OrderFailed(order.order_id, why))

    def _put_back(self, under_way: _UnderWay) -> None:
        """After a switch that failed: its new process is retired, the old one stays."""
        key = self._key_of(under_way.order.replica)
        if key is None or isinstance(under_way.order, Resize):
            return
        if (key[0], under_way.before) in self.setup.specs:
            self.pools.held[key] = under_way.before
        else:  # the catalogue has lost it meanwhile
            self.pools.held.pop(key, None)

    # Questions

    def rescorer(self, model: str) -> str | None:
        """The scout's prefill replica at full depth, which can read an answer of a model again."""
        full = DepthClass(
            model, max((c.depth for _, c in self.setup.specs if c.model == model), default=0)
        )
        scouts = (self.pools.replica_at(k) for k in self.pools.scouts if k[0] is Role.PREFILL)
        return next((r.name for r in scouts if r is not None and r.depth_class == full), None)

    def route(self) -> Route:
        """Where the scheduler shall send requests."""
        routing = self.machine.routing
        profiling = self._key_of(routing.profile_replica)
        replica = self.pools.replica_at(profiling) if profiling is not None else None
        return Route(
            serve=tuple(routing.serve),
            scouts=frozenset(r.name for r in self._replicas.values() if r.key in self.pools.scouts),
            profile=routing.profile,
            profile_decode=replica.name if replica is not None else None,
            places=routing.profile_places,
        )

    def view(self) -> dict[str, Any]:
        """The history and the machine as plain values, for operators."""
        status = self.machine.status()
        routing = self.machine.routing
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
            "counters": asdict(status.counters),
            "refused": dict(self.setup.refusals),
            "places": {
                place_name(key): {
                    "holds": str(r.depth_class) if (r := self.pools.replica_at(key)) else None,
                    "shall_hold": str(self.pools.held.get(key, self.pools.base[key])),
                    "is_scout": key in self.pools.scouts,
                }
                for key in self.pools.base
            },
            "rows": self.machine.table.columns(),
            "decisions": list(self._decisions),
        }


def _max_batch(replica: ReplicaRecord) -> int | None:
    """Sequences a replica can hold, at the length they have now."""
    if replica.status is None:
        return None
    info, load = replica.status.info, replica.status.load
    usual = load.reserved_tokens / load.num_held if load.num_held else 0.0
    return min(info.num_slots, int(info.kv_capacity_tokens / usual)) if usual else None


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)
