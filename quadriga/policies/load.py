"""Which replicas may take a sequence, and how loaded each one is."""

from __future__ import annotations

from collections.abc import Sequence

from quadriga.core.replica import DepthClass, ReplicaSnapshot, Role
from quadriga.core.routing import PlaceRequest
from quadriga.policies.slot_reservation import admitted_tokens, promised_tokens


def taking_work(
    snapshots: Sequence[ReplicaSnapshot], *, now_unix_s: float, max_age_s: float
) -> list[ReplicaSnapshot]:
    """Replicas that were heard of lately and are not draining."""
    return [s for s in snapshots if not s.draining and now_unix_s - s.taken_unix_s <= max_age_s]


def candidates(
    snapshots: Sequence[ReplicaSnapshot],
    *,
    role: Role,
    depth_class: DepthClass | None = None,
    model: str | None = None,
    numerics: str = "",
    exclude: Sequence[str] = (),
    now_unix_s: float,
    max_age_s: float,
) -> list[ReplicaSnapshot]:
    """Replicas that do a part of the work and take some: of the class, and alike, where asked."""
    return [
        s
        for s in taking_work(snapshots, now_unix_s=now_unix_s, max_age_s=max_age_s)
        if s.info.role.does(role)
        and (depth_class is None or s.info.depth_class == depth_class)
        and (model is None or s.info.depth_class.model == model)
        and numerics in ("", s.info.numerics)
        and s.info.name not in exclude
    ]


def tokens_wanted(snapshot: ReplicaSnapshot, request: PlaceRequest) -> int:
    """What a decode replica would promise the sequence."""
    if snapshot.info.reservation == "longest":
        return request.max_total_tokens
    return promised_tokens(
        request.num_tokens,
        request.max_total_tokens,
        upper_tokens=snapshot.upper_tokens,
        num_held=num_held(snapshot),
        prediction=request.prediction,
        by_forecast=request.by_forecast,
    )


def has_room(snapshot: ReplicaSnapshot, request: PlaceRequest) -> bool:
    """Whether a decode replica could take the sequence, by its last report.

    Where memory is promised by what is used, paused sequences come before new ones, and a more
    important one takes the place of the least important.
    """
    info = snapshot.info
    held = num_held(snapshot)
    tokens = snapshot.reserved_tokens + tokens_wanted(snapshot, request)
    if info.reservation == "longest":
        return held < info.num_slots and tokens <= info.kv_capacity_tokens
    limit = admitted_tokens(info.kv_capacity_tokens, info.num_slots, info.max_model_len)
    is_below = held == 0 or tokens <= limit
    if held < info.num_slots and is_below and not snapshot.num_paused:
        return True
    return snapshot.least_priority is not None and request.priority < snapshot.least_priority


def num_held(snapshot: ReplicaSnapshot) -> int:
    """Sequences that run at a replica, wait there, or are on their way to it."""
    return snapshot.num_running + snapshot.num_waiting


def decode_pressure(snapshot: ReplicaSnapshot) -> float:
    """The scarcer of slots and cache tokens, as the share in use; 1 is full, higher is busier."""
    slots = num_held(snapshot) / snapshot.info.num_slots
    tokens = snapshot.reserved_tokens / snapshot.info.kv_capacity_tokens
    return max(slots, tokens)
