"""The controller actor: makes what runs equal to what the configuration asks for."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors.controller import controller_store
from actors.controller.drain import LeavingNodes
from actors.controller.leader_lease import LeaderLease
from actors.controller.placement_groups import cluster_hardware, groups_of, living_replicas, remove
from actors.controller.replica_manager import ReplicaManager
from actors.controller.strict_requests import StrictRequests
from actors.controller.watchdogs import IngressWatch, SchedulerWatch
from actors.metrics.metrics_page import MetricsPage
from actors.rpc.connections import DirectlyCalled
from actors.rpc.lifecycle import controller_name, end_this_actor, scheduler_name
from actors.rpc.ray_rpc import LOOK_UP_TIMEOUT_S, RAY_FAILED, call, find_actor
from actors.rpc.signals import die_on_sigterm
from quadriga.background import background
from quadriga.clock import SystemClock
from quadriga.config.ingress import LoggingConfig
from quadriga.config.resolve import ReplicaSpec
from quadriga.control.control_metrics import ControllerMetrics
from quadriga.control.desired import Desired, resolve_on
from quadriga.control.replica_names import new_replica_name, parse_replica_name
from quadriga.control.replica_record import PlaceKey, ReplicaPhase, ReplicaRecord, place_name
from quadriga.control.rollout import (
    WaitingRollouts,
    fewer_wanted,
    is_relieved,
    kept_places,
    turn_over,
)
from quadriga.core.routing import AutoReport
from quadriga.errors import QuadrigaError, ReplicaDied
from quadriga.observability.exits_view import exits_view
from quadriga.observability.logs import configure_logging
from quadriga.observability.running_requests import RunningRequests
from quadriga.policies.liveness import event_loop_stall_s

if TYPE_CHECKING:
    from actors.controller.helios import HeliosController

logger = logging.getLogger(__name__)

TICK_S = 1.0
FORGET_TIMEOUT_S = 10.0
TURN_TIMEOUT_S = 10.0
LOADS_TIMEOUT_S = 5.0
ADOPT_EVERY_S = 30.0
"""Period of the search for replicas and placement groups that this process does not know."""


class Controller(DirectlyCalled):
    """Ray actor, restarted without limit. One loop compares the desired state with the actual.

    The desired state outlives the process in Ray's key-value store; the replicas outlive it as
    detached actors, and are adopted by their names.
    """

    def __init__(self, app: str, config: dict[str, Any]) -> None:
        logs = LoggingConfig.model_validate(config.get("logging", {}))
        configure_logging(logs.format, logs.level, process=controller_name(app))
        self._app = app
        self._first_config = config
        self._clock = SystemClock()
        self._heard_s = self._clock.now_s()
        self._page = MetricsPage(app, self._clock)
        self._running = RunningRequests()
        self._metrics = ControllerMetrics(app)
        self._leader_lease = LeaderLease(app)
        self._scheduler = SchedulerWatch(app, self._clock, self._leader_lease.is_held)
        self._acted_s = self._adopted_s = self._clock.now_s()
        self._ingresses = IngressWatch()
        self._wake = asyncio.Event()
        self._desired: Desired | None = None
        self._helios: HeliosController | None = None
        self._error: str | None = None
        self._rollouts = WaitingRollouts()
        self._is_ending = False
        self._is_started = asyncio.Event()
        self._wanting = asyncio.Lock()
        self._resolving: dict[str, asyncio.Task[Desired]] = {}
        self._restoring: asyncio.Task[None] | None = None
        self._num_asked = self._newest_wanted = 0
        self._leaving = LeavingNodes(self._wake.set, self._clock)
        self._manager = ReplicaManager(
            app,
            self._clock,
            self._wake.set,
            self._ingress_age_s,
            self._takes_nothing,
            self._leader_lease.is_held,
            self._is_scout,
        )
        self._strict = StrictRequests(self._manager.replicas, self._clock)
        die_on_sigterm()
        self._turns = background(self._run())
        background(self._page.sample_forever())

    # RPC

    async def ensure(self, config: dict[str, Any]) -> None:
        """Set the desired state; the same one again changes nothing, unless GPUs were added.

        Does not return while the application ends: the caller sees the end of this actor and
        creates another one.

        Args:
            config: As `ensure_cluster` writes it.

        Raises:
            ConfigError: It cannot be served on this cluster; the state before stays.
        """
        self._heard_s = self._clock.now_s()
        number = self._num_asked = self._num_asked + 1
        await self._is_started.wait()
        # A model that is fetched holds one thread, however many ingresses ask again meanwhile.
        asked = json.dumps(config)
        if asked not in self._resolving:
            self._resolving[asked] = background(self._resolve(config))
            self._resolving[asked].add_done_callback(lambda _: self._resolving.pop(asked))
        desired = await asyncio.shield(self._resolving[asked])
        async with self._wanting:
            if not self._is_ending and number > self._newest_wanted:  # a later one stays
                await self._want(desired)
                self._newest_wanted = number
        if self._is_ending:
            await asyncio.Event().wait()

    async def _resolve(self, config: dict[str, Any]) -> Desired:
        """What a configuration means on this cluster. Raises: ConfigError."""
        last, least_gpus = self._desired, 0.0
        if last is not None and last.config == config:
            least_gpus = last.hardware.num_gpus
        return await asyncio.to_thread(resolve_here, config, least_gpus)

    async def _want(self, desired: Desired) -> None:
        """Store what is desired, and go by it from then on. Raises: ConfigError."""
        last, helios = self._desired, self._helios
        if last is None or last.config != desired.config:
            helios = await self._make_helios(desired)
            text = json.dumps(desired.config).encode()
            await asyncio.to_thread(controller_store.save, self._app, "desired", text)
        if last is None or last.hardware.num_gpus != desired.hardware.num_gpus:
            gpus = str(desired.hardware.num_gpus).encode()
            await asyncio.to_thread(controller_store.save, self._app, "gpus", gpus)
        if self._helios is not None and helios is None:
            background(self._helios.send_route(None))
        self._desired, self._helios = desired, helios  # a turn between them would mix two
        self._manager.lifecycle = desired.deployment.config.lifecycle
        self._wake.set()

    async def ingress_heartbeat(self, ingress_id: str, actor: str = "") -> None:
        """Note a heartbeat of an ingress; without any the whole application ends.

        Args:
            actor: Serve's actor in which the ingress runs.
        """
        self._heard_s = self._clock.now_s()
        self._ingresses.hear(actor, self._heard_s)

    async def push_metrics(
        self, source: str, families: bytes, running: list[dict[str, Any]] | None = None
    ) -> None:
        """Take a process's metrics, as `Registry.snapshot` packs them; of an ingress `running`."""
        self._page.push(source, families)
        if running is not None:
            self._running.push(source, running, now_s=self._clock.now_s())

    async def metrics(self) -> bytes:
        """All processes' metrics as one Prometheus page; see `MetricsPage.show`."""
        await self._page.is_restored.wait()
        self._push_own_metrics()
        return await self._page.show()

    async def status(self) -> dict[str, Any]:
        """Desired and actual state, for start-up messages, health pages and tests."""
        desired = self._desired
        replicas = self._manager.replicas.values()
        ready = [m for m in replicas if m.phase is ReplicaPhase.READY]
        num_wanted = len(self._places(desired)) if desired is not None else 0
        now_s = self._clock.now_s()
        return {
            "app": self._app,
            "models": desired.models if desired is not None else [],
            "contexts": self._contexts(desired),
            "num_desired": num_wanted,
            "num_ready": len(ready),
            "is_ready": num_wanted > 0 and len(ready) == num_wanted == len(replicas),
            "num_respawns": self._manager.num_respawns,
            "error": self._error,
            "last_failure": self._manager.last_failure,
            "replicas": [
                {
                    "name": m.name,
                    "role": m.key[0].value,
                    "phase": m.phase.value,
                    "depth_class": str(m.status.info.depth_class) if m.status else None,
                    "node_id": m.status.info.node_id if m.status else None,
                    "error": str(m.status.error) if m.status and m.status.error else None,
                    "doing": m.doing(now_s) or self._rollouts.of(m.key),
                }
                for m in sorted(replicas, key=lambda m: m.name)
            ],
        }

    def _contexts(self, desired: Desired | None) -> dict[str, str]:
        """By model: how long a sequence may be, and why; of those that serve."""
        limits: dict[str, tuple[int, str]] = {}
        for replica in self._manager.replicas.values():
            if desired is None or replica.status is None or replica.phase is not ReplicaPhase.READY:
                continue
            info = replica.status.info
            sentence = desired.why_so_long(info)
            if sentence is not None:
                least = limits.get(info.depth_class.model, (info.max_model_len + 1, ""))
                limits[info.depth_class.model] = min(least, (info.max_model_len, sentence))
        return {model: sentence for model, (_, sentence) in sorted(limits.items())}

    async def operators_view(self) -> dict[str, Any]:
        """Replicas, requests, exits, load history and HELIOS, for the admin port."""
        return {
            "fleet": await self.status(),
            "requests": self._running.longest(now_s=self._clock.now_s()),
            "exits": exits_view(self._page.hub),
            "load_history": self._page.history.columns(now_unix_s=self._clock.unix_s()),
            "helios": await self.history(),
        }

    async def auto_reports(self, ingress_id: str, first: int, reports: list[AutoReport]) -> None:
        """What became of requests whose model was chosen for them; see `HeliosOperator`."""
        if self._helios is not None:
            self._helios.report(ingress_id, first, reports)

    async def history(self) -> dict[str, Any] | None:
        """What HELIOS knows and decided, as plain values; None where it is off."""
        return self._helios.view() if self._helios is not None else None

    def _push_own_metrics(self) -> None:
        desired = self._desired
        families = self._metrics.snapshot(
            [role for role, _ in self._places(desired)] if desired is not None else [],
            [(m.key[0], m.phase) for m in self._manager.replicas.values()],
            num_respawns=self._manager.num_respawns,
            is_failing=self._error is not None,
            helios=self._helios.view() if self._helios is not None else None,
        )
        self._page.push(self._metrics.registry.source, families)

    async def stop(self) -> None:
        """End the whole application: replicas, scheduler and this actor."""
        background(self._end("stopped"))

    # The loop

    async def _run(self) -> None:
        """Recover what an earlier controller knew, then keep the two states equal."""
        await self._page.restore()
        while not self._is_ending:
            self._wake.clear()
            try:
                if await self._leader_lease.is_held():
                    await self._turn()
                else:
                    self._excuse_silence()
            except Exception as exc:  # a border: whatever it is, it is tried again
                self._error = str(exc)
                logger.exception("a turn failed; trying again in %.0f s", TICK_S)
            orphan_s = self._manager.lifecycle.orphan_timeout_s
            pause_s = min(TICK_S, orphan_s / 4, self._manager.next_due_s() or TICK_S)
            began_s = self._clock.now_s()
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                late_s = event_loop_stall_s(began_s, self._clock.now_s(), pause_s)
                self._heard_s = min(self._clock.now_s(), self._heard_s + late_s)

    async def _turn(self) -> None:
        """Make the two states equal, as far as that can be, and look after the ingresses."""
        self._acted_s = self._clock.now_s()
        try:
            if not (self._is_started.is_set() or self._restoring):
                await self._adopt()
            elif self._acted_s > self._adopted_s + ADOPT_EVERY_S:
                await self._adopt_unknown()
            if self._desired is None or self._restoring is not None:
                await self._go_on_restoring()
            try:
                await self._reconcile()
            finally:  # the scheduler needs its route whatever fails here
                if self._helios is not None:
                    self._helios.tick()
            if self._desired is not None:
                self._strict.escalate(self._desired.deployment.config.transport.deadline_s)
            limit_s = self._manager.lifecycle.replica_start_timeout_s
            late = self._rollouts.overdue(limit_s, self._clock.now_s())
            if late is not None and late != self._error:
                logger.error("%s", late)
            self._error = late
        except QuadrigaError as exc:
            if str(exc) != self._error:  # once, not at every turn
                logger.error("what is wanted cannot run now: %s", exc)
            self._error = str(exc)
        except Exception as exc:  # a border: ingresses are looked after all the same
            self._error = str(exc)
            logger.exception("reconciling failed; trying again in %.0f s", TICK_S)
        if self._page.is_due:
            background(self._page.keep())
        now_s = self._clock.now_s()
        for actor in self._ingresses.hung(now_s):
            background(self._ingresses.end(actor, now_s))
        background(self._ingresses.forget_gone(now_s))
        orphan_s = self._manager.lifecycle.orphan_timeout_s
        if self._ingress_age_s() > orphan_s:
            await self._end(f"no ingress was heard of for {orphan_s:.0f} s")

    def _excuse_silence(self) -> None:
        """Count no silence while this process may be cut off from the others."""
        now_s = self._clock.now_s()
        late_s = now_s - self._acted_s
        self._heard_s = min(now_s, self._heard_s + late_s)
        self._scheduler.excuse(late_s)
        self._acted_s = now_s

    async def _adopt(self) -> None:
        """Take over the replicas that another controller started; may be repeated.

        Raises: QuadrigaError: Ray does not say where one of them is.
        """
        names = await asyncio.to_thread(living_replicas, self._app)
        for name in names:
            place = parse_replica_name(self._app, name)
            if place is None or self._manager.knows(name):
                continue
            try:
                self._manager.adopt(place, name, await find_actor(name, LOOK_UP_TIMEOUT_S))
            except ReplicaDied as exc:
                if exc.code == "unreachable":
                    raise  # it may well live: all this is done again
                logger.info("%s died before it was adopted", name)
        for name in await asyncio.to_thread(groups_of, self._app):
            if not self._manager.knows(name):
                logger.warning("%s is gone, and its place is given back", name)
                await asyncio.to_thread(remove, name, None)
                await self._manager.tell_scheduler(name)

    async def _adopt_unknown(self) -> None:
        """Adopt replicas that a controller left behind as it ended in the middle of a change."""
        self._adopted_s = self._clock.now_s()
        try:
            await self._adopt()
        except (QuadrigaError, *RAY_FAILED) as exc:
            logger.info("Ray does not list the replicas: %s", exc)

    async def _go_on_restoring(self) -> None:
        """Wait a turn for `_restore_desired`; the next turns do as well. Raises: ConfigError."""
        task = self._restoring = self._restoring or background(self._restore_desired())
        await asyncio.wait([task], timeout=TICK_S)
        if not self._is_started.is_set():  # ingresses wait in `ensure`, for a model to be fetched
            self._heard_s = self._clock.now_s()
        self._scheduler.excuse(math.inf)  # it was not called
        if task.done():
            self._restoring = None
            task.result()

    async def _restore_desired(self) -> None:
        """Take the desired state of an earlier controller, or the one given at the start.

        It may be that this cannot be served before more nodes have joined: then it is tried again.

        Raises: ConfigError.
        """
        async with self._wanting:
            if self._desired is not None:
                return  # `ensure` was called meanwhile
            try:
                saved = await asyncio.to_thread(controller_store.load, self._app, "desired")
                config = self._first_config if saved is None else json.loads(saved)
                gpus = await asyncio.to_thread(controller_store.load, self._app, "gpus")
                desired = await asyncio.to_thread(resolve_here, config, float(gpus or 0))
                await self._want(desired)
            finally:
                self._is_started.set()

    async def _make_helios(self, desired: Desired) -> HeliosController | None:
        """HELIOS for a configuration; None where it is off. Raises: ConfigError."""
        if not desired.deployment.config.helios.enabled:
            return None
        # A tenth of the service's code, which most deployments do not use.
        from actors.controller.helios import HeliosController, set_up_helios

        setup = await asyncio.to_thread(set_up_helios, self._app, desired)
        return HeliosController(self._app, setup, self._manager, self._strict, self._clock)

    def _places(self, desired: Desired) -> Mapping[PlaceKey, ReplicaSpec]:
        """What shall run, as of now."""
        return desired.places if self._helios is None else self._helios.pools.specs()

    async def _reconcile(self) -> None:
        """One comparison: spawn what lacks, retire what is surplus or outdated."""
        desired = self._desired
        if desired is None:
            return
        age_s = self._ingress_age_s()
        background(self._scheduler.configure(desired.config, desired.models, age_s))
        background(self._leaving.look())
        helios, places = self._helios, self._places(desired)
        wanted = {key: desired.fingerprint(spec) for key, spec in places.items()}
        work = {} if helios is not None else await self._keep_alike(wanted)
        failing = {role for (role, _), _ in self._manager.failing & wanted.items()}
        waits: dict[PlaceKey, str] = {}
        for key, spec in places.items():
            if self._is_ending:
                return
            if any(m.fingerprint is None for m in self._manager.of(key)):
                continue  # adopted, and not yet known
            everyone, now_s = list(self._manager.replicas.values()), self._clock.now_s()
            may_go = None if helios is None else helios.pools.who_decides(key)
            place = turn_over(
                key, everyone, wanted, failing, left_s=self._left_s, may_go=may_go, now_s=now_s
            )
            waits[key] = place.waits
            if place.lacks_one and self._manager.may_spawn(key):
                name = new_replica_name(self._app, *key)
                await self._manager.spawn(key, name, spec, desired.config)
            for one in place.going:
                replica = self._manager.replicas.get(one.replica.name)
                if replica is not None:  # it may have died while another one was spawned
                    self._manager.retire(
                        replica, one.reason, moves=one.moves, within_s=one.within_s
                    )
        self._rollouts.note(waits, self._clock.now_s())
        there = {k: [m for m in self._manager.of(k) if m.fingerprint == wanted[k]] for k in wanted}
        now_s = self._clock.now_s()
        for replica in list(self._manager.replicas.values()):
            # One that was adopted and has not answered yet may be a place that scaling added.
            if replica.key in places or replica.fingerprint is None:
                continue
            if is_relieved(replica, there, now_s=now_s):
                why = fewer_wanted(replica, self._manager.replicas.values(), work)
                self._manager.retire(replica, why, moves=True)

    async def _keep_alike(self, wanted: Mapping[PlaceKey, str]) -> Mapping[str, float]:
        """Give replicas the places that shall hold what they are; see `kept_places`.

        Returns: the remaining work of each replica, where some leave.
        """
        replicas = {
            name: m
            for name, m in self._manager.replicas.items()
            if m.phase is not ReplicaPhase.RETIRING and m.fingerprint is not None
        }
        work: dict[str, float] = {}
        if any(m.key not in wanted for m in replicas.values()):
            try:
                from quadriga.policies.scaling_need import remaining_work  # Where replicas leave.

                loads = await call(scheduler_name(self._app), "loads", timeout_s=LOADS_TIMEOUT_S)
                work = {s.info.name: remaining_work(s) for s in loads}
            except QuadrigaError as exc:
                logger.info("replicas leave by their number, not by their work: %s", exc)
        for name, key in kept_places([*replicas.values()], wanted, work).items():
            logger.info("%s fills %s now", name, place_name(key))
            replicas[name].key = key
        return work

    def _takes_nothing(self, replica: ReplicaRecord) -> bool:
        """Whether others' sequences shall not go there: it leaves, or only serves profiles."""
        return self._is_scout(replica) or self._left_s(replica) is not None

    def _is_scout(self, replica: ReplicaRecord) -> bool:
        return self._helios is not None and replica.key in self._helios.pools.scouts

    def _left_s(self, replica: ReplicaRecord) -> float | None:
        """Seconds until a replica goes, or its node does; None where both stay, as far as known."""
        status = replica.status
        if status is None:
            return None
        limits_s = (status.leave_s, self._leaving.left_s(status.info.node_id))
        return min((s for s in limits_s if s is not None), default=None)

    def _ingress_age_s(self) -> float:
        return self._clock.now_s() - self._heard_s

    async def _end(self, reason: str) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        self._leader_lease.keep()
        self._scheduler.retire()
        logger.info("the application %s ends: %s", self._app, reason)
        try:
            await self._page.close()  # a value that is still being written would stay behind
            await self._forget()
            if asyncio.current_task() is not self._turns:  # the turn under way may start a replica
                self._wake.set()
                await asyncio.wait([self._turns], timeout=TURN_TIMEOUT_S)
            await self._manager.stop_all()
            await self._scheduler.stop()
        finally:  # no other process would end it later
            await end_this_actor()

    async def _forget(self) -> None:
        try:
            # After a call that is storing the desired state just now.
            async with asyncio.timeout(FORGET_TIMEOUT_S), self._wanting:
                await asyncio.to_thread(controller_store.forget, self._app)
        except (TimeoutError, *RAY_FAILED) as exc:
            logger.warning("stored values of %s stay in Ray's store: %s", self._app, exc)


def resolve_here(config: dict[str, Any], least_gpus: float) -> Desired:
    """Resolve a configuration on the cluster's hardware; blocks. Raises: ConfigError.

    Args:
        least_gpus: So many were seen for this configuration; some may be away for a moment.
    """
    hardware = cluster_hardware()
    hardware = replace(hardware, num_gpus=max(hardware.num_gpus, least_gpus))
    return resolve_on(config, hardware)
