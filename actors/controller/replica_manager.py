"""The controller's table of replica processes: it spawns, adopts, watches and retires them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.controller.drain import empty
from actors.controller.node_reports import NodeReports
from actors.controller.placement_groups import is_placed, remove, spawn
from actors.rpc.lifecycle import scheduler_name
from actors.rpc.ray_rpc import RAY_FAILED, call, call_handle, remember_handle
from quadriga.background import background
from quadriga.clock import Clock
from quadriga.config.ingress import LifecycleConfig
from quadriga.config.resolve import ReplicaSpec
from quadriga.control.replica_names import fingerprint
from quadriga.control.replica_record import PlaceKey, ReplicaPhase, ReplicaRecord, ReplicaStatus
from quadriga.core.replica import Role
from quadriga.errors import QuadrigaError
from quadriga.policies.liveness import event_loop_stall_s, patience_s, silence_limit_s

logger = logging.getLogger(__name__)

ADOPTED_SILENCE_S = 30.0
"""An adopted replica that is placed, and answers nothing for so long, is hung: it answers while its
weights are loaded, so no more than its process's start may still be under way. One without a place
for so long gives way to what is wanted now."""
STOP_GRACE_S = 5.0
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_DOUBLINGS = 10
HEALTHY_S = 60.0
REMOVE_PAUSE_S = 1.0
MAX_REMOVALS = 300
MAX_DEPARTED = 1000
"""Names of replicas that are gone are remembered, so many."""


async def _always() -> bool:
    return True


@dataclass(slots=True)
class ReplicaHandle(ReplicaRecord):
    """A replica process with the Ray actor behind it, and what watches it."""

    handle: ActorHandle[Any] = field(kw_only=True)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicaManager:
    """Spawns, adopts, watches and retires replicas.

    Args:
        changed: Called when a replica became ready or is gone: time to reconcile.
        ingress_age_s: Seconds since an ingress was heard of; passed on with heartbeats.
        is_leaving: Whether a replica must go soon, and should be given nothing more.
        is_scout: Whether a replica is there for profiles; it is told so with heartbeats.
        is_held: Whether this process may act for the application now; see `LeaderLease`.

    Attributes:
        failing: Places whose last process of a fingerprint ended before it was ready.
    """

    def __init__(
        self,
        app: str,
        clock: Clock,
        changed: Callable[[], None],
        ingress_age_s: Callable[[], float],
        is_leaving: Callable[[ReplicaRecord], bool] = lambda replica: False,
        is_held: Callable[[], Awaitable[bool]] = _always,
        is_scout: Callable[[ReplicaRecord], bool] = lambda replica: False,
    ) -> None:
        self.replicas: dict[str, ReplicaHandle] = {}
        self.lifecycle = LifecycleConfig()
        self.failing: set[tuple[PlaceKey, str | None]] = set()
        self._app = app
        self._clock = clock
        self._changed = changed
        self._ingress_age_s = ingress_age_s
        self._is_leaving = is_leaving
        self._is_held = is_held
        self._is_scout = is_scout
        self._departed: OrderedDict[str, None] = OrderedDict()
        self._num_failures: dict[tuple[PlaceKey, str | None], int] = {}
        self._not_before_s: dict[PlaceKey, float] = {}
        self._reports = NodeReports(clock)
        self.num_respawns, self.last_failure = 0, ""

    def of(self, key: PlaceKey) -> list[ReplicaHandle]:
        """Replicas of one place in the desired state that are not on their way out."""
        return [
            m
            for m in self.replicas.values()
            if m.key == key and m.phase is not ReplicaPhase.RETIRING
        ]

    def knows(self, name: str) -> bool:
        """Whether a replica is in the table, or was: it may be ending still."""
        return name in self.replicas or name in self._departed

    def num_failures(self, key: PlaceKey) -> int:
        """Processes of a place that died, one after the other, before one was well for long."""
        return sum(count for (of, _), count in self._num_failures.items() if of == key)

    def may_spawn(self, key: PlaceKey) -> bool:
        """Whether the back-off after a death is over."""
        return self._clock.now_s() >= self._not_before_s.get(key, 0.0)

    async def spawn(
        self, key: PlaceKey, name: str, spec: ReplicaSpec, config: dict[str, Any]
    ) -> None:
        """Start a replica process and watch it from now on."""
        handle = await asyncio.to_thread(spawn, name, spec, config)
        now_s = self._clock.now_s()
        self._watch(ReplicaHandle(key, name, now_s, fingerprint(spec, config), handle=handle))
        logger.info("spawned %s", name)

    def adopt(self, key: PlaceKey, name: str, handle: ActorHandle[Any]) -> None:
        """Take over a replica process that an earlier controller started."""
        self._watch(ReplicaHandle(key, name, self._clock.now_s(), None, handle=handle))
        logger.info("adopted %s", name)

    def retire(
        self,
        replica: ReplicaHandle,
        reason: str,
        *,
        moves: bool = False,
        within_s: float | None = None,
    ) -> None:
        """Let a replica finish what it has, then end it; returns at once.

        Args:
            moves: Others of its kind take over what it runs, as far as they have room.
            within_s: It has so long, if that is less than the drain deadline.
        """
        if replica.phase is ReplicaPhase.RETIRING:
            return
        logger.info("retire %s: %s", replica.name, reason)
        was_ready = replica.phase is ReplicaPhase.READY
        replica.phase = ReplicaPhase.RETIRING
        deadline_s = self.lifecycle.drain_timeout_s
        if within_s is not None:
            deadline_s = min(deadline_s, within_s)
        if moves and was_ready and replica.key[0].does(Role.DECODE):
            emptying = empty(
                call,
                replica.name,
                lambda: self.next_owners(replica),
                reason=reason,
                timeout_s=deadline_s,
            )
            replica.tasks.append(background(emptying))
        replica.tasks.append(background(self._retire(replica, was_ready, deadline_s)))

    async def stop_all(self) -> None:
        """End every replica without waiting for its work."""
        replicas = list(self.replicas.values())
        for replica in replicas:
            replica.phase = ReplicaPhase.RETIRING
        await asyncio.gather(*(self._stop(m) for m in replicas))

    def next_due_s(self) -> float | None:
        """Seconds until the first back-off is over; None when there is none."""
        now_s = self._clock.now_s()
        waits = [t - now_s for t in self._not_before_s.values() if t > now_s]
        return min(waits) if waits else None

    def _watch(self, replica: ReplicaHandle) -> None:
        self.replicas[replica.name] = replica
        remember_handle(replica.name, replica.handle)
        replica.tasks += [
            background(self._await_death(replica)),
            background(self._heartbeat_forever(replica)),
        ]

    async def _await_death(self, replica: ReplicaHandle) -> None:
        """Wait in a call that never returns; its failure means that the replica died."""
        while replica.name in self.replicas:
            try:
                await replica.handle.wait_forever.remote()
            except ActorUnavailableError:
                await asyncio.sleep(1.0)  # the heartbeats decide
            except RayActorError as exc:
                await self._gone(replica, f"died: {str(exc).splitlines()[0]}")
            except Exception:  # a border, as for heartbeats
                logger.exception("the wait for the end of %s failed", replica.name)
                await asyncio.sleep(1.0)

    async def _heartbeat_forever(self, replica: ReplicaHandle) -> None:
        while replica.name in self.replicas:
            try:
                await self._heartbeat(replica)
            except Exception:  # a border: an unwatched replica is lost to the cluster
                logger.exception("a look at %s failed", replica.name)
            interval_s = self.lifecycle.heartbeat_interval_s
            await asyncio.sleep(
                interval_s if replica.phase is ReplicaPhase.READY else interval_s / 4
            )

    async def _heartbeat(self, replica: ReplicaHandle) -> None:
        """Ask it how it is, and judge."""
        silence_s = silence_limit_s(self.lifecycle.heartbeat_interval_s)
        # Ray keeps calls to what has no process.
        if replica.phase is not ReplicaPhase.PENDING or await self._has_place(replica):
            await self._ask(replica, min(silence_s, self.lifecycle.replica_start_timeout_s))
        reason = await self._verdict(replica, silence_s)
        if reason is not None and await self._is_held():
            await self._gone(replica, reason)

    async def _ask(self, replica: ReplicaHandle, timeout_s: float) -> None:
        began_s = self._clock.now_s()
        try:
            status: ReplicaStatus = await call_handle(
                replica.name,
                replica.handle,
                "heartbeat",
                self._ingress_age_s(),
                self._is_scout(replica),
                timeout_s=timeout_s,
            )
            self._heard(replica, status)
        except QuadrigaError as exc:
            logger.info("heartbeat of %s: %s", replica.name, exc)
            late_s = event_loop_stall_s(began_s, self._clock.now_s(), timeout_s)
            if not await self._is_held():  # this process may be cut off
                late_s = self._clock.now_s() - began_s
            replica.excuse(late_s)

    def _heard(self, replica: ReplicaHandle, status: ReplicaStatus) -> None:
        now_s = self._clock.now_s()
        replica.heard_s = now_s
        replica.status = status
        if replica.fingerprint is None:
            replica.fingerprint = status.fingerprint
            self._changed()
        if replica.phase in (ReplicaPhase.PENDING, ReplicaPhase.STARTING):
            replica.phase = ReplicaPhase.READY if status.is_ready else ReplicaPhase.STARTING
            if status.is_ready:
                replica.since_s = now_s
                logger.info("%s is ready", replica.name)
                self.failing.discard((replica.key, replica.fingerprint))
                self._changed()
                if status.is_draining:  # for an earlier controller, which cannot end it any more
                    self.retire(replica, "an earlier controller had it drain", moves=True)
        if replica.phase is ReplicaPhase.READY and now_s - replica.since_s > HEALTHY_S:
            self._num_failures.pop((replica.key, replica.fingerprint), None)

    async def _verdict(self, replica: ReplicaHandle, silence_s: float) -> str | None:
        """Why a replica must be replaced; None while it may live."""
        now_s = self._clock.now_s()
        status = replica.status
        if status is not None and status.error is not None:
            return f"its engine failed: {status.error}"
        since_s = replica.silent_since_s
        limit_s = silence_s if replica.heard_s is not None else max(silence_s, ADOPTED_SILENCE_S)
        if since_s is not None and now_s - since_s > self._patience_s(limit_s):
            return f"hung: no answer for {now_s - since_s:.1f} s"
        if replica.phase is ReplicaPhase.PENDING:
            waited_s, has_place = now_s - replica.since_s, await self._has_place(replica)
            may_go = has_place is False and replica.fingerprint is None
            if may_go and waited_s > ADOPTED_SILENCE_S:
                return f"an earlier controller asked for it, without a place for {waited_s:.0f} s"
            if not has_place:
                await self._reports.while_pending(replica.since_s)
        start_s = self.lifecycle.replica_start_timeout_s
        if replica.phase is ReplicaPhase.STARTING and now_s - replica.since_s > start_s:
            return (
                f"not ready {start_s:.0f} s after it was placed (at last: {replica.doing(now_s)}); "
                "raise lifecycle.replica_start_timeout_s if that only takes long"
            )
        return None

    async def _has_place(self, replica: ReplicaHandle) -> bool | None:
        """Whether its placement group is created, and note that; None where Ray does not say."""
        try:
            has_place = await asyncio.to_thread(is_placed, replica.name)
        except RAY_FAILED as exc:
            logger.warning("Ray does not say whether %s has a place: %s", replica.name, exc)
            return None
        if has_place and replica.phase is ReplicaPhase.PENDING:
            replica.phase, replica.since_s = ReplicaPhase.STARTING, self._clock.now_s()
        return has_place

    def _patience_s(self, silence_s: float) -> float:
        now_s = self._clock.now_s()
        since = [s for m in self.replicas.values() if (s := m.silent_since_s) is not None]
        return patience_s([now_s - since_s for since_s in since], limit_s=silence_s)

    async def _gone(self, replica: ReplicaHandle, reason: str) -> None:
        """Remove a replica from the table, its process and placement group included."""
        if self.replicas.pop(replica.name, None) is None:
            return
        logger.warning("%s is gone: %s", replica.name, reason)
        self._departed[replica.name] = None
        if len(self._departed) > MAX_DEPARTED:
            self._departed.popitem(last=False)
        replica.is_gone.set()
        for task in replica.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if replica.phase is not ReplicaPhase.RETIRING:
            kind = (replica.key, replica.fingerprint)  # not an older one that serves beside it
            failures = self._num_failures.get(kind, 0)
            self._num_failures[kind] = failures + 1
            if replica.phase is not ReplicaPhase.READY:
                self.failing.add(kind)
            longer = 2.0 ** min(failures, MAX_DOUBLINGS)
            pause_s = min(BACKOFF_S * longer, MAX_BACKOFF_S) if failures else 0.0
            self._not_before_s[replica.key] = self._clock.now_s() + pause_s
            self.num_respawns += 1
            self.last_failure = f"{replica.name}: {reason}"
        if not await self._remove(replica):
            background(self._remove_later(replica))
        await self.tell_scheduler(replica.name)
        self._changed()

    async def _remove(self, replica: ReplicaHandle) -> bool:
        """End its process and give its place back. Returns whether Ray did."""
        try:
            await asyncio.to_thread(remove, replica.name, replica.handle)
        except RAY_FAILED as exc:
            logger.warning("%s was not removed: %s", replica.name, exc)
            return False
        return True

    async def _remove_later(self, replica: ReplicaHandle) -> None:
        """Try again: an unused placement group is lost to the cluster."""
        for _ in range(MAX_REMOVALS):
            await asyncio.sleep(REMOVE_PAUSE_S)
            if await self._remove(replica):
                return
        logger.error(
            "%s was not removed %d times; its place stays taken until the service is stopped",
            replica.name,
            MAX_REMOVALS,
        )

    async def tell_scheduler(self, name: str) -> None:
        """Let the scheduler forget a replica that is gone."""
        try:
            await call(scheduler_name(self._app), "replica_died", name, timeout_s=2.0)
        except QuadrigaError as exc:
            logger.info("the scheduler did not hear that %s is gone: %s", name, exc)

    def next_owners(self, replica: ReplicaHandle) -> list[str]:
        """Replicas that can take over what another one runs, the emptiest first."""
        able = [
            (m.status.load.num_held, m.name)
            for m in self.replicas.values()
            if m.key[0].does(Role.DECODE)
            and m.phase is ReplicaPhase.READY
            and m.status is not None
            and m.fingerprint == replica.fingerprint
            and not self._is_leaving(m)
        ]
        return [name for _, name in sorted(able) if name != replica.name]

    async def _retire(self, replica: ReplicaHandle, was_ready: bool, deadline_s: float) -> None:
        left_s, ends_s = deadline_s, self._clock.now_s() + deadline_s
        while was_ready:
            try:
                is_empty = await call_handle(
                    replica.name, replica.handle, "drain", left_s, timeout_s=left_s + 5.0
                )
                if not is_empty:
                    logger.warning("%s did not drain in %.0f s", replica.name, deadline_s)
                break
            except QuadrigaError as exc:
                logger.info("drain of %s: %s", replica.name, exc)
                if exc.code != "unreachable" or left_s <= 0:
                    break
            await asyncio.sleep(REMOVE_PAUSE_S)
            left_s = ends_s - self._clock.now_s()
        await self._stop(replica)

    async def _stop(self, replica: ReplicaHandle) -> None:
        """Ask a replica to end, then make sure of it."""
        if replica.heard_s is not None:
            try:
                await call_handle(replica.name, replica.handle, "stop", timeout_s=STOP_GRACE_S)
                async with asyncio.timeout(STOP_GRACE_S):
                    await replica.is_gone.wait()
            except TimeoutError:
                logger.warning("%s does not end by itself", replica.name)
            except QuadrigaError as exc:
                logger.info("stop of %s: %s", replica.name, exc)
        while replica.name in self.replicas:
            if await self._is_held():
                await self._gone(replica, "stopped")
                return
            await asyncio.sleep(REMOVE_PAUSE_S)
