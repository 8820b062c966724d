"""Replica processes: each an actor inside a placement group of its own name, both detached.

A tensor-parallel replica's group has a bundle for each rank; the first is the replica's own, and it
starts the others (`actors/replica/ranks.py`).

Nothing here waits for capacity: a group that cannot be placed yet stays pending, and so does the
actor inside it, while the controller goes on.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.rpc.lifecycle import actor_class
from actors.rpc.nodes import node_memory
from actors.rpc.ray_rpc import NAMESPACE, forget_actor
from quadriga.config.resolve import Hardware, ReplicaSpec
from quadriga.control.replica_names import parse_replica_name
from quadriga.core.replica import Role
from quadriga.engine.kernels.build import has_compiler

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 10_000
MIN_CPUS = 0.001
"""A placement group must reserve something."""


def spawn(name: str, spec: ReplicaSpec, config: dict[str, Any]) -> ActorHandle[Any]:
    """Ask Ray for a replica process; returns before it runs, or even has a place."""
    num_cpus = max(spec.num_cpus, MIN_CPUS)
    bundle = {"CPU": num_cpus} | ({"GPU": spec.num_gpus} if spec.num_gpus else {})
    ranks = spec.engine.tensor_parallel
    group = placement_group(
        [bundle] * ranks,
        name=name,
        lifetime="detached",
        bundle_label_selector=[dict(spec.node_labels)] * ranks if spec.node_labels else None,
    )
    actor: ActorHandle[Any] = (
        actor_class(_replica_class(spec.role))
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=MAX_CONCURRENT_CALLS,
            num_cpus=num_cpus,
            num_gpus=spec.num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        .remote(name, spec, config)
    )
    return actor


def _replica_class(role: Role) -> Any:
    """The class of a role, whose modules are imported where a replica of it is spawned."""
    if role is Role.PREFILL:
        from actors.replica.prefill import PrefillReplica

        return PrefillReplica
    if role is Role.DECODE:
        from actors.replica.decode import DecodeReplica

        return DecodeReplica
    from actors.replica.mixed import MixedReplica

    return MixedReplica


def remove(name: str, handle: ActorHandle[Any] | None) -> None:
    """Make sure that a replica's process and placement group are gone; may be repeated."""
    forget_actor(name)
    if handle is not None:
        try:
            ray.kill(handle, no_restart=True)
        except (RayError, ValueError) as exc:
            logger.info("kill of %s: %s", name, exc)
    if (group := _group(name)) is not None:
        ray.util.remove_placement_group(group)


def is_placed(name: str) -> bool:
    """Whether a replica's placement group is created; Ray would list all that ever were."""
    group = _group(name)
    return group is not None and ray.util.placement_group_table(group)["state"] == "CREATED"


def _group(name: str) -> Any:
    """A placement group that was not removed; None where there is none."""
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def living_replicas(app: str) -> list[str]:
    """Names of this application's replica actors, as Ray lists them."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [a["name"] for a in actors if a["namespace"] == NAMESPACE]
    return [name for name in names if parse_replica_name(app, name) is not None]


def groups_of(app: str) -> list[str]:
    """Names of this application's placement groups, removed ones left out."""
    groups = ray.util.placement_group_table().values()
    names = [group["name"] for group in groups if group["state"] != "REMOVED"]
    return [name for name in names if parse_replica_name(app, name) is not None]


def cluster_hardware() -> Hardware:
    """What the cluster has now."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return Hardware(
        num_cpus=float(resources.get("CPU", 1.0)),
        num_gpus=float(resources.get("GPU", 0.0)),
        nodes=tuple(node_memory().values()),
        has_compiler=has_compiler(),
    )
