"""Strict sequences that lack layers: where they move to, and where layers are loaded for them.

A strict sequence never leaves a loaded exit below its threshold, so it may need layers that its
replica has not loaded. It is moved to a replica that has them, HELIOS or not. Where none has,
HELIOS has some loaded; its orders go to places, so none reaches a replica whose place another one
has taken over, for another model's sake. There the layers are loaded while the replica is on its
way out: else a strict request would wait there until its deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from quadriga.config.resolve import ReplicaSpec
from quadriga.control.replica_record import PlaceKey, ReplicaPhase, ReplicaRecord
from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import DepthClass, Role


def escalations(
    replicas: Iterable[ReplicaRecord], under_way: Collection[str]
) -> list[MigrationOrder]:
    """Orders that move parked sequences to the deepest replica of their model with room.

    Those of a replica that is on its way out are moved as well.

    Args:
        under_way: Sequences that were ordered to move a moment ago.
    """
    answering = [r for r in replicas if r.status is not None]
    ready = [r for r in answering if r.is_ready]
    orders = []
    for source in answering:
        here = source.depth_class
        for parked in source.load.parked:
            if parked.sequence_id in under_way:
                continue
            deeper = [
                r
                for r in ready
                if r.key[0].does(Role.DECODE)
                and r.depth_class.model == here.model
                and r.depth_class.depth > here.depth
                and r.info.numerics == source.info.numerics
                and r.has_room(parked)
            ]
            best = min(deeper, key=lambda r: (-r.depth_class.depth, r.load.num_held), default=None)
            if best is not None:
                orders.append(
                    MigrationOrder(
                        sequence_id=parked.sequence_id,
                        depth_class=here,
                        source=source.name,
                        destination=best.name,
                        cause=MigrationCause.ESCALATE,
                        gain=0.0,
                        num_tokens=parked.num_tokens,
                        remaining_tokens=0.0,
                    )
                )
    return orders


def depths_wanted(
    replicas: Iterable[ReplicaRecord],
    filling: Mapping[PlaceKey, ReplicaRecord],
    specs: Mapping[tuple[Role, DepthClass], ReplicaSpec],
) -> dict[str, int]:
    """Depths to load, by replica, where strict sequences wait and no order of HELIOS comes.

    Args:
        filling: The replica that fills each place now.
        specs: What each role can run.
    """
    wanted: dict[str, int] = {}
    for replica in replicas:
        is_here = replica.phase in (ReplicaPhase.READY, ReplicaPhase.RETIRING)
        is_here = is_here and replica.status is not None
        if not is_here or filling.get(replica.key, replica) is replica:
            continue
        role, load, here = replica.key[0], replica.load, replica.depth_class
        if role is Role.DECODE and not load.parked:
            continue  # those that run may do without
        known = (c.depth for r, c in specs if r is role and c.model == here.model)
        enough = min((d for d in known if d >= load.strict_depth), default=here.depth)
        if load.strict_depth > here.depth and enough > here.depth:
            wanted[replica.name] = enough
    return wanted
