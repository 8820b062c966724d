"""The care for the scheduler: it is there, knows what is served, and is restarted if it hangs.

Ray starts one that died anew, but none that ended itself, and takes none that hangs for dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.rpc.lifecycle import scheduler_name
from actors.rpc.lookup import get_scheduler
from actors.rpc.ray_rpc import RAY_FAILED, call, restart
from quadriga.clock import Clock
from quadriga.errors import QuadrigaError, ReplicaDied
from quadriga.policies.liveness import SCHEDULER_SILENCE_S, event_loop_stall_s

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0


class SchedulerWatch:
    """On the controller's event loop.

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
        """Seconds since it last answered, less those in which nobody could have heard it."""
        return self._clock.now_s() - self._heard_s

    def excuse(self, late_s: float) -> None:
        """For so long this process stood still or was cut off: that was no silence of others."""
        self._heard_s = min(self._clock.now_s(), self._heard_s + late_s)

    async def configure(
        self, config: dict[str, Any], models: Sequence[str], ingress_age_s: float
    ) -> None:
        """Tell the scheduler what is served; it is made or restarted where that is of no use.

        Args:
            ingress_age_s: Since an ingress was last heard of; by that the scheduler ends too.
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
            is_gone = isinstance(exc, ReplicaDied) and exc.code != "unreachable"
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
        """The application ends: from now on none is made."""
        self._is_retired = True

    async def _miss(self, began_s: float) -> None:
        """A call since `began_s` was not answered."""
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
        """Start one where there is none."""
        if self._is_retired or self._making.locked():
            return
        async with self._making:
            try:
                await asyncio.to_thread(get_scheduler, self._app, config)
            except RAY_FAILED as exc:
                logger.warning("the scheduler was not started: %s", exc)
