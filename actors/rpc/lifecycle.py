"""Names of the actors, how the named ones are created, and how an actor ends."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import os
import uuid
from dataclasses import asdict
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.rpc.ray_rpc import NAMESPACE, RAY_FAILED
from quadriga.config.resolve import ReplicaSpec
from quadriga.core.replica import PARTS, Role
from quadriga.observability import tracing

logger = logging.getLogger(__name__)

KILL_GRACE_S = 5.0
MAX_CONCURRENT_CALLS = 100_000
SERVE_NAMESPACE = "serve"


def scheduler_name(app: str) -> str:
    return f"{app}:scheduler"


def controller_name(app: str) -> str:
    return f"{app}:controller"


def new_replica_name(app: str, role: Role, ordinal: int) -> str:
    """A name no earlier incarnation had; the placement group carries the same."""
    return f"{app}:{role.value}:{ordinal}:{uuid.uuid4().hex[:8]}"


def parse_replica_name(app: str, name: str) -> tuple[Role, int] | None:
    """(role, ordinal) of one of this application's replicas; None for any other name."""
    parts = name.split(":")
    if len(parts) != 4 or parts[0] != app or parts[1] not in tuple(Role):
        return None
    return (Role(parts[1]), int(parts[2])) if parts[2].isdigit() else None


def fingerprint(spec: ReplicaSpec, config: dict[str, Any]) -> str:
    """Hash of all that a replica was started with and cannot change while it lives.

    What Ray reserves for it, and what KV memory it has where that is not configured, are left out:
    these follow the cluster's size. So is the depth, where it changes while a replica lives.
    """
    engine = asdict(spec.engine)
    engine |= dict.fromkeys(
        ("num_rows", "row_capacity_tokens", "kv_capacity_tokens", "kv_memory_bytes")
    )
    engine["memory"] = [config["engine"][name] for name in ("max_model_len", "kv_memory_bytes")]
    if config["helios"]["enabled"]:
        engine |= dict.fromkeys(("depth", "exits"))
    own = [part.value for part in PARTS if spec.role.does(part)]
    sections = ("transport", "lifecycle", *own)
    facts = [engine, dict(spec.node_labels), *(config[section] for section in sections)]
    facts.append(config["deterministic"])
    # The rest of the scheduler's section is the scheduler's alone, and may change at any time.
    scheduler = config["scheduler"]
    facts.append(scheduler["snapshot_interval_s"])
    facts += [scheduler["ares"][name] for name in ("predict_every_tokens", "reference_step_s")]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def actor_class(cls: type) -> Any:
    """Ray's form of an actor's class, the same one for all its actors.

    Each `ray.remote` makes another one, which every process with a handle loads and keeps.
    """
    return ray.remote(cls)


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
