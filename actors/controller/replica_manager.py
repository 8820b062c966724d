"""The controller's book of replica processes: who lives, who is ready, who must go."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.controller.drain import empty
from actors.controller.node_reports import NodeReports
from actors.controller.placement_groups import groups, remove, spawn
from actors.replica.status import ReplicaStatus
from actors.rpc.lifecycle import fingerprint, scheduler_name
from actors.rpc.ray_rpc import RAY_FAILED, call, call_handle, remember_handle
from actors.rpc.tasks import background
from quadriga.clock import Clock
from quadriga.config.ingress import LifecycleConfig
from quadriga.config.resolve import ReplicaSpec
from quadriga.core.replica import Role
from quadriga.errors import QuadrigaError
from quadriga.policies.liveness import event_loop_stall_s, patience_s, silence_limit_s

logger = logging.getLogger(__name__)

ADOPTED_SILENCE_S = 30.0
"""An adopted replica that is placed, and answers nothing for so long, is hung: it answers while its
weights are loaded, so no more than its process's start may still be under way."""
STOP_GRACE_S = 5.0
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
HEALTHY_S = 60.0
REMOVE_PAUSE_S = 1.0
MAX_REMOVALS = 300
MAX_DEPARTED = 1000
"""Names of replicas that are gone are remembered, so many."""

Key = tuple[Role, int]


async def _always() -> bool:
    return True


class ReplicaPhase(StrEnum):
    """Where a replica process stands, as the controller sees it."""

    PENDING = "pending"  # no capacity for it yet, as far as known
    STARTING = "starting"
    READY = "ready"
    RETIRING = "retiring"


@dataclass(slots=True)
class ReplicaHandle:
    """One replica process.

    Attributes:
        fingerprint: Of its specification; None for an adopted one that has not answered yet.
        since_s: When it entered its phase.
        heard_s: When it last answered; None before the first answer.
    """

    key: Key
    name: str
    handle: ActorHandle[Any]
    since_s: float
    fingerprint: str | None
    phase: ReplicaPhase = ReplicaPhase.PENDING
    heard_s: float | None = None
    status: ReplicaStatus | None = None
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def silent_since_s(self) -> float | None:
        """When it last answered, or was found placed if it was adopted; None where neither is."""
        if self.fingerprint is None and self.phase is ReplicaPhase.STARTING:
            return self.since_s
        return self.heard_s

    def excuse(self, late_s: float) -> None:
        """We stood still for so long, and may not have read its answer."""
        if self.heard_s is not None:
            self.heard_s += late_s
        elif self.fingerprint is None:
            self.since_s += late_s


class ReplicaManager:
    """Spawns, adopts, watches and retires replicas.

    Args:
        changed: Called when a replica became ready or is gone: time to reconcile.
        ingress_age_s: Seconds since an ingress was heard of; passed on with heartbeats.
        is_leaving: Whether a replica must go soon, and should be given nothing more.
        is_held: Whether this process may act for the application now; see `LeaderLease`.
    """

    def __init__(
        self,
        app: str,
        clock: Clock,
        changed: Callable[[], None],
        ingress_age_s: Callable[[], float],
        is_leaving: Callable[[ReplicaHandle], bool] = lambda member: False,
        is_held: Callable[[], Awaitable[bool]] = _always,
    ) -> None:
        self.members: dict[str, ReplicaHandle] = {}
        self.lifecycle = LifecycleConfig()
        self._app = app
        self._clock = clock
        self._changed = changed
        self._ingress_age_s = ingress_age_s
        self._is_leaving = is_leaving
        self._is_held = is_held
        self._departed: OrderedDict[str, None] = OrderedDict()
        self._num_failures: dict[Key, int] = {}
        self._not_before_s: dict[Key, float] = {}
        self._reports = NodeReports(clock)
        self.num_respawns = 0

    def of(self, key: Key) -> list[ReplicaHandle]:
        """Replicas of one place in the desired state that are not on their way out."""
        return [
            m
            for m in self.members.values()
            if m.key == key and m.phase is not ReplicaPhase.RETIRING
        ]

    def knows(self, name: str) -> bool:
        """Whether a replica is on the book, or was: it may be ending still."""
        return name in self.members or name in self._departed

    def num_failures(self, key: Key) -> int:
        """Processes of a place that died, one after the other, before one was well for long."""
        return self._num_failures.get(key, 0)

    def may_spawn(self, key: Key) -> bool:
        """Whether the back-off after a death is over."""
        return self._clock.now_s() >= self._not_before_s.get(key, 0.0)

    async def spawn(self, key: Key, name: str, spec: ReplicaSpec, config: dict[str, Any]) -> None:
        """Start a replica process and watch it from now on."""
        handle = await asyncio.to_thread(spawn, name, spec, config)
        self._watch(
            ReplicaHandle(key, name, handle, self._clock.now_s(), fingerprint(spec, config))
        )
        logger.info("spawned %s", name)

    def adopt(self, key: Key, name: str, handle: ActorHandle[Any]) -> None:
        """Take over a replica process that an earlier controller started."""
        self._watch(ReplicaHandle(key, name, handle, self._clock.now_s(), None))
        logger.info("adopted %s", name)

    def retire(
        self,
        member: ReplicaHandle,
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
        if member.phase is ReplicaPhase.RETIRING:
            return
        logger.info("retire %s: %s", member.name, reason)
        was_ready = member.phase is ReplicaPhase.READY
        member.phase = ReplicaPhase.RETIRING
        deadline_s = self.lifecycle.drain_timeout_s
        if within_s is not None:
            deadline_s = min(deadline_s, within_s)
        if moves and was_ready and member.key[0] is Role.DECODE:
            member.tasks.append(background(self._empty(member, deadline_s)))
        member.tasks.append(background(self._retire(member, was_ready, deadline_s)))

    async def stop_all(self) -> None:
        """End every replica without waiting for its work."""
        members = list(self.members.values())
        for member in members:
            member.phase = ReplicaPhase.RETIRING
        await asyncio.gather(*(self._stop(m) for m in members))

    def next_due_s(self) -> float | None:
        """Seconds until the first back-off is over; None when there is none."""
        now_s = self._clock.now_s()
        waits = [t - now_s for t in self._not_before_s.values() if t > now_s]
        return min(waits) if waits else None

    def _watch(self, member: ReplicaHandle) -> None:
        self.members[member.name] = member
        remember_handle(member.name, member.handle)
        member.tasks += [
            background(self._await_death(member)),
            background(self._heartbeat_forever(member)),
        ]

    async def _await_death(self, member: ReplicaHandle) -> None:
        """One call that never returns; its failure is the news of the death."""
        while member.name in self.members:
            try:
                await member.handle.wait_forever.remote()
            except ActorUnavailableError:
                await asyncio.sleep(1.0)  # the heartbeats decide
            except RayActorError as exc:
                await self._gone(member, f"died: {str(exc).splitlines()[0]}")
            except Exception:  # a border, as for heartbeats
                logger.exception("the wait for the end of %s failed", member.name)
                await asyncio.sleep(1.0)

    async def _heartbeat_forever(self, member: ReplicaHandle) -> None:
        while member.name in self.members:
            try:
                await self._heartbeat(member)
            except Exception:  # a border: whom nobody watches is lost to the cluster
                logger.exception("a look at %s failed", member.name)
            interval_s = self.lifecycle.heartbeat_interval_s
            await asyncio.sleep(
                interval_s if member.phase is ReplicaPhase.READY else interval_s / 4
            )

    async def _heartbeat(self, member: ReplicaHandle) -> None:
        """Ask it how it is, and judge."""
        silence_s = silence_limit_s(self.lifecycle.heartbeat_interval_s)
        timeout_s = min(silence_s, self.lifecycle.replica_start_timeout_s)
        began_s = self._clock.now_s()
        try:
            status: ReplicaStatus = await call_handle(
                member.name,
                member.handle,
                "heartbeat",
                self._ingress_age_s(),
                timeout_s=timeout_s,
            )
            self._heard(member, status)
        except QuadrigaError as exc:
            logger.info("heartbeat of %s: %s", member.name, exc)
            late_s = event_loop_stall_s(began_s, self._clock.now_s(), timeout_s)
            if not await self._is_held():  # nobody hears this process, perhaps
                late_s = self._clock.now_s() - began_s
            member.excuse(late_s)
        reason = await self._verdict(member, silence_s)
        if reason is not None and await self._is_held():
            await self._gone(member, reason)

    def _heard(self, member: ReplicaHandle, status: ReplicaStatus) -> None:
        now_s = self._clock.now_s()
        member.heard_s = now_s
        member.status = status
        if member.fingerprint is None:
            member.fingerprint = status.fingerprint
            self._changed()
        if member.phase in (ReplicaPhase.PENDING, ReplicaPhase.STARTING):
            member.phase = ReplicaPhase.READY if status.is_ready else ReplicaPhase.STARTING
            if status.is_ready:
                member.since_s = now_s
                logger.info("%s is ready", member.name)
                self._changed()
        if member.phase is ReplicaPhase.READY and now_s - member.since_s > HEALTHY_S:
            self._num_failures.pop(member.key, None)

    async def _verdict(self, member: ReplicaHandle, silence_s: float) -> str | None:
        """Why a replica must be replaced; None while it may live."""
        now_s = self._clock.now_s()
        status = member.status
        if status is not None and status.error is not None:
            return f"its engine failed: {status.error}"
        since_s = member.silent_since_s
        limit_s = silence_s if member.heard_s is not None else max(silence_s, ADOPTED_SILENCE_S)
        if since_s is not None and now_s - since_s > self._patience_s(limit_s):
            return f"hung: no answer for {now_s - since_s:.1f} s"
        if member.phase is ReplicaPhase.PENDING:
            if await self._is_placed(member):
                member.phase = ReplicaPhase.STARTING
                member.since_s = now_s
            else:
                await self._reports.while_pending(member.since_s)
        start_s = self.lifecycle.replica_start_timeout_s
        if member.phase is ReplicaPhase.STARTING and now_s - member.since_s > start_s:
            return f"not ready {start_s:.0f} s after it was placed"
        return None

    async def _is_placed(self, member: ReplicaHandle) -> bool:
        """Whether it has a place, as far as Ray tells."""
        try:
            states = await asyncio.to_thread(lambda: dict(groups()))
        except RAY_FAILED as exc:
            logger.warning("nobody tells whether %s has a place: %s", member.name, exc)
            return False
        return states.get(member.name) == "CREATED"

    def _patience_s(self, silence_s: float) -> float:
        now_s = self._clock.now_s()
        since = [s for m in self.members.values() if (s := m.silent_since_s) is not None]
        return patience_s([now_s - since_s for since_s in since], limit_s=silence_s)

    async def _gone(self, member: ReplicaHandle, reason: str) -> None:
        """Take a replica off the book, its process and placement group included."""
        if self.members.pop(member.name, None) is None:
            return
        logger.warning("%s is gone: %s", member.name, reason)
        self._departed[member.name] = None
        if len(self._departed) > MAX_DEPARTED:
            self._departed.popitem(last=False)
        member.is_gone.set()
        for task in member.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if member.phase is not ReplicaPhase.RETIRING:
            failures = self._num_failures.get(member.key, 0)
            self._num_failures[member.key] = failures + 1
            pause_s = min(BACKOFF_S * 2.0**failures, MAX_BACKOFF_S) if failures else 0.0
            self._not_before_s[member.key] = self._clock.now_s() + pause_s
            self.num_respawns += 1
        if not await self._remove(member):
            background(self._remove_later(member))
        await self.tell_scheduler(member.name)
        self._changed()

    async def _remove(self, member: ReplicaHandle) -> bool:
        """End its process and give its place back. Returns whether Ray did."""
        try:
            await asyncio.to_thread(remove, member.name, member.handle)
        except RAY_FAILED as exc:
            logger.warning("%s was not removed: %s", member.name, exc)
            return False
        return True

    async def _remove_later(self, member: ReplicaHandle) -> None:
        """Nobody else would: a place that is kept for nobody is lost to the cluster."""
        for _ in range(MAX_REMOVALS):
            await asyncio.sleep(REMOVE_PAUSE_S)
            if await self._remove(member):
                return
        logger.error(
            "%s was not removed %d times; its place stays taken", member.name, MAX_REMOVALS
        )

    async def tell_scheduler(self, name: str) -> None:
        """Let the scheduler forget a replica that is gone."""
        try:
            await call(scheduler_name(self._app), "replica_died", name, timeout_s=2.0)
        except QuadrigaError as exc:
            logger.info("the scheduler was not told of %s: %s", name, exc)

    def next_owners(self, member: ReplicaHandle) -> list[str]:
        """Replicas that can take over what another one runs, the emptiest first."""
        able = [
            (m.status.load.num_held, m.name)
            for m in self.members.values()
            if m.key[0] is Role.DECODE
            and m.phase is ReplicaPhase.READY
            and m.status is not None
            and m.fingerprint == member.fingerprint
            and not self._is_leaving(m)
        ]
        return [name for _, name in sorted(able) if name != member.name]

    async def _empty(self, member: ReplicaHandle, deadline_s: float) -> None:
        """Move what a retiring replica runs; what fails ends there, or with it."""
        try:
            await empty(call, member.name, lambda: self.next_owners(member), timeout_s=deadline_s)
        except QuadrigaError as exc:
            logger.info("%s hands nothing more over: %s", member.name, exc)

    async def _retire(self, member: ReplicaHandle, was_ready: bool, deadline_s: float) -> None:
        if was_ready:
            try:
                is_empty = await call_handle(
                    member.name, member.handle, "drain", deadline_s, timeout_s=deadline_s + 5.0
                )
                if not is_empty:
                    logger.warning("%s did not drain in %.0f s", member.name, deadline_s)
            except QuadrigaError as exc:
                logger.info("drain of %s: %s", member.name, exc)
        await self._stop(member)

    async def _stop(self, member: ReplicaHandle) -> None:
        """Ask a replica to end, then make sure of it."""
        if member.heard_s is not None:
            try:
                await call_handle(member.name, member.handle, "stop", timeout_s=STOP_GRACE_S)
                await self._until_off_the_book(member.name, STOP_GRACE_S)
            except QuadrigaError as exc:
                logger.info("stop of %s: %s", member.name, exc)
        while member.name in self.members:
            if await self._is_held():
                await self._gone(member, "stopped")
                return
            await asyncio.sleep(REMOVE_PAUSE_S)

    async def _until_off_the_book(self, name: str, timeout_s: float) -> None:
        member = self.members.get(name)
        if member is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await member.is_gone.wait()
        except TimeoutError:
            logger.warning("%s does not end by itself", name)
