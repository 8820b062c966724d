"""The controller's care for the scheduler and for the ingresses: those that hang are ended.

Ray starts a scheduler that died anew, but none that ended itself, and takes none that hangs for
dead. Serve finds a stopped ingress and starts another one, but leaves the old process until its
drain is over; as long as that process is there, its clients' connections stay open and silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.rpc.lifecycle import SERVE_NAMESPACE, create_or_get, scheduler_name
from actors.rpc.ray_rpc import RAY_FAILED, call, restart
from actors.scheduler.scheduler import Scheduler
from quadriga.clock import Clock
from quadriga.errors import QuadrigaError, is_known_death
from quadriga.policies.liveness import SCHEDULER_SILENCE_S, event_loop_stall_s, patience_s

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0


class SchedulerWatch:
    """Keeps the scheduler there and configured; on the controller's event loop.

    Args:
        may_act: Whether this process is its application's controller now.
    """

    def __init__(self, app: str, clock: Clock, may_act: Callable[[], Awaitable[bool]]) -> None:
        self._app = app
        self._clock = clock
        self._may_act = may_act
        self._heard_s = clock.now_s()
        self._making = asyncio.Lock()
        self._is_retired = False

    @property
    def silence_s(self) -> float:
        """Seconds since it last answered, less those in which this process could not notice."""
        return self._clock.now_s() - self._heard_s

    def excuse(self, late_s: float) -> None:
        """Do not count seconds in which this process stood still or was cut off."""
        self._heard_s = min(self._clock.now_s(), self._heard_s + late_s)

    async def configure(
        self, config: dict[str, Any], models: Sequence[str], ingress_age_s: float
    ) -> None:
        """Send the scheduler what is served; it is created or restarted where that fails.

        Args:
            ingress_age_s: Seconds since an ingress's last heartbeat; it ends the scheduler, too.
        """
        began_s, is_gone = self._clock.now_s(), False
        try:
            await call(
                scheduler_name(self._app),
                "configure",
                config,
                models,
                ingress_age_s,
                timeout_s=CALL_TIMEOUT_S,
            )
        except QuadrigaError as exc:
            logger.info("the scheduler was not configured: %s", exc)
            if exc.code == "timeout":
                await self._miss(began_s)
                return
            is_gone = is_known_death(exc)
        self._heard_s = self._clock.now_s()
        if is_gone:
            await self._make(config)

    async def stop(self) -> None:
        """End the scheduler with the application."""
        try:
            await call(scheduler_name(self._app), "stop", timeout_s=CALL_TIMEOUT_S)
        except QuadrigaError as exc:
            logger.info("the scheduler was not stopped: %s", exc)

    def retire(self) -> None:
        """Create no scheduler from now on: the application ends."""
        self._is_retired = True

    async def _miss(self, began_s: float) -> None:
        """Note that a call since `began_s` was not answered."""
        late_s = event_loop_stall_s(began_s, self._clock.now_s(), CALL_TIMEOUT_S)
        if not await self._may_act():
            self.excuse(self._clock.now_s() - began_s)
            return
        # Several calls may have been late by the same standstill: `excuse` ends at now.
        self.excuse(late_s)
        silence_s = self.silence_s
        if silence_s <= SCHEDULER_SILENCE_S:
            return
        self._heard_s = self._clock.now_s()
        logger.warning("the scheduler hangs: no answer for %.1f s; it is restarted", silence_s)
        try:
            await restart(scheduler_name(self._app))
        except QuadrigaError as exc:
            logger.warning("%s", exc)

    async def _make(self, config: dict[str, Any]) -> None:
        """Create a scheduler where there is none."""
        if self._is_retired or self._making.locked():
            return
        async with self._making:
            try:
                name = scheduler_name(self._app)
                await asyncio.to_thread(create_or_get, Scheduler, name, config)
            except RAY_FAILED as exc:
                logger.warning("the scheduler was not started: %s", exc)


SILENCE_S = 10.0
"""An ingress that sends no heartbeat for so long is ended; Serve starts another one."""
STALL_S = 2.0
"""The controller looks more often, unless its process stands still."""


class IngressWatch:
    """When each ingress last sent a heartbeat; those that send no name are not watched."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}
        self._looked_s: float | None = None
        self._is_looking = False

    def hear(self, actor: str, now_s: float) -> None:
        """Note a heartbeat of the ingress in an actor of Serve's."""
        if actor:
            self._heard_s[actor] = now_s

    def forget(self, actor: str) -> None:
        """Stop watching an ingress that is gone; another one, of another name, takes its place."""
        self._heard_s.pop(actor, None)

    def silent(self, now_s: float) -> list[str]:
        """Actors that are late with their heartbeat; replaced ones are among them."""
        return [a for a, heard_s in self._heard_s.items() if now_s - heard_s > SILENCE_S / 2]

    def hung(self, now_s: float) -> list[str]:
        """Actors that were silent for too long; each is named once.

        Where half of them are silent at once, the machine is stalled, not they: that takes longer.
        """
        stood_still_s = now_s - (now_s if self._looked_s is None else self._looked_s) - STALL_S
        self._looked_s = now_s
        if stood_still_s > 0:  # their heartbeats may lie there unread
            self._heard_s = {a: t + stood_still_s for a, t in self._heard_s.items()}
        silences_s = {a: now_s - heard_s for a, heard_s in self._heard_s.items()}
        longest_s = patience_s(list(silences_s.values()), limit_s=SILENCE_S)
        silent = [a for a, silence_s in silences_s.items() if silence_s > longest_s]
        for actor in silent:
            del self._heard_s[actor]
        return silent

    async def forget_gone(self, now_s: float) -> None:
        """Forget those that are silent because they were stopped.

        Their silence says nothing of the others' machine. Returns at once while an earlier call is
        under way.
        """
        if self._is_looking:
            return
        self._is_looking = True
        try:
            for actor in self.silent(now_s):
                if await _find_ingress(actor) is None:
                    self.forget(actor)
        except RAY_FAILED as exc:
            logger.info("Ray does not say which ingresses are gone: %s", exc)
        finally:
            self._is_looking = False

    async def end(self, actor: str, now_s: float) -> None:
        """End an ingress's process, if it is there: one that was stopped in order is gone already.

        Where Ray does not do it, the ingress is watched again, and is soon ended again.
        """
        try:
            handle = await _find_ingress(actor)
            if handle is not None:
                logger.warning("%s hangs; it is ended", actor)
                await asyncio.to_thread(ray.kill, handle, no_restart=True)
        except RAY_FAILED as exc:
            logger.warning("%s was not ended: %s", actor, exc)
            self.hear(actor, now_s - SILENCE_S / 2)


async def _find_ingress(actor: str) -> ActorHandle[Any] | None:
    try:
        return await asyncio.to_thread(ray.get_actor, actor, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
