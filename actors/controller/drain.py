"""Moving a replica's sequences away before it ends, and the nodes that Ray will take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from actors.rpc.rpc_batcher import Caller
from quadriga.clock import Clock
from quadriga.core.migration import MigrationReport
from quadriga.errors import QuadrigaError, is_known_death

logger = logging.getLogger(__name__)

GCS_TIMEOUT_S = 2.0
AGAIN_S = 0.5
"""Between two rounds: what was on its way to the replica runs there by then."""
AWAY = ("moved", "finished")


async def hand_over(
    call: Caller, replica: str, next_owners: Sequence[str], *, reason: str, timeout_s: float
) -> None:
    """Have a decode replica move what it runs.

    Args:
        next_owners: The one with the most room first; the next gets what did not fit there.
        reason: For operators who ask why a sequence has moved.

    Raises:
        QuadrigaError: It does not answer.
    """
    for destination in next_owners:
        reports: list[MigrationReport] = await call(
            replica, "hand_over", destination, reason, timeout_s=timeout_s
        )
        moved = sum(r.outcome == "moved" for r in reports)
        if reports:
            logger.info(
                "%s moved %d of %d sequences to %s", replica, moved, len(reports), destination
            )
        if all(r.outcome in AWAY for r in reports):
            return


async def empty(
    call: Caller,
    replica: str,
    next_owners: Callable[[], Sequence[str]],
    *,
    reason: str,
    timeout_s: float,
) -> None:
    """Move what a decode replica runs, round after round, until it has died or this is cancelled.

    Args:
        next_owners: See `hand_over`, as `reason`; as of now.
    """
    while True:
        try:
            await hand_over(call, replica, next_owners(), reason=reason, timeout_s=timeout_s)
        except QuadrigaError as exc:
            logger.info("%s did not hand over what it runs: %s", replica, exc)
            if is_known_death(exc):
                return
        await asyncio.sleep(AGAIN_S)


def draining_nodes() -> dict[str, float]:
    """Ids of the nodes that Ray will take away, and when, in Unix seconds; blocks.

    Operators announce it (`ray drain-node`), the autoscaler does, and so does a node whose
    `ray start --block` gets SIGTERM. A node that goes at no certain time goes at infinity.

    Raises:
        RayError: Ray does not answer.
    """
    from ray._private import worker

    connection: Any = worker.global_worker
    found: Mapping[str, int] = connection.gcs_client.get_draining_nodes(timeout=GCS_TIMEOUT_S)
    return {node: ms / 1e3 if ms else float("inf") for node, ms in found.items()}


class LeavingNodes:
    """The nodes that will go, as Ray last said.

    Args:
        changed: Called when others will go than before.
        ask: See `draining_nodes`.
    """

    def __init__(
        self,
        changed: Callable[[], None],
        clock: Clock,
        ask: Callable[[], Mapping[str, float]] = draining_nodes,
    ) -> None:
        self._changed = changed
        self._ask = ask
        self._clock = clock
        self._until: Mapping[str, float] = {}
        self._is_asking = False

    async def look(self) -> None:
        """Ask again, unless an answer is on its way; without one the last stays true."""
        if self._is_asking:
            return
        self._is_asking = True
        try:
            found = await asyncio.to_thread(self._ask)
        except (RayError, RuntimeError, OSError) as exc:
            logger.info("Ray does not say which nodes go: %s", exc)
            return
        finally:
            self._is_asking = False
        if found.keys() != self._until.keys():
            logger.info("nodes that will go: %s", ", ".join(found) or "none")
            self._until = found
            self._changed()
        self._until = found

    def left_s(self, node_id: str) -> float | None:
        """Seconds until a node goes; None for one that stays."""
        until = self._until.get(node_id)
        return None if until is None else max(0.0, until - self._clock.unix_s())
