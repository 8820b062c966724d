"""Sends a process's metrics to the hub at the controller."""

from __future__ import annotations

import logging

from actors.rpc.lifecycle import controller_name
from actors.rpc.ray_rpc import call
from quadriga.errors import QuadrigaError
from quadriga.observability.metrics import Registry

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 1.0


async def push_metrics(app: str, registry: Registry) -> None:
    """Send all values; a lost push costs nothing, since the next one has them too."""
    try:
        await call(
            controller_name(app),
            "push_metrics",
            registry.source,
            registry.snapshot(),
            timeout_s=PUSH_TIMEOUT_S,
        )
    except QuadrigaError as exc:
        logger.debug("metrics not pushed: %s", exc)
