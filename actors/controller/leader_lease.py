"""Whether this process is still its application's controller.

Where Ray takes a node for dead it starts the controller anew elsewhere, though the old process may
live on behind a broken link. Until its node learns of it, that one gets no answers, would take all
replicas for hung, and whatever it asked Ray for is done once the link is mended. So each controller
writes a name of its own into Ray's store, and acts only where the store, asked just now, has that
name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid

from actors.controller import controller_store
from actors.rpc.ray_rpc import RAY_FAILED
from quadriga.background import background

logger = logging.getLogger(__name__)

STORE_TIMEOUT_S = 3.0


class LeaderLease:
    """Held by the process that began last; on one event loop."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._token = uuid.uuid4().hex.encode()
        self._is_taken = False
        self._is_final = False
        self._asking: asyncio.Task[bytes | None] | None = None

    async def is_held(self) -> bool:
        """Whether the store names this process now; the first call writes its name.

        Does not return where another process holds it: this one ends.

        Returns:
            False also where the store does not answer in time.
        """
        if self._is_final:
            return True
        if self._asking is None or self._asking.done():
            self._asking = background(self._ask())
            # Its waiter may be gone; its failure concerns no other.
            self._asking.add_done_callback(lambda t: t.cancelled() or t.exception())
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                holder = await asyncio.shield(self._asking)
        except (TimeoutError, *RAY_FAILED) as exc:
            logger.warning("Ray's store does not say which process controls %s: %r", self._app, exc)
            return False
        if holder == self._token or self._is_final:
            return True
        logger.error("another process controls %s; this one ends", self._app)
        self._end()
        return False

    def keep(self) -> None:
        """It was decided to end the application: that is done, whatever the store says."""
        self._is_final = True

    async def _ask(self) -> bytes | None:
        if not self._is_taken:
            await asyncio.to_thread(controller_store.save, self._app, "controller", self._token)
            self._is_taken = True
        return await asyncio.to_thread(controller_store.load, self._app, "controller")

    def _end(self) -> None:
        """At once; in order would be through Ray, to which this process is the other one."""
        os._exit(1)
