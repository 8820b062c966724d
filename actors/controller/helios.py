"""HELIOS in the controller: the calls behind `quadriga.control.helios_operator`.

Reports of ingresses come in batches, and the replicas' state with their heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from ray.exceptions import RayError

from actors.controller import controller_store
from actors.controller.full_depth_rescorer import FullDepthRescorer
from actors.controller.replica_manager import ReplicaManager
from actors.controller.strict_requests import StrictRequests
from actors.rpc.lifecycle import scheduler_name
from actors.rpc.ray_rpc import call
from quadriga.background import background
from quadriga.clock import Clock
from quadriga.config.loader import QuadrigaConfig
from quadriga.control.desired import Desired
from quadriga.control.helios_operator import HeliosOperator
from quadriga.control.helios_setup import HeliosSetup, set_up
from quadriga.control.model_routing import Route
from quadriga.control.replica_names import parse_replica_name
from quadriga.control.replica_record import ReplicaRecord
from quadriga.control.scaling import Scaling
from quadriga.core.replica import DepthClass, ReplicaSnapshot, ResizeReport
from quadriga.core.routing import AutoReport
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.policies.helios.history import (
    HistoryTable,
    load_table,
    pack_table,
    save_table,
    unpack_table,
)
from quadriga.policies.helios.messages import Resize
from quadriga.replica.resizing import ANSWER_SLACK_S, failure

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
KEEP_EVERY_S = 2.0


class HeliosController:
    """One deployment's HELIOS; on the controller's event loop.

    Attributes:
        operator: The machine and its orders.
        pools: What each place shall hold.
    """

    def __init__(
        self,
        app: str,
        setup: HeliosSetup,
        manager: ReplicaManager,
        strict: StrictRequests,
        clock: Clock,
    ) -> None:
        self.operator = HeliosOperator(
            setup,
            manager.replicas,
            clock,
            num_failures=manager.num_failures,
            resize=lambda replica, order: background(self._resize(replica, order)),
            place_of=partial(parse_replica_name, app),
        )
        self.pools = self.operator.pools
        self._app = app
        self._clock = clock
        self._config = setup.config
        helios = setup.config.helios
        is_scaled = helios.scaling.enabled
        self._scaling = Scaling(helios.scaling, self.operator.pools, clock) if is_scaled else None
        self._is_scaling = False
        self._strict = strict
        self._specs = setup.specs
        self._rescorer = FullDepthRescorer(app, clock)
        self._saved_s = clock.now_s()
        self._saved = pack_table(self.operator.machine.table)
        self._is_saving = False
        self._routing = asyncio.Lock()
        self._num_routes = 0

    def report(self, ingress_id: str, first: int, reports: list[AutoReport]) -> None:
        """Take an ingress's reports of requests whose model was chosen for them."""
        for report in self.operator.untold(ingress_id, first, reports):
            self.operator.report(report)
            is_whole = report.kind == "finished" and report.depth_class is not None
            if is_whole and report.output_ids and not self._rescorer.is_reading:
                background(self._rescore(report))

    async def _rescore(self, report: AutoReport) -> None:
        """Have a scout at full depth read an answer, where there is one of the model."""
        assert report.depth_class is not None
        model = report.depth_class.model
        replica = self.operator.rescorer(model)
        if replica is not None:
            sample = await self._rescorer.read(report, replica, model)
            if sample is not None and sample.exits:
                self.operator.handle(sample)

    def tick(self) -> None:
        """Take the present state of the replicas in, and carry out what follows from it."""
        filling = self.operator.tick()
        self._strict.load(filling, self._specs, self._config.helios)
        target = self.operator.machine.status().target
        if self._scaling is not None and target is not None and not self._is_scaling:
            self._is_scaling = True
            background(self._scale(self._scaling, target))
        background(self.send_route(self.operator.route()))
        if self._clock.now_s() - self._saved_s >= KEEP_EVERY_S:
            background(self.keep())

    async def _resize(self, replica: ReplicaRecord, order: Resize) -> None:
        left_s = max(0.1, order.deadline_s - self._clock.now_s() - ANSWER_SLACK_S)
        try:
            report: ResizeReport = await call(
                replica.name,
                "resize",
                order.depth_class.depth,
                left_s,
                timeout_s=left_s + ANSWER_SLACK_S,
            )
        except QuadrigaError as exc:
            report = failure(exc)
        self.operator.resized(replica, order, report)

    async def _scale(self, scaling: Scaling, target: DepthClass) -> None:
        """Look at the loads and decide; one such look at a time."""
        try:
            snapshots: list[ReplicaSnapshot] = await call(
                scheduler_name(self._app), "loads", timeout_s=CALL_TIMEOUT_S
            )
            scaling.decide(target, snapshots)
        except QuadrigaError as exc:
            logger.info("no scaling now: %s", exc)
        finally:
            self._is_scaling = False

    async def send_route(self, route: Route | None) -> None:
        """Tell the scheduler where requests go; None: models are not chosen any more.

        One call after the other: the last one must not be overtaken by the one before.
        """
        number = self._num_routes = self._num_routes + 1
        async with self._routing:
            if number < self._num_routes:
                return
            try:
                await call(scheduler_name(self._app), "set_route", route, timeout_s=CALL_TIMEOUT_S)
            except QuadrigaError as exc:
                logger.info("the scheduler did not take the route: %s", exc)

    async def keep(self) -> None:
        """Store the history where the next controller finds it, if it has changed."""
        if self._is_saving:
            return
        self._is_saving = True
        self._saved_s = self._clock.now_s()
        table = self.operator.machine.table
        try:
            packed = pack_table(table)
            if packed == self._saved:
                return
            path = self._config.helios.history_path
            if path is None:
                await asyncio.to_thread(controller_store.save, self._app, "history", packed)
            else:
                await asyncio.to_thread(save_table, path, table)
            self._saved = packed
        except (RayError, RuntimeError, OSError) as exc:
            logger.warning("the history was not stored: %s", exc)
        finally:
            self._is_saving = False

    def view(self) -> dict[str, Any]:
        """The history and the machine as plain values, for operators."""
        view = self.operator.view()
        view["counters"]["escalated"] = self._strict.num_moved
        view["counters"]["scaled"] = self._scaling.num_orders if self._scaling is not None else 0
        view["scaling"] = self._scaling.view() if self._scaling is not None else None
        return view


def set_up_helios(app: str, desired: Desired) -> HeliosSetup:
    """Prepare the choice of models; blocks. Raises: ConfigError."""
    config = desired.deployment.config
    return set_up(config, desired.hardware, desired.places, load_history(app, config))


def load_history(app: str, config: QuadrigaConfig) -> HistoryTable:
    """The history that an earlier controller stored; an empty one where there is none."""
    path = config.helios.history_path
    if path is not None:
        return load_table(path)
    raw = controller_store.load(app, "history")
    if raw is None:
        return HistoryTable()
    try:
        return unpack_table(raw)
    except ConfigError as exc:
        logger.warning("the stored history is of no use, and begins anew: %s", exc)
        return HistoryTable()
