"""Which replicas may take a sequence, and how loaded each one is."""

from __future__ import annotations

from collections.abc import Sequence

from quadriga.types import DepthClass, ReplicaSnapshot, Role


def candidates(
    snapshots: Sequence[ReplicaSnapshot],
    *,
    role: Role,
    depth_class: DepthClass | None = None,
    model: str | None = None,
    exclude: Sequence[str] = (),
    now_unix_s: float,
    max_age_s: float,
) -> list[ReplicaSnapshot]:
    """Replicas of a role that were heard of lately, are not draining, and fit the class."""
    return [
        s
        for s in snapshots
        if s.info.role is role
        and not s.draining
        and now_unix_s - s.taken_unix_s <= max_age_s
        and (depth_class is None or s.info.depth_class == depth_class)
        and (model is None or s.info.depth_class.model == model)
        and s.info.name not in exclude
    ]


def has_room(snapshot: ReplicaSnapshot, max_total_tokens: int) -> bool:
    """Whether a decode replica could reserve a sequence of this size, by its last report."""
    held = snapshot.num_running + snapshot.num_waiting
    return (
        held < snapshot.info.num_slots
        and snapshot.reserved_tokens + max_total_tokens <= snapshot.info.kv_capacity_tokens
    )


def decode_pressure(snapshot: ReplicaSnapshot) -> float:
    """The scarcer of slots and cache tokens, as the share in use; 1 is full, higher is busier."""
    held = snapshot.num_running + snapshot.num_waiting
    slots = held / snapshot.info.num_slots
    tokens = snapshot.reserved_tokens / snapshot.info.kv_capacity_tokens
    return max(slots, tokens)
