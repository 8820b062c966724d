"""The rescheduler with all that is remembered from tick to tick, and its guard rails.

Fresh snapshots and the time in, orders out: which replicas and sequences are left alone, whether
predictions are trusted, what a transfer costs by what the last ones took. The actor around it
only sends the orders and brings back the reports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quadriga.config.scheduling import SchedulerConfig
from quadriga.core.forecast import LengthOutcome, LengthPrediction
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.core.replica import DepthClass, ReplicaSnapshot, Role
from quadriga.policies.ares.cluster import (
    ClusterForecast,
    by_class,
    by_model,
    comparable,
    unpack,
)
from quadriga.policies.ares.depth_pools import DepthPools, is_due, plan_pools
from quadriga.policies.ares.forecast import with_fixed
from quadriga.policies.ares.orders import MoveTracker
from quadriga.policies.ares.overload import OverloadPlan, is_overloaded, plan_overload
from quadriga.policies.ares.settings import (
    ROUND_TRIP_S,
    AresSettings,
    LinkMeter,
    TransferCosts,
    settings_for,
)

if TYPE_CHECKING:
    from quadriga.policies.ares.recording import RecordedTick


NOMINAL_COVERAGE = 0.8
"""Share that a calibrated head keeps inside its range."""
DISTRUST_BELOW, TRUST_ABOVE = 0.6 * NOMINAL_COVERAGE, 0.8 * NOMINAL_COVERAGE
MIN_ENDED = 50
"""Nothing is concluded from fewer ended sequences."""
_RATE = 0.02  # of the moving averages, with each of them


class DriftMonitor:
    """Watches the share of true lengths inside the predicted range."""

    def __init__(self) -> None:
        self.coverage = NOMINAL_COVERAGE
        self.mean_error = 0.0
        self.num_ended = 0
        self.is_drifting = False

    def ended(self, prediction: LengthPrediction, remaining_tokens: float) -> None:
        """Note what came of a prediction, once its sequence has ended.

        Args:
            prediction: Taken at any moment of the sequence's life; not one at its very end, which
                is right by itself.
            remaining_tokens: What it really still generated from then.
        """
        inside = prediction.lower <= remaining_tokens <= prediction.upper
        error = abs(prediction.mean - remaining_tokens)
        self.coverage += _RATE * (float(inside) - self.coverage)
        self.mean_error += _RATE * (error - self.mean_error)
        self.num_ended += 1
        if self.num_ended < MIN_ENDED:
            return
        if self.coverage < DISTRUST_BELOW:
            self.is_drifting = True
        elif self.coverage > TRUST_ABOVE:
            self.is_drifting = False


def settings_of(config: SchedulerConfig) -> AresSettings:
    """The policies' constants as configured."""
    return AresSettings(**config.ares.model_dump(include={f.name for f in fields(AresSettings)}))


@dataclass(slots=True)
class TickSummary:
    """The last tick, for operators.

    Attributes:
        why: By depth class: what was decided, in a few words.
        work: By replica: the forecast work it had, over the mean of its class.
    """

    at_unix_s: float = 0.0
    took_s: float = 0.0
    why: dict[str, str] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)


class Governor:
    """Decides when and what to move; see the module.

    Args:
        record: Called with every decision and all it saw.

    Attributes:
        overload: What overload calls for, by model; only of models that are overloaded.
        num_held: Sequences of these that wait for a decode replica.
        drift: What is known of the predictions, by model.
        pools: Of classes with exits in use, whether shallow and deep sequences run apart.
    """

    def __init__(self, config: SchedulerConfig, record: Callable[[RecordedTick], None]) -> None:
        self._record = record
        self.overload: dict[str, OverloadPlan] = {}
        self.num_held: dict[str, int] = {}
        self.pools: dict[DepthClass, DepthPools] = {}
        self._last_pools: dict[DepthClass, DepthPools] = {}  # of before a lull, too
        self._link = LinkMeter()
        self.drift: dict[str, DriftMonitor] = {}
        self.last = TickSummary()
        self.moves = MoveTracker(
            max_concurrent=config.ares.max_concurrent_moves, backoff_s=config.ares.backoff_s
        )
        self.configure(config)

    def configure(self, config: SchedulerConfig) -> None:
        """Take a new configuration; what is under way goes on."""
        self.config = config
        self.moves.max_concurrent = config.ares.max_concurrent_moves
        self.moves.backoff_s = config.ares.backoff_s
        self.settings = settings_of(config)
        if not self.is_on:  # no tick will find that it is over
            self.overload, self.num_held, self.pools = {}, {}, {}
            self.last = TickSummary()

    @property
    def is_on(self) -> bool:
        return self.config.ares.mode != "off"

    @property
    def wants_forecasts(self) -> bool:
        """Whether replicas shall predict lengths and forecast their loads. One that is alone in
        its class does so too: when its memory will be full is worth knowing there as well."""
        return self.is_on or self.config.placement == "ares"

    def is_distrusted(self, model: str) -> bool:
        """Whether a model's predictions are not to be believed now."""
        monitor = self.drift.get(model)
        return monitor is not None and monitor.is_drifting

    def served(self, models: Container[str]) -> None:
        """Forget what is known of the predictions of other models."""
        self.drift = {name: monitor for name, monitor in self.drift.items() if name in models}

    def ended_lengths(self, model: str, outcomes: Sequence[LengthOutcome]) -> None:
        """Sequences of a model have ended by themselves."""
        monitor = self.drift.setdefault(model, DriftMonitor())
        for outcome in outcomes:
            monitor.ended(outcome.prediction, outcome.remaining_tokens)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Between two decode replicas, as configured or as measured."""
        return self.costs(()).bandwidth_bytes_per_s

    def tick(
        self, snapshots: Sequence[ReplicaSnapshot], *, now_s: float, now_unix_s: float
    ) -> list[MigrationOrder]:
        """Decide the moves of this moment and note them as under way.

        Args:
            snapshots: All that is known; those too old are left out.
        """
        started_s = time.perf_counter()
        busy, fixed = self.moves.busy(now_s), self.moves.fixed(now_s)
        oldest_unix_s = now_unix_s - self.config.snapshot_max_age_s
        heard = [s for s in snapshots if s.taken_unix_s >= oldest_unix_s]
        fresh = [s for s in heard if s.info.role.does(Role.DECODE)]
        if fixed:
            fresh = [
                s if s.forecast is None else s.changed(forecast=with_fixed(s.forecast, fixed))
                for s in fresh
            ]
        ticks: list[RecordedTick] = []
        unplaced: Counter[str] = Counter()
        for snapshot in heard:
            unplaced[snapshot.info.depth_class.model] += snapshot.num_unplaced
        last, self.overload, self.num_held = self.overload, {}, {}
        self.pools = {}
        self.last = TickSummary(now_unix_s)
        for model, members in by_model(fresh).items():
            plan = self._overload_of(model, members, last.get(model), unplaced[model])
            if plan is not None:
                self.overload[model], self.num_held[model] = plan, unplaced[model]
            for depth_class, some in by_class(members).items():
                last_pools = self._last_pools.get(depth_class)
                decided_pools = self._pools_of(some, last_pools, now_unix_s)
                if decided_pools is not None:
                    self.pools[depth_class] = self._last_pools[depth_class] = decided_pools
            tick = self._decide(model, members, busy, now_unix_s)
            if tick is not None:
                ticks.append(tick)
        decided = [(tick, order) for tick in ticks for order in tick.orders]
        decided = decided[: self.moves.num_free]
        if decided:
            from quadriga.policies.ares.explanation import explain  # Loaded with the first move.
        for tick, order in decided:
            self.moves.ordered(order, now_unix_s, explain(tick, order))
        self.last.took_s = time.perf_counter() - started_s
        return [order for _, order in decided]

    def _overload_of(
        self,
        model: str,
        members: Sequence[ReplicaSnapshot],
        last: OverloadPlan | None,
        num_held: int,
    ) -> OverloadPlan | None:
        """What overload of a model calls for; None without one, or where nothing is predicted."""
        config = self.config
        is_used = config.ares.mode == "ares" and config.placement == "ares" and config.ares.overload
        if not is_used or self.is_distrusted(model) or (last is None and not num_held):
            return None

        def rows_of(cluster: ClusterForecast) -> NDArray[np.int64]:
            is_over = is_overloaded(cluster, last, num_held=num_held)
            return np.arange(len(cluster) if is_over else 0)

        cluster = unpack([s for s in members if not s.draining], rows_of)
        return None if cluster is None else plan_overload(cluster, last, num_held=num_held)

    def pools_of(self, members: Sequence[ReplicaSnapshot]) -> DepthPools | None:
        """What was decided of the depth pools of one class."""
        return self.pools.get(members[0].info.depth_class) if members else None

    def _pools_of(
        self, members: Sequence[ReplicaSnapshot], last: DepthPools | None, now_unix_s: float
    ) -> DepthPools | None:
        """Whether shallow and deep sequences of a class run apart; None: there is no choice."""
        config = self.config
        is_used = config.ares.mode == "ares" and config.placement == "ares"
        if not is_used or not config.ares.depth_pools:
            return None
        able = comparable([s for s in members if not s.draining])
        if last is not None and not is_due(last, [s.info.name for s in able], now_unix_s):
            return last
        if all(s.forecast is None or s.forecast.front_share == 1.0 for s in able):
            return None  # no exit is in use
        cluster = unpack(able)
        settings = settings_for(self.settings, able)
        return None if cluster is None else plan_pools(cluster, settings, last, now_unix_s)

    def _decide(
        self, model: str, members: list[ReplicaSnapshot], busy: frozenset[str], now_unix_s: float
    ) -> RecordedTick | None:
        able = [s for s in members if s.forecast is not None]
        if len(able) < 2:
            for depth_class, some in by_class(members).items():
                num_able = sum(s.forecast is not None for s in some)
                self.last.why[str(depth_class)] = f"{num_able} of {len(some)} replicas can forecast"
            return None
        # Loaded where rescheduling is on.
        from quadriga.policies.ares.recording import RecordedTick
        from quadriga.policies.ares.rescheduler import Rescheduler

        costs = self.costs(able)
        settings = settings_for(self.settings, able)
        predicts = self.config.ares.mode == "ares"
        load_only = self.is_distrusted(model)
        rescheduler = Rescheduler(settings, predicts=predicts)
        overload = self.overload.get(model)
        classes = by_class(able)
        pools = {c: self.pools[c] for c in classes if c in self.pools}
        orders = rescheduler.tick(
            able, costs, busy=busy, load_only=load_only, overload=overload, pools=pools
        )
        tick = RecordedTick(
            at_s=now_unix_s,
            snapshots=able,
            settings=settings,
            costs=costs,
            predicts=predicts,
            load_only=load_only,
            busy=busy,
            orders=orders,
            overload=overload,
            pools=pools,
        )
        self._record(tick)
        for depth_class, some in classes.items():
            self.last.work |= rescheduler.work(some, load_only=load_only)
            of_class = [o for o in orders if o.depth_class == depth_class]
            why = _why(of_class, some, busy, load_only)
            if overload is not None:
                names = [s.info.name for s in some]
                why = overload.described(names, self.num_held[model])
            elif depth_class in pools:
                why += f"; {pools[depth_class].described()}"
            self.last.why[str(depth_class)] = why
        return tick

    def costs(self, members: Sequence[ReplicaSnapshot]) -> TransferCosts:
        """What moving a sequence of a class costs."""
        sizes = [s.forecast.bytes_per_token for s in members if s.forecast is not None]
        costs = self._link.costs(max(sizes, default=0.0))
        configured = self.config.ares.bandwidth_bytes_per_s
        if configured == "auto":
            return costs
        return replace(costs, bandwidth_bytes_per_s=configured, round_trip_s=ROUND_TRIP_S)

    def ended(self, order: MigrationOrder, report: MigrationReport, *, now_s: float) -> None:
        """An order has come to its end."""
        self.moves.ended(order, report, now_s)
        if report.outcome == "moved":
            self._link.moved(report.bytes_sent, report.took_s, report.sending_s)


def _why(
    orders: Sequence[MigrationOrder],
    members: Sequence[ReplicaSnapshot],
    busy: frozenset[str],
    load_only: bool,
) -> str:
    """What a tick decided, in a few words."""
    by = "the present load; predictions do not hold" if load_only else "the forecast"
    if orders:
        return f"{len(orders)} ordered, by {by}"
    taking_part = sum(s.info.name in busy for s in members)
    if taking_part:
        return f"none ordered, by {by}; {taking_part} of {len(members)} replicas take part in one"
    return f"balanced, or nothing worth its cost, by {by}"
