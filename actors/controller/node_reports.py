"""Free resources that Ray does not know of: nodes report them while a replica waits for a place.

Ray 2.60 books a group's resources before it asks the node for them. Where that request fails, as it
may while a node joins, the booking stays until the node's next report, and a node reports only when
something on it changes (ray-project/ray, review of pull request 65271): the group waits beside a
free node for as long as nothing does.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.rpc.ray_rpc import RAY_FAILED
from quadriga.background import background
from quadriga.clock import Clock

logger = logging.getLogger(__name__)

PENDING_S = 5.0
"""A replica may wait so long for its place, and a node that joined for a replica."""
MAX_PAUSE_S = 60.0
REPORT_TIMEOUT_S = 20.0
MIN_SHARE = 0.0001
"""The least of a resource that Ray knows."""


class NodeReports:
    """Asks for reports ever less often, as there may be no room indeed; on one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._nodes: frozenset[str] = frozenset()
        self._due_s = 0.0
        self._pause_s = PENDING_S
        self._reporting = asyncio.Lock()

    async def while_pending(self, since_s: float) -> None:
        """A replica has had no place since then; returns without waiting for reports."""
        now_s = self._clock.now_s()
        try:
            nodes = await asyncio.to_thread(living_nodes)
        except RAY_FAILED as exc:
            logger.warning("Ray does not list its nodes: %s", exc)
            return
        if nodes != self._nodes:
            self._nodes = nodes
            self._pause_s = PENDING_S
            self._due_s = now_s + PENDING_S
        if now_s < max(self._due_s, since_s + PENDING_S) or self._reporting.locked():
            return
        self._due_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        background(self._ask())

    async def _ask(self) -> None:
        async with self._reporting:
            try:
                nodes = await asyncio.to_thread(have_nodes_report, REPORT_TIMEOUT_S)
            except RAY_FAILED as exc:
                logger.warning("no node was asked what it has free: %s", exc)
            else:
                logger.info("a place is lacking; free resources reported by %s", ", ".join(nodes))


def living_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray counts as alive; blocks."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return frozenset(node["NodeID"] for node in nodes if node["Alive"])


@ray.remote(num_cpus=0, max_retries=0)
def _nothing() -> None:
    """Takes a sliver of its node's resources and gives it back."""


def have_nodes_report(timeout_s: float) -> list[str]:
    """Have each node report its free resources to Ray's control store; blocks.

    A task that takes some of the resource that is the node itself is such a change. It finds room
    on a full node too, and asks for nothing that an autoscaler would add.

    Returns:
        Addresses of the nodes that did.
    """
    tasks: dict[Any, str] = {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        address = node["NodeManagerAddress"]
        own = f"node:{address}"
        if node["Alive"] and own in node["Resources"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = {"resources": {own: MIN_SHARE}, "scheduling_strategy": there}
            tasks[_nothing.options(**options).remote()] = address
    done, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout_s)
    for task in late:
        ray.cancel(task)
    reported = []
    for task in done:
        with suppress(RayError):  # the node has just ended
            ray.get(task)
            reported.append(tasks[task])
    return sorted(reported)
