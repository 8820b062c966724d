"""Names of the actors, how the named ones are created, and how an actor ends."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.rpc.ray_rpc import NAMESPACE, RAY_FAILED
from quadriga.observability import tracing

logger = logging.getLogger(__name__)

KILL_GRACE_S = 5.0
MAX_CONCURRENT_CALLS = 100_000
SERVE_NAMESPACE = "serve"


def scheduler_name(app: str) -> str:
    return f"{app}:scheduler"


def controller_name(app: str) -> str:
    return f"{app}:controller"


@functools.cache
def actor_class(cls: type) -> Any:
    """Ray's form of an actor's class, the same one for all its actors.

    Each `ray.remote` makes another one, which every process with a handle loads and keeps. Without
    events of Ray's, calls take a tenth less on both sides.
    """
    options: Any = {"enable_task_events": False}
    return ray.remote(**options)(cls)


def create_or_get(cls: type, name: str, *args: Any) -> ActorHandle[Any]:
    """Return the detached actor of a name, created where there is none; blocks."""
    actor: ActorHandle[Any] = (
        actor_class(cls)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=MAX_CONCURRENT_CALLS,
            num_cpus=0,
        )
        .remote(*args)
    )
    return actor


async def end_this_actor() -> None:
    """End the actor this runs in for good: no restart, placement group and process gone."""
    await asyncio.to_thread(tracing.flush)
    try:
        me = ray.get_runtime_context().current_actor
        group = ray.util.get_current_placement_group()
        if group is not None:
            await asyncio.to_thread(ray.util.remove_placement_group, group)
        await asyncio.to_thread(ray.kill, me, no_restart=True)
    except RAY_FAILED as exc:
        logger.warning("ending through Ray failed: %s", exc)
    await asyncio.sleep(KILL_GRACE_S)
    os._exit(0)
